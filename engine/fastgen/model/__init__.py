"""Models: configurations, checkpoints and forward passes.

The HTTP process reads a model's shape and tokenizer: `source`, `hub`, `config`, `checkpoint.gguf_file` and
`checkpoint.dequantise` import neither torch nor numba. Everything else runs in the engine process.
"""

from __future__ import annotations

from fastgen.config import ConfigError


class ModelError(ConfigError):
    """A model that cannot be served. The message is one line that names the file or field and the remedy."""


def first_line(error: Exception) -> str:
    """Return the first line of a library's error message, or the error's type if it has none.

    torch appends hints for its own developers.
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

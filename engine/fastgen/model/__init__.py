"""Models: configurations, checkpoints and forward passes.

The HTTP process reads a model's shape, tokenizer and defaults. So `source`, `hub`, `config`, `generation_defaults`,
`pooling`, `processor`, `checkpoint.gguf_file` and `checkpoint.gguf_types` import neither torch nor numba. The other
modules run in the engine process only.
"""

from __future__ import annotations

from fastgen.settings import ConfigError


class ModelError(ConfigError):
    """A model that cannot be served. The message, one line, names the file, field or tensor at fault."""


def first_line(error: Exception) -> str:
    """Return the first line of a library's error message, or the error's type if it has none.

    torch appends hints for its own developers.
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

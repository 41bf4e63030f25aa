"""Errors of the tokenizers library, which come as bare exceptions and as panics of Rust, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tokenizers

from fastgen.settings import ConfigError

# Letters, digits, spaces, several scripts, and characters that no vocabulary has.
_PROBE = "Hello, world!  12 é 漢字 \U0001f600\n\ufffd\U000e0001<|x|>"


@contextmanager
def one_line_errors(name: object) -> Iterator[None]:
    """Turn errors of the library into a ConfigError for the file or metadata called `name`."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic is no Exception
        raise ConfigError(f"{name}: not a valid tokenizer: {' '.join(str(error).split())}") from None


def check_encodes(backend: tokenizers.Tokenizer, name: object) -> None:
    """Check that a tokenizer can encode texts: some damage only shows there.

    Raises:
        ConfigError: if it cannot.
    """
    with one_line_errors(name):
        backend.encode(_PROBE)
        backend.encode(_PROBE, add_special_tokens=False)

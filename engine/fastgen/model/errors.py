"""What goes wrong with the model that a user names."""

from __future__ import annotations

from fastgen.config import ConfigError


class ModelError(ConfigError):
    """A model that cannot be served. The message is one line: it names the file or field and the remedy."""

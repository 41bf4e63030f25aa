"""The user's cache, which keeps what takes minutes to build or load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(name: str, environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder `name` in this project's part of the user's cache. It may not exist yet."""
    return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastgen" / name

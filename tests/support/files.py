"""Files that another process reads while a test writes them."""

from __future__ import annotations

from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Replace a file at once, as the kubelet does. With `write_text`, its reader may see an empty file."""
    new = path.with_name(f".{path.name}")
    new.write_text(text)
    new.replace(path)

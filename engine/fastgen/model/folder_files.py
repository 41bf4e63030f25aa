"""Files of a model's folder, which may be damaged or hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastgen.model import ModelError

# The largest are indexes of checkpoints with many experts: a few megabytes.
_MOST_BYTES = 64 << 20


def read_json(path: Path) -> Any:
    """Return the JSON value of a file; raise a ModelError if it cannot be read."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ModelError(f"{path}: has more than {_MOST_BYTES >> 20} MiB, which no configuration has")
        return json.loads(content.decode("utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from None
    except RecursionError:
        raise ModelError(f"{path}: cannot be read as JSON (it is nested too deeply)") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; raise a ModelError if it cannot be read or holds another value."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return values


def is_inside(name: str) -> bool:
    """Return whether a path in one of the folder's files stays inside the folder."""
    path = Path(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name

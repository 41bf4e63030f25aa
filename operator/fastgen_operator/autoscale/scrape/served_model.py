"""What a ready engine says about its model, in the answer of `/ready`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Final

# An engine may report anything. The API server stores no integer above 2^63.
_MOST: Final = 10**15
_WORDS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ,._-]{0,63}")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of the pods of a revision.

    Attributes:
        revision: hash of their template.
        said: fields of `status.model`; None if the engine does not say what it serves, as earlier versions do not.
    """

    revision: str
    said: dict[str, Any] | None

    @classmethod
    def parse(cls, revision: str, body: bytes) -> ServedModel:
        """Read the answer of a ready engine. Values that an engine would not report are left out."""
        try:
            found = json.loads(body)["model"]
            said = {
                "family": _words(found.get("family")),
                "format": _words(found.get("format")),
                "parameters": _number(found.get("parameters")),
                "bytes": _number(found.get("bytes")),
                "maxModelLength": _number(found.get("max_model_len")),
            }
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return cls(revision, None)
        return cls(revision, {name: value for name, value in said.items() if value is not None} or None)


def _words(value: Any) -> str | None:
    return value if isinstance(value, str) and _WORDS.fullmatch(value) else None


def _number(value: Any) -> int | None:
    """Return the number; None for 0, which stands for an unknown one."""
    return value if type(value) is int and 0 < value <= _MOST else None

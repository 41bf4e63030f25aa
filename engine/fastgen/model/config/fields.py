"""Typed access to a model's configuration."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from fastgen.model import ModelError

# Larger sizes exist in no model. Bounds keep a damaged file from asking for unbounded memory.
_MOST = 2**31 - 1

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: Any) -> str:
    """Return a value for an error message: short, whatever a file holds."""
    return _SHORT.repr(value)


class Fields:
    """Typed getters that record which fields are read; null counts as missing.

    A getter raises a ModelError that names the field if its value is of another kind, or if it is missing and neither
    the getter nor `defaults` has a default. `defaults` are for fields that are absent, not for null.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "", defaults: Mapping[str, Any] | None = None) -> None:
        self._values = values
        self._prefix = prefix
        self._defaults = defaults or {}
        self._read: set[str] = set()

    def name_of(self, name: str) -> str:
        """Return the field's full name."""
        return self._prefix + name

    def unread(self) -> dict[str, Any]:
        """Return the fields with this prefix that are set and that no getter has read, by name without the prefix."""
        names = {
            full: full.removeprefix(self._prefix)
            for full, value in self._values.items()
            if full.startswith(self._prefix) and value is not None
        }
        return {name: self._values[full] for full, name in names.items() if name not in self._read}

    def has(self, name: str) -> bool:
        """Return whether the field is set. This does not count as reading it."""
        return self._values.get(self.name_of(name)) is not None

    def is_null(self, name: str) -> bool:
        """Return whether the field is null, instead of missing. This does not count as reading it."""
        full = self.name_of(name)
        return full in self._values and self._values[full] is None

    def reads(self, name: str) -> bool:
        """Return whether a getter has asked for the field."""
        return name in self._read

    def value(self, name: str) -> Any:
        """Return the field as it is, or None if it is missing."""
        return self._get(name)

    def integer(self, name: str, default: int | None = None, most: int = _MOST) -> int:
        """Return a positive integer of at most `most`."""
        value: int = self._positive(name, default, int, "an integer")
        if value > most:
            raise ModelError(f"{self.name_of(name)} is {shown(value)}: expected an integer of at most {most}")
        return value

    def count(self, name: str) -> int:
        """Return a non-negative integer; 0 if it is missing."""
        return self.integer(name) if self._is_set(name) else 0

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive, finite number."""
        return float(self._positive(name, default, int | float, "a number"))

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return `count` positive numbers."""
        value = self._get(name)
        if value is None:
            raise self._missing(name)
        if not isinstance(value, list) or len(value) != count:
            raise ModelError(f"{self.name_of(name)}: expected a list of {count} numbers")
        return tuple(Fields({self.name_of(name): entry}, self._prefix).number(name) for entry in value)

    def optional_number(self, name: str) -> float | None:
        """Return a positive number, or None if it is missing."""
        return None if self._get(name) is None else self.number(name)

    def optional_integer(self, name: str) -> int | None:
        """Return a positive integer, or None if it is missing."""
        return None if self._get(name) is None else self.integer(name)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """Return a boolean."""
        value = self._get(name, default)
        if value is None:
            raise self._missing(name)
        if not isinstance(value, bool):
            raise ModelError(f"{self.name_of(name)} is {shown(value)}: expected true or false")
        return value

    def flags(self, name: str, count: int) -> tuple[bool, ...]:
        """Return `count` booleans."""
        values = self._entries(name, bool, "booleans") or []
        if len(values) != count:
            raise ModelError(f"{self.name_of(name)} has {len(values)} entries: expected {count}")
        return tuple(values)

    def text(self, name: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._get(name, default)
        if value is None:
            raise self._missing(name)
        if not isinstance(value, str):
            raise ModelError(f"{self.name_of(name)} is {shown(value)}: expected a string")
        return value

    def texts(self, name: str) -> list[str] | None:
        """Return a list of strings, or None if it is missing."""
        return self._entries(name, str, "strings")

    def integers(self, name: str) -> list[int] | None:
        """Return a list of integers, or None if it is missing."""
        return self._entries(name, int, "integers")

    def mapping(self, name: str) -> Mapping[str, Any]:
        """Return an object; empty if it is missing."""
        value = self._get(name, {})
        if not isinstance(value, Mapping):
            raise ModelError(f"{self.name_of(name)} is {shown(value)}: expected an object")
        return value

    def _entries(self, name: str, kind: type, expected: str) -> list[Any] | None:
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not set(map(type, value)) <= {kind}:
            raise ModelError(f"{self.name_of(name)} is {shown(value)}: expected a list of {expected}")
        return value

    def _positive(self, name: str, default: float | None, kind: Any, expected: str) -> Any:
        value = self._get(name, default)
        if value is None:
            raise self._missing(name)
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
            raise ModelError(f"{self.name_of(name)} is {shown(value)}: expected {expected} above 0")
        return value

    def _is_set(self, name: str) -> bool:
        value = self._get(name)
        return value is not None and value is not False and value != 0

    def _missing(self, name: str) -> ModelError:
        return ModelError(f"{self.name_of(name)} is missing from the model's configuration")

    def _get(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        full = self.name_of(name)
        value = self._values[full] if full in self._values else self._defaults.get(name)
        return default if value is None else value

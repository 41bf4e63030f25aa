"""Typed access to a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastgen.model import ModelError


class Fields:
    """Typed getters; null counts as missing.

    A getter raises a ModelError that names the field if its value is of another kind, or if it is missing and the
    getter has no default.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def name_of(self, name: str) -> str:
        """Return the field's full name."""
        return self._prefix + name

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer."""
        value: int = self._positive(name, default, int, "an integer")
        return value

    def count(self, name: str) -> int:
        """Return a non-negative integer; 0 if it is missing."""
        return self.integer(name) if self._get(name) else 0

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number."""
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

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise ModelError(f"{self.name_of(name)} is {value!r}: expected true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """Return a string."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.name_of(name)} is {value!r}: expected a string")
        return value

    def _positive(self, name: str, default: float | None, kind: Any, expected: str) -> Any:
        value = self._get(name, default)
        if value is None:
            raise self._missing(name)
        if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
            raise ModelError(f"{self.name_of(name)} is {value!r}: expected {expected} above 0")
        return value

    def _missing(self, name: str) -> ModelError:
        return ModelError(f"{self.name_of(name)} is missing from the model's configuration")

    def _get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(self.name_of(name))
        return default if value is None else value

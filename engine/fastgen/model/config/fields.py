"""Typed access to a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastgen.model import ModelError


class Fields:
    """Typed getters whose errors name the field. null counts as missing."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive integer.

        Raises:
            ModelError: if the value is something else, or missing without a default.
        """
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self._prefix}{name} is {value!r}: expected an integer above 0")
        return value

    def count(self, name: str) -> int:
        """Return a non-negative integer; 0 if it is missing.

        Raises:
            ModelError: if the value is something else.
        """
        return self.integer(name) if self._values.get(self._prefix + name) else 0

    def text(self, name: str, default: str) -> str:
        """Return a string.

        Raises:
            ModelError: if the value is something else.
        """
        value = self._values.get(self._prefix + name, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.name_of(name)} is {value!r}: expected a string")
        return value

    def name_of(self, name: str) -> str:
        """Return the field's full name."""
        return self._prefix + name

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive number.

        Raises:
            ModelError: if the value is something else, or missing without a default.
        """
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"{self._prefix}{name} is {value!r}: expected a number above 0")
        return float(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """Return `count` positive numbers.

        Raises:
            ModelError: if the value is something else, or missing.
        """
        value = self._get(name, None)
        if not isinstance(value, list) or len(value) != count:
            raise ModelError(f"{self._prefix}{name}: expected a list of {count} numbers")
        return tuple(Fields({name: entry}, self._prefix).number(name) for entry in value)

    def optional_number(self, name: str) -> float | None:
        """Return a positive number, or None if it is missing.

        Raises:
            ModelError: if the value is something else.
        """
        return None if self._values.get(self._prefix + name) is None else self.number(name)

    def optional_integer(self, name: str) -> int | None:
        """Return a positive integer, or None if it is missing.

        Raises:
            ModelError: if the value is something else.
        """
        return None if self._values.get(self._prefix + name) is None else self.integer(name)

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean.

        Raises:
            ModelError: if the value is something else.
        """
        value = self._values.get(self._prefix + name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self._prefix}{name} is {value!r}: expected true or false")
        return value

    def _get(self, name: str, default: float | None) -> Any:
        value = self._values.get(self._prefix + name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._prefix}{name} is missing from the model's configuration")
        return value

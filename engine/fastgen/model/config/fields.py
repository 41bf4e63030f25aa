"""Typed look-ups in a model's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastgen.model import ModelError


class Fields:
    """Look-ups that name the field when it is missing or of another type. null counts as missing."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number above 0.

        Raises:
            ModelError: when it is none, or missing without a default.
        """
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self._prefix}{name} is {value!r}: a whole number above 0 was expected")
        return value

    def count(self, name: str) -> int:
        """A whole number from 0; 0 where it is missing.

        Raises:
            ModelError: when it is something else.
        """
        return self.integer(name) if self._values.get(self._prefix + name) else 0

    def text(self, name: str, default: str) -> str:
        """A text.

        Raises:
            ModelError: when it is something else.
        """
        value = self._values.get(self._prefix + name, default)
        if not isinstance(value, str):
            raise ModelError(f"{self.name_of(name)} is {value!r}: a text was expected")
        return value

    def name_of(self, name: str) -> str:
        """The field's name in full."""
        return self._prefix + name

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0.

        Raises:
            ModelError: when it is none, or missing without a default.
        """
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"{self._prefix}{name} is {value!r}: a number above 0 was expected")
        return float(value)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """`count` numbers above 0.

        Raises:
            ModelError: when they are something else, or missing.
        """
        value = self._get(name, None)
        if not isinstance(value, list) or len(value) != count:
            raise ModelError(f"{self._prefix}{name}: a list of {count} numbers was expected")
        return tuple(Fields({name: entry}, self._prefix).number(name) for entry in value)

    def optional_number(self, name: str) -> float | None:
        """A number above 0, or None where there is none.

        Raises:
            ModelError: when it is something else.
        """
        return None if self._values.get(self._prefix + name) is None else self.number(name)

    def optional_integer(self, name: str) -> int | None:
        """A whole number above 0, or None where there is none.

        Raises:
            ModelError: when it is something else.
        """
        return None if self._values.get(self._prefix + name) is None else self.integer(name)

    def flag(self, name: str, default: bool) -> bool:
        """true or false.

        Raises:
            ModelError: when it is something else.
        """
        value = self._values.get(self._prefix + name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self._prefix}{name} is {value!r}: true or false was expected")
        return value

    def _get(self, name: str, default: float | None) -> Any:
        value = self._values.get(self._prefix + name)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self._prefix}{name} is missing from the model's configuration")
        return value

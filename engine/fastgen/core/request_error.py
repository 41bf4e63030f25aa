"""The error for a request that cannot be served."""

from __future__ import annotations

from collections.abc import Sequence

_MOST_NAMED = 16  # items that an error message lists


class RequestError(ValueError):
    """A request that cannot be served. `param` names the invalid field; the message says how to fix it."""

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.param = param


def enumeration(items: Sequence[object]) -> str:
    """Return the items as text, cut after the first few."""
    named = ", ".join(map(str, items[:_MOST_NAMED]))
    return named if len(items) <= _MOST_NAMED else f"{named} and {len(items) - _MOST_NAMED} more"


def require(holds: bool, param: str, value: object, allowed: str) -> None:
    """Raise a RequestError that shows the value and says which are allowed, unless the condition holds."""
    if not holds:
        raise RequestError(f"{param} is {value}: it must be {allowed}", param)

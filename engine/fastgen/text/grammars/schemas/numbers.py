"""Bounds and values of numbers, which llguidance holds as 64-bit floats and some as 64-bit integers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from fastgen.text.grammars.schemas.errors import SchemaError, within

# Integers that 64-bit floats represent one by one.
_EXACT = 1 << 53
# The extreme bounds of integers that the library computes with. -2^63 itself overflows its stack.
_LEAST, _GREATEST = -((1 << 63) - 1024), (1 << 63) - 1
# Least bound of integers that needs one on the other side: the library counts in 64 bits up to 99...9.
_LONG = 10**18
# Greatest bound of floats; the library converts their integral part to 64 bits.
_MOST_FLOAT = 1e15
# Least bound of floats, apart from 0.
_LEAST_FLOAT = 1e-15
# Greatest `multipleOf`, without its decimal point: the library builds an automaton of as many states. Together they may
# be multiplied, where schemas are merged.
_MOST_STEPS = 20_000
_MOST_COMMON_STEPS = 100_000
_MOST_PLACES = 9

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def number(value: object, place: str) -> int | float:
    """Return a finite JSON number.

    Raises:
        SchemaError: if it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SchemaError.at(place, "must be a number")
    return value


def integer_bounds(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the bounds of integers as inclusive ones that 64-bit floats represent.

    They allow nothing else than the given bounds. Of integers that do not fit into 64 bits, and of a few at a bound
    beyond 2^53, they allow fewer.

    Raises:
        SchemaError: if a bound is not a number, or no 64-bit integer is within the bounds.
    """
    lower, upper = _bounds(schema, place)
    least = None if lower is None else math.floor(lower[0]) + 1 if lower[1] else math.ceil(lower[0])
    most = None if upper is None else math.ceil(upper[0]) - 1 if upper[1] else math.floor(upper[0])
    if least is not None and most is not None and least > most:
        raise SchemaError.at(place, "no integer is within the bounds; lower the minimum or raise the maximum")
    if (least is not None and least > _GREATEST) or (most is not None and most < _LEAST):
        raise SchemaError.at(
            place, "only integers beyond 64 bits are within the bounds; use smaller bounds or a string"
        )
    if (least is not None and least >= _LONG) or (most is not None and most <= -_LONG):
        least, most = _LEAST if least is None else least, _GREATEST if most is None else most
    least = None if least is None else _rounded_up(max(least, _LEAST))
    most = None if most is None else -_rounded_up(-min(most, _GREATEST))
    if least is not None and most is not None and least > most:
        raise SchemaError.at(place, "no integer within the bounds is a 64-bit float; use smaller bounds or a string")
    found = {"minimum": least, "maximum": most}
    return {name: bound for name, bound in found.items() if bound is not None}


def float_bounds(schema: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the bounds of numbers in the form of draft 2020-12.

    An exclusive bound of 0 becomes an inclusive one of 1e-15 or -1e-15.

    Raises:
        SchemaError: if a bound is not a number, or too large or small for the library, or no number is within them.
    """
    lower, upper = _bounds(schema, place)
    for bound in (lower, upper):
        if bound is not None and bound[0] and not _LEAST_FLOAT <= abs(bound[0]) <= _MOST_FLOAT:
            raise SchemaError.at(
                place,
                f"bounds of numbers must be 0, or ±{_LEAST_FLOAT:g} to ±{_MOST_FLOAT:g}; leave the bound out",
            )
    is_empty = lower is not None and upper is not None and lower[0] == upper[0] and (lower[1] or upper[1])
    # With a bound below 1 on its other side, the library lets 0 pass as greater or less than 0.
    if lower is not None and not lower[0] and lower[1]:
        lower = Fraction(repr(_LEAST_FLOAT)), False
    if upper is not None and not upper[0] and upper[1]:
        upper = -Fraction(repr(_LEAST_FLOAT)), False
    if is_empty or (lower is not None and upper is not None and lower[0] > upper[0]):
        raise SchemaError.at(place, "no number is within the bounds; lower the minimum or raise the maximum")
    found: dict[str, Any] = {}
    if lower is not None:
        found["exclusiveMinimum" if lower[1] else "minimum"] = _plain(lower[0])
    if upper is not None:
        found["exclusiveMaximum" if upper[1] else "maximum"] = _plain(upper[0])
    return found


def step(value: object, place: str) -> int | float:
    """Return a `multipleOf`.

    Raises:
        SchemaError: if it is not a positive number, or the library would need too much memory for it.
    """
    given = number(value, place)
    if given <= 0:
        raise SchemaError.at(place, "must be greater than 0")
    exact = Fraction(repr(given))
    places = next((places for places in range(_MOST_PLACES + 1) if (exact * 10**places).denominator == 1), None)
    if places is None or exact * 10**places > _MOST_STEPS:
        raise SchemaError.at(
            place,
            f"{given} cannot be enforced: without the decimal point it must be at most {_MOST_STEPS}, with up to "
            f"{_MOST_PLACES} decimals; leave it out",
        )
    return given


def check_steps(steps: Iterable[int | float]) -> None:
    """Check the `multipleOf` of all schemas in a document that may be merged.

    Raises:
        SchemaError: if their least common multiple is too large for the library, which overflows.
    """
    exact = {Fraction(repr(each)) for each in steps}
    places = math.lcm(*(each.denominator for each in exact))
    if len(exact) > 1 and math.lcm(*(int(each * places) for each in exact)) > _MOST_COMMON_STEPS:
        raise SchemaError(
            "multipleOf: its values have a least common multiple that is too large to be enforced; leave one out"
        )


def check_value(value: object, place: str) -> None:
    """Check the numbers in a constant, at any depth.

    Raises:
        SchemaError: if one of them is beyond 2^53, where 64-bit floats are not exact, or not finite.
    """
    if isinstance(value, Mapping):
        for key, part in value.items():
            check_value(part, within(place, key))
    elif isinstance(value, list):
        for index, part in enumerate(value):
            check_value(part, within(place, index))
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > _EXACT:
        raise SchemaError.at(place, f"{value if abs(value) < 1 << 70 else 'this integer'} is beyond 2^53; use a string")
    elif isinstance(value, float) and abs(number(value, place)) > _EXACT:  # it would become an integer
        raise SchemaError.at(place, f"{value} is beyond 2^53; use a string")


# A bound and whether it is exclusive.
_Bound = tuple[Fraction, bool]


def _bounds(schema: Mapping[str, Any], place: str) -> tuple[_Bound | None, _Bound | None]:
    """Return the greatest lower bound and the least upper bound, given as in any draft; None if there is none."""
    lower = _bound(schema, place, "minimum", "exclusiveMinimum")
    upper = _bound(schema, place, "maximum", "exclusiveMaximum")
    return max(lower, default=None), min(upper, key=lambda bound: (bound[0], not bound[1]), default=None)


def _bound(schema: Mapping[str, Any], place: str, inclusive: str, exclusive: str) -> list[_Bound]:
    given = schema.get(exclusive)
    if given is True and schema.get(inclusive) is None:
        raise SchemaError.at(within(place, exclusive), f"true applies to a {inclusive}, and there is none")
    # In draft 4, `exclusive…` says whether the other bound is.
    names = [(inclusive, given)] if isinstance(given, bool) else [(inclusive, False), (exclusive, True)]
    # The decimal text counts: 0.1 is a tenth.
    return [
        (Fraction(repr(number(schema[name], within(place, name)))), strict)
        for name, strict in names
        if schema.get(name) is not None
    ]


def _rounded_up(bound: int) -> int:
    """Return the least integer from `bound` that a 64-bit float represents."""
    if abs(bound) <= _EXACT:
        return bound
    nearest = int(float(bound))
    return nearest if nearest >= bound else int(math.nextafter(float(bound), math.inf))


def _plain(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)

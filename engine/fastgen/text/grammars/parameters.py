"""Parameters of Lark rules (`rule::incr(_)`) and their conditions (`%if lt(_, 5)`), as llguidance computes them.

A parameter is an unsigned integer of 64 bits. See the library's docs/parametric.md.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from functools import lru_cache

_MASK = (1 << 64) - 1
_PART = re.compile(r"\s*(?:(0x[\da-fA-F]+|\d+)|\[\s*(\d+)\s*:\s*(\d+)\s*\]|(\w+)|(.))")

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip

# Returns the value of an expression, or whether a condition holds, for the parameter of the rule that it is in.
Function = Callable[[int], int]


@lru_cache(1024)
def parsed(text: str) -> Function:
    """Return the function that an expression or a condition describes.

    Raises:
        ValueError: if it is neither.
    """
    reader = _Reader(text)
    function = reader.expression()
    reader.take("")
    return function


class _Reader:
    def __init__(self, text: str) -> None:
        self._parts = [match.groups() for match in _PART.finditer(text)]
        self._place = 0

    def _next(self) -> tuple[str | None, ...]:
        self._place += 1
        return self._parts[self._place - 1] if self._place <= len(self._parts) else (None, None, None, None, "")

    def take(self, mark: str) -> None:
        if self._next()[4] != mark:
            raise ValueError(mark)

    def _number(self) -> int:
        number = self._next()[0]
        if number is None:
            raise ValueError("a number")
        return int(number, 16 if number.startswith("0x") else 10)

    def _range(self) -> tuple[int, int]:
        """Return the first bit of a range, and the largest number that fits into it."""
        _, first, end, name, _ = self._next()
        if name == "_":
            return 0, _MASK
        if first is None or end is None or not int(first) < int(end) <= 64:
            raise ValueError("a range")
        return int(first), (1 << int(end) - int(first)) - 1

    def expression(self) -> Function:
        number, _, _, name, _ = self._next()
        if number is not None:
            value = int(number, 16 if number.startswith("0x") else 10)
            return lambda _: value
        if name == "_":
            return lambda parameter: parameter
        if name == "true":
            if self._place < len(self._parts) and self._parts[self._place][4] == "(":
                self.take("(")
                self.take(")")
            return lambda _: True
        if name is None:
            raise ValueError("a function")
        self.take("(")
        function = self._call(name)
        self.take(")")
        return function

    def _call(self, name: str) -> Function:
        """Read the arguments of a function."""
        if name in ("and", "or"):
            left = self.expression()
            self.take(",")
            right = self.expression()
            if name == "and":
                return lambda parameter: left(parameter) and right(parameter)
            return lambda parameter: left(parameter) or right(parameter)
        if name == "not":
            negated = self.expression()
            return lambda parameter: not negated(parameter)
        if name in ("set_bit", "clear_bit", "bit_set", "bit_clear", "bit_and", "bit_or"):
            number = self._number()
            bit = 1 << number if name not in ("bit_and", "bit_or") else number
            functions: dict[str, Function] = {
                "set_bit": lambda parameter: parameter | bit,
                "clear_bit": lambda parameter: parameter & ~bit,
                "bit_set": lambda parameter: bool(parameter & bit),
                "bit_clear": lambda parameter: not parameter & bit,
                "bit_and": lambda parameter: parameter & number,
                "bit_or": lambda parameter: parameter | number,
            }
            return functions[name]
        first, most = self._range()
        if name in ("incr", "decr", "is_ones", "is_zeros"):
            functions = {
                "incr": lambda parameter: parameter if parameter >> first & most == most else parameter + (1 << first),
                "decr": lambda parameter: parameter if not parameter >> first & most else parameter - (1 << first),
                "is_ones": lambda parameter: parameter >> first & most == most,
                "is_zeros": lambda parameter: not parameter >> first & most,
            }
            return functions[name]
        compare = _COMPARISONS.get(name.removeprefix("bit_count_"))
        if compare is None:
            raise ValueError(name)
        self.take(",")
        other = self._number()
        if name.startswith("bit_count_"):
            return lambda parameter: compare((parameter >> first & most).bit_count(), other)
        return lambda parameter: compare(parameter >> first & most, other)

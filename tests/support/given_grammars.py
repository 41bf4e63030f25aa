"""Grammars for tests: constraints that are made by hand, instead of compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from fastgen.core.constraint import Constraint
from fastgen.core.sampling_params import Grammar


class Given:
    """Grammars that return these constraints, in turn."""

    def __init__(self, *constraints: Constraint) -> None:
        self.left = list(constraints)

    def compile(self, _grammar: Grammar) -> Future[Callable[[], Constraint]]:
        compiled, constraint = Future[Callable[[], Constraint]](), self.left.pop(0)
        compiled.set_result(lambda: constraint)
        return compiled

    def prepare(self) -> None:
        """Do nothing: there are no tables."""

    def fill_masks(self, constraints: Sequence[Constraint], masks: memoryview) -> list[int]:
        width = len(masks) // len(constraints)
        for row, constraint in enumerate(constraints):
            constraint.fill_mask(masks[row * width : (row + 1) * width])
        return []

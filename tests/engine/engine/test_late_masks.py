"""A sequence whose grammar's mask takes long waits alone: no other one does, and its tokens stay the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import islice

import pytest

from fastgen.core.constraint import Constraint
from fastgen.core.request import FinishReason, Request
from fastgen.core.sampling_params import Grammar, SamplingParams
from support.simulation import SimulatedRunner, make_engine, solo
from support.workloads import random_window

GRAMMAR = Grammar(kind="json_object")


@dataclass
class Anything:
    """A grammar that allows every token."""

    late: Sequence[int]  # for each mask in turn, the steps for which it is late
    accepted: list[int] = field(default_factory=list)
    is_known: bool = False
    num_waits: int = 0
    end: FinishReason | None = None

    @property
    def is_pending(self) -> bool:
        return self.num_waits > 0

    def is_late(self) -> bool:
        """Look for the mask."""
        if not self.is_known and not self.is_pending:
            self.num_waits, self.is_known = self.late[len(self.accepted) % len(self.late)], True
        return self.is_pending

    def fill_mask(self, mask: memoryview) -> None:
        raise NotImplementedError

    def accept(self, token: int) -> None:
        assert not self.is_pending
        self.accepted.append(token)
        self.is_known = False


class Late:
    """Grammars whose masks may be late."""

    def __init__(self, *constraints: Anything) -> None:
        self._all = constraints
        self._left = list(constraints)

    def compile(self, _grammar: Grammar) -> Future[Callable[[], Constraint]]:
        compiled, constraint = Future[Callable[[], Constraint]](), self._left.pop(0)
        compiled.set_result(lambda: constraint)
        return compiled

    def prepare(self) -> None:
        """Do nothing: there are no tables."""

    def fill_masks(self, constraints: Sequence[Constraint], _masks: memoryview) -> list[int]:
        return [row for row, each in enumerate(constraints) if isinstance(each, Anything) and each.is_late()]

    def pass_step(self) -> None:
        """Compute on all masks for the time of a step."""
        for constraint in self._all:
            constraint.num_waits = max(0, constraint.num_waits - 1)


def request(name: str, prompt: list[int], max_tokens: int, grammar: Grammar | None = GRAMMAR) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, seed=0, grammar=grammar)
    return Request(id=name, prompt_token_ids=prompt, sampling=sampling)


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3])
@pytest.mark.parametrize("seed", range(48))
def test_late_masks_change_no_token(seed: int, steps_in_flight: int) -> None:
    source = random.Random(seed)
    slots = (3, 5, 30)[seed % 3] if 16 <= seed < 32 else 0
    num_blocks = source.choice([7, 9, 30])
    window = random_window(source, 4) if seed >= 32 else None
    runner = SimulatedRunner(num_blocks, 4, num_state_slots=slots, window_group=window, steps_in_flight=steps_in_flight)
    engine = make_engine(runner, token_budget=source.choice([4, 9]), max_sequences=4)
    shared = [source.randrange(1, 90) for _ in range(8)]
    asked = {
        name: request(
            name,
            shared[: source.choice([0, 4, 8])] + [source.randrange(1, 90) for _ in range(source.choice([1, 2, 3, 5]))],
            source.randrange(1, 10),
            source.choice([GRAMMAR, GRAMMAR, None]),
        )
        for name in "abcdef"
    }
    asked |= {name: replace(asked[source.choice("abcdef")], id=name) for name in "gh"}
    num_grammars = sum(each.sampling.grammar is not None for each in asked.values())
    engine._grammars = grammars = Late(
        *(Anything([source.choice([0, 0, 1, 2, 5]) for _ in range(5)]) for _ in range(num_grammars))
    )
    tokens: dict[str, list[int]] = {name: [] for name in asked}
    for each in asked.values():
        engine.add(each)
    for _ in range(2000):
        if not engine.has_work:
            break
        for output in engine.step().outputs:
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()
        grammars.pass_step()
    assert not engine.has_work
    size = None if window is None else window.window
    assert tokens == {name: list(islice(solo(each, size), each.sampling.max_tokens)) for name, each in asked.items()}


@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_the_others_have_a_token_in_every_step_while_a_mask_is_late(steps_in_flight: int) -> None:
    engine = make_engine(SimulatedRunner(16, 4, steps_in_flight=steps_in_flight), token_budget=16, max_sequences=4)
    engine._grammars = Late(Anything([1_000_000]))
    engine.add(request("slow", [1, 2, 3], 9))
    engine.add(request("free", [4, 5, 6], 9, None))
    outputs = [output.request_id for _ in range(9) for output in engine.step().outputs]
    assert outputs == ["free"] * 9
    assert engine.has_work
    assert engine.cancel("slow")
    assert not engine.has_work
    engine.check_integrity()

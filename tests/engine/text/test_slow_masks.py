"""No step waits long for a mask, and no constraint for the mask of another one."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import numpy.typing as npt
import pytest

from engine.text.matching import END, byte_tokenizer
from fastgen.core.request import FinishReason
from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars import masks as masks_module
from fastgen.text.grammars import matcher as matcher_module
from fastgen.text.grammars.compiled import CompiledGrammars
from fastgen.text.grammars.matcher import GrammarMatcher
from support.waiting import HANG_SECONDS, eventually

TOKENIZER = byte_tokenizer(None)
WIDTH = -(-TOKENIZER.vocab_size // 32)


class Matcher:
    """A matcher that computes a mask when the test says so."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.num_masks = 0
        self.is_asked = False
        self.consumed: list[int] = []

    def consume_tokens(self, tokens: list[int]) -> None:
        self.is_asked = True
        self.consumed += tokens

    def compute_bitmask(self) -> bytes:
        assert self.may_go_on.wait(HANG_SECONDS)
        self.num_masks += 1
        return b"\1" + bytes(4 * WIDTH - 1)

    def is_error(self) -> bool:
        return False


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> CompiledGrammars:
    monkeypatch.setattr(masks_module, "WAIT_SECONDS", 0.2)
    return CompiledGrammars(lambda: TOKENIZER, TOKENIZER.vocab_size, [END], num_threads=2)


def slow(factory: CompiledGrammars, pattern: str = "a+") -> tuple[GrammarMatcher, Matcher]:
    constraint, matcher = factory(Grammar(kind="regex", text=pattern)), Matcher()
    assert isinstance(constraint, GrammarMatcher)
    constraint.state = matcher  # type: ignore[assignment]
    return constraint, matcher


def look(factory: CompiledGrammars, *constraints: object) -> tuple[list[int], npt.NDArray[np.uint32]]:
    masks = np.zeros((len(constraints), WIDTH), np.uint32)
    return factory.fill_masks(constraints, masks.reshape(-1).data), masks  # type: ignore[arg-type]


def test_a_slow_mask_is_late_and_found_in_the_background(factory: CompiledGrammars) -> None:
    constraint, matcher = slow(factory)
    other = factory(Grammar(kind="regex", text="b+"))
    eventually(lambda: look(factory, constraint, other)[0] == [0], within=60, what="the other mask", every=0.0)
    for _ in range(3):
        late, masks = look(factory, constraint, other)
        assert (late, constraint.is_pending) == ([0], True)
        assert (masks[0].any(), masks[1].any()) == (False, True)
    matcher.may_go_on.set()
    eventually(lambda: not constraint.is_pending, within=60, what="the mask", every=0.01)
    late, masks = look(factory, constraint, other)
    assert (late, masks[0, 0], matcher.num_masks) == ([], 1, 1)
    constraint.accept(0)
    eventually(lambda: look(factory, constraint)[0] == [], within=60, what="the next mask", every=0.0)
    assert (matcher.consumed, matcher.num_masks) == ([0], 2)


def test_a_slow_mask_delays_none_behind_it(factory: CompiledGrammars) -> None:
    """Threads take several constraints each."""
    hanging = [slow(factory, f"{letter}+") for letter in "ab"]
    others = [factory(Grammar(kind="regex", text=letter + "+")) for letter in "cdefg"]
    late, _ = look(factory, *[constraint for constraint, _ in hanging], *others)
    assert late[:2] == [0, 1]
    eventually(lambda: look(factory, *others)[0] == [], within=60, what="those that were not begun", every=0.0)
    assert all(constraint.is_pending for constraint, _ in hanging)
    for _, matcher in hanging:
        matcher.may_go_on.set()
    assert not any(other.is_pending for other in others)


def test_generations_of_a_grammar_wait_for_each_other_without_holding_all_threads(factory: CompiledGrammars) -> None:
    """The library would wait with the interpreter's lock, and all threads with it."""
    hanging = [slow(factory) for _ in range(12)]
    constraints = [constraint for constraint, _ in hanging]
    for _ in range(8):
        look(factory, *constraints)
    assert [matcher.is_asked for _, matcher in hanging] == [True] + 11 * [False]
    other = factory(Grammar(kind="regex", text="b+"))
    eventually(lambda: look(factory, *constraints, other)[0] == list(range(12)), within=20, what="its mask", every=0.0)
    for _, matcher in hanging:
        matcher.may_go_on.set()
    eventually(lambda: not look(factory, *constraints)[0], within=60, what="all masks", every=0.01)


def test_only_as_many_masks_are_begun_as_there_are_threads(factory: CompiledGrammars) -> None:
    hanging = [slow(factory, f"{letter}+") for letter in "abcdefghijkl"]
    for _ in range(4):
        late, _ = look(factory, *[constraint for constraint, _ in hanging])
        assert late == list(range(len(hanging)))
    begun = sum(constraint.is_pending for constraint, _ in hanging)
    assert 0 < begun < len(hanging)
    for _, matcher in hanging:
        matcher.may_go_on.set()
    constraints = [constraint for constraint, _ in hanging]
    eventually(lambda: not look(factory, *constraints)[0], within=60, what="all masks", every=0.01)
    assert [matcher.num_masks for _, matcher in hanging] == [1] * len(hanging)


def test_no_step_waits_for_a_grammar_that_is_known_to_be_slow(
    factory: CompiledGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher_module, "SLOW_SECONDS", -1.0)
    constraint, matcher = slow(factory)
    monkeypatch.setattr(factory._masks, "_find", lambda constraints: [each.find_mask() for each in constraints])
    assert look(factory, constraint)[0] == [0], "not found in the threads that steps wait for"
    matcher.may_go_on.set()
    eventually(lambda: not constraint.is_pending, within=60, what="the mask", every=0.01)
    assert look(factory, constraint)[0] == []


def test_no_mask_is_computed_for_a_slow_request_that_has_ended(
    factory: CompiledGrammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher_module, "SLOW_SECONDS", -1.0)
    first, holds_thread = slow(factory)
    ended, matcher = slow(factory)
    last, last_matcher = slow(factory)
    look(factory, first, ended, last)
    reference = weakref.ref(ended)
    del ended
    gc.collect()
    assert reference() is None
    last_matcher.may_go_on.set()
    holds_thread.may_go_on.set()
    eventually(lambda: not last.is_pending, within=60, what="the last mask", every=0.01)
    assert matcher.num_masks == 0


def test_a_failure_of_the_library_ends_only_its_request(factory: CompiledGrammars) -> None:
    constraint, matcher = slow(factory)
    matcher.compute_bitmask = lambda: 1 // 0  # type: ignore[method-assign,return-value]
    eventually(lambda: look(factory, constraint)[0] == [], within=60, what="the end", every=0.0)
    assert constraint.end is FinishReason.GRAMMAR
    assert look(factory, constraint)[1].any(), "something has to come"

"""Random grammars never crash, hang or end in an abort, and what they match is valid."""

from __future__ import annotations

import pytest

from engine.text.fuzzing import Fuzzer


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 10_000])
def test_random_grammars_are_refused_or_followed_to_their_end(first: int) -> None:
    fuzzer = Fuzzer()
    for seed in range(first, first + 150):
        fuzzer.try_seed(seed)
    fuzzer.close()
    assert not fuzzer.outcomes.faults
    assert fuzzer.outcomes.counts["valid"] > 50

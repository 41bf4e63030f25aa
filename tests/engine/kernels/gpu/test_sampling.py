"""The kernels of the sampler in Triton's interpreter against their twins.

The twins are compared with the host's sampler in `tests/engine/sampling/test_device_sampler.py`.
"""

from __future__ import annotations

import importlib
import itertools
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.sampling.test_device_sampler import CPU, ENDS, Batch, Row, admission, random_batch
from fastgen.core.sampling_params import SamplingParams
from fastgen.kernels.gpu.sampling import logits
from fastgen.kernels.gpu.sampling import tokens as sampling
from fastgen.kernels.gpu.sampling.logprobs import token_logprobs
from fastgen.kernels.gpu.sampling.rng import uniform
from fastgen.sampling.logprobs import token_logprobs as by_cpu
from fastgen.sampling.logprobs import unpack_logprobs
from fastgen.sampling.slots import SamplingSlots

pytestmark = pytest.mark.slow  # together over ten seconds

Interpreted = Callable[[str], ModuleType]


def run_both(interpreted: Interpreted, batch: Batch) -> None:
    """Run a step by the twins and by the kernels; compare scores, tokens and state."""
    kernels = interpreted("sampling.logits"), interpreted("sampling.tokens")
    vocabulary, size = batch.logits.shape[1], len(batch.rows)
    rows = SamplingSlots(vocabulary, size, CPU, ENDS)
    batch.admit(rows)
    rows.flush()
    used = [index for index, _ in batch.used()]
    inputs = (batch.slots, batch.positions, rows.columns)
    states = []
    for process, draw in ((logits, sampling), kernels):
        lists, counts, last = rows.lists.clone(), rows.counts.clone(), rows.last_tokens.clone()
        scores, is_changed, *sums = process.process_logits(batch.logits, *inputs, lists, counts, *batch.masks())
        changed = [row for row in used if is_changed[row]]
        processed = [scores[changed].clone(), is_changed[used], *(part[used] for part in sums)]
        tokens = draw.sample_tokens(batch.logits.float(), scores, is_changed, *sums, *inputs)
        draw.commit_tokens(tokens, *inputs, lists, counts, last)
        states.append((processed, tokens, lists, counts, last))
    (by_twins, *expected), (by_kernels, *found) = states
    for column, (wanted, got) in enumerate(zip(by_twins, by_kernels, strict=True)):
        if column == 3:  # sums of exponentials
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=0)
        else:
            assert torch.equal(got, wanted)
    for wanted, got in zip(expected, found, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("vocabulary", "size", "dtype"),
    [
        (5, 15, torch.float32),
        (300, 15, torch.float32),
        (300, 8, torch.bfloat16),
        (4097, 8, torch.float16),
        (9000, 8, torch.float32),
    ],
)
def test_kernels_equal_twins(interpreted: Interpreted, vocabulary: int, size: int, dtype: torch.dtype) -> None:
    run_both(interpreted, random_batch(random.Random(vocabulary), vocabulary, size, dtype))


def test_a_vocabulary_of_many_chunks_with_filters_that_keep_few_and_many(interpreted: Interpreted) -> None:
    scores = torch.randn(5, 40_000, generator=torch.Generator().manual_seed(0)) * 2
    settings = [
        SamplingParams(top_p=0.3),
        SamplingParams(top_k=300, top_p=0.9),
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(typical_p=0.5),
    ]
    rows: list[Row | None] = [Row(chosen, index, [1, 2], 1) for index, chosen in enumerate(settings)]
    run_both(interpreted, Batch(scores, rows))


def test_equal_and_infinite_logits(interpreted: Interpreted) -> None:
    scores = torch.zeros(6, 700)
    scores[1:, 50:] = -torch.inf
    scores[2, 20] = 30_000.0
    scores[3, 600] = 0.0
    settings = [
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.1),
        SamplingParams(),
        SamplingParams(typical_p=0.5),
        SamplingParams(temperature=0),
    ]
    rows: list[Row | None] = [Row(chosen, index, [1, 2], 1) for index, chosen in enumerate(settings)]
    run_both(interpreted, Batch(scores, rows))


def seed_of(low: float, high: float) -> int:
    """Return a seed whose random number at position 2 is between `low` and `high`."""
    return next(seed for seed in itertools.count() if low < uniform(seed, 2) < high)


def test_each_filter_keeps_no_token_too_many(interpreted: Interpreted) -> None:
    """The random number is about 0.75 of the kept weights, so one token more or less changes the draw."""
    seed = seed_of(0.74, 0.76)
    scores = torch.full((40,), -0.2)
    scores[[7, 30]], scores[21] = 0.0, -0.1  # in descending order 7, 30, 21, then all others
    expected: list[tuple[SamplingParams, set[int] | None, int]] = [
        (SamplingParams(top_k=1), None, 7),
        (SamplingParams(top_p=0.5), {7, 30}, 7),  # a half is reached by the first
        (SamplingParams(top_k=2, top_p=0.5), None, 7),  # of the two, not of all
        (SamplingParams(min_p=0.95), None, 30),
        (SamplingParams(temperature=0.01, top_k=3), None, 30),
    ]
    rows: list[Row | None] = [Row(sampling, seed, [1, 2], 1, allowed) for sampling, allowed, _ in expected]
    batch = Batch(scores.repeat(len(rows), 1), rows)
    run_both(interpreted, batch)
    assert batch.by_device() == batch.by_host() == [token for _, _, token in expected]


def test_typical_p_keeps_the_tokens_closest_to_the_entropy(interpreted: Interpreted) -> None:
    """The entropy is 1.21. Surprisals are 1.39 for token 8, 0.69 for 20, and 2.08 for 3 and 11."""
    scores = torch.full((40,), -torch.inf)
    scores[[20, 8, 3, 11]] = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    seed = seed_of(0.44, 0.46)
    # The tokens kept, in order of their ids, are 8; then 8 and 20; then all, because two are equally close.
    expected = [(0.2, 8), (0.7, 20), (0.8, 11)]
    rows: list[Row | None] = [Row(SamplingParams(typical_p=share), seed, [1, 2], 1) for share, _ in expected]
    batch = Batch(scores.repeat(len(rows), 1), rows)
    run_both(interpreted, batch)
    assert batch.by_device() == batch.by_host() == [token for _, token in expected]


def test_ties_are_ordered_by_id(interpreted: Interpreted) -> None:
    """Also those in other groups and chunks of the vocabulary, and those of zeros with different signs."""
    scores = torch.full((4200,), -9.0)
    scores[[4150, 200, 70, 90]] = torch.tensor([0.0, 0.0, -0.0, 0.0])
    seed = seed_of(0.74, 0.76)
    expected = [
        (SamplingParams(temperature=0), 70),
        (SamplingParams(top_k=1), 70),
        (SamplingParams(top_k=2), 90),
        (SamplingParams(top_k=3), 200),
        (SamplingParams(top_p=0.4), 90),
    ]
    rows: list[Row | None] = [Row(sampling, seed, [1, 2], 1) for sampling, _ in expected]
    batch = Batch(scores.repeat(len(rows), 1), rows)
    run_both(interpreted, batch)
    assert batch.by_device() == batch.by_host() == [token for _, token in expected]


def test_more_ties_than_are_sorted_are_ordered_by_id(interpreted: Interpreted) -> None:
    rows: list[Row | None] = [Row(SamplingParams(top_k=100), seed_of(0.505, 0.509), [1, 2], 1)]
    batch = Batch(torch.zeros(1, 700), rows)
    run_both(interpreted, batch)
    assert batch.by_device() == batch.by_host() == [50]


def test_each_ban_ends_where_it_should(interpreted: Interpreted) -> None:
    """Token 3 ends a generation; it has the largest score, then 9, then 8."""
    scores = torch.zeros(40)
    scores[3], scores[9], scores[8] = 3.0, 2.0, 1.0
    words = {"temperature": 0, "max_tokens": 9, "min_tokens": 9}
    expected: list[tuple[SamplingParams, list[int], set[int] | None, int]] = [
        (SamplingParams(temperature=0, max_tokens=9, min_tokens=2), [5, 6], None, 3),
        (SamplingParams(temperature=0, max_tokens=9, min_tokens=3), [5, 6], None, 9),
        (SamplingParams(**words, bad_words=((5, 9),)), [5], None, 8),  # type: ignore[arg-type]
        (SamplingParams(**words, bad_words=((4, 5, 9),)), [6, 5], None, 9),  # type: ignore[arg-type]
        (SamplingParams(**words, bad_words=((4, 5, 9),)), [4, 5], None, 8),  # type: ignore[arg-type]
        (SamplingParams(**words), [5], {3}, 3),  # type: ignore[arg-type]
    ]
    rows: list[Row | None] = [
        Row(sampling, 0, [1, *generated], 1, allowed) for sampling, generated, allowed, _ in expected
    ]
    batch = Batch(scores.repeat(len(rows), 1), rows)
    run_both(interpreted, batch)
    assert batch.by_device() == batch.by_host() == [token for *_, token in expected]


def test_an_end_is_banned_until_min_tokens_are_generated(interpreted: Interpreted) -> None:
    """The bans of a slot are made at its admission; each step decides which of them hold."""
    rows = SamplingSlots(40, 1, CPU, ENDS)
    rows.admit(admission(0, SamplingParams(temperature=0, max_tokens=9, min_tokens=2), 0, [1]))
    rows.flush()
    slots = torch.zeros(1, dtype=torch.int32)
    for process in (logits.process_logits, interpreted("sampling.logits").process_logits):
        for position, expected in ((1, -torch.inf), (2, -torch.inf), (3, 0.0)):
            positions = torch.tensor([position], dtype=torch.int32)
            scores, *_ = process(
                torch.zeros(1, 40), slots, positions, rows.columns, rows.lists, rows.counts, None, None
            )
            assert scores[0, 3] == expected


def test_scores_of_rows_without_changes_are_not_written(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with a bias, a penalty, a ban or a mask have scores; the others are sampled from their logits."""
    settings = [
        SamplingParams(top_p=0.9, top_k=20, min_p=0.1),
        SamplingParams(logit_bias=((5, 1.0),)),
        SamplingParams(temperature=0),
        SamplingParams(frequency_penalty=0.5),
        SamplingParams(typical_p=0.5),
        SamplingParams(max_tokens=9, min_tokens=5),
        SamplingParams(),
        SamplingParams(),
    ]
    rows: list[Row | None] = [Row(chosen, index, [1, 2], 1) for index, chosen in enumerate(settings)]
    rows[6] = Row(settings[6], 6, [1, 2], 1, {3, 4})
    batch = Batch(torch.randn(8, 5000, generator=torch.Generator().manual_seed(0)).bfloat16(), rows)
    new_empty = torch.Tensor.new_empty

    def new_filled(self: torch.Tensor, *size: Any, **options: Any) -> torch.Tensor:
        created = new_empty(self, *size, **options)
        return created.fill_(torch.nan) if created.is_floating_point() else created

    slots = SamplingSlots(5000, 8, CPU, ENDS)
    batch.admit(slots)
    slots.flush()
    inputs = (batch.logits, batch.slots, batch.positions, slots.columns, slots.lists, slots.counts)
    process = interpreted("sampling.logits").process_logits
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "new_empty", new_filled)
        scores, is_changed, *_ = process(*inputs, *batch.masks())
    assert is_changed.tolist() == [0, 1, 0, 1, 0, 1, 1, 0]
    assert scores.isnan().all(1).tolist() == [True, False, True, False, True, False, False, True]
    assert not scores[is_changed != 0].isnan().any()
    run_both(interpreted, batch)


def test_a_step_takes_five_launches_whose_grids_depend_on_the_shape_alone(
    interpreted: Interpreted, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreted("sampling.tokens")
    function = importlib.import_module("triton.runtime.interpreter").InterpretedFunction
    run = function.run
    grids: list[Any] = []

    def record(self: Any, *arguments: Any, grid: Any, **keywords: Any) -> Any:
        grids.append(grid)
        return run(self, *arguments, grid=grid, **keywords)

    monkeypatch.setattr(function, "run", record)
    for seed in range(2):
        run_both(interpreted, random_batch(random.Random(seed), 5000, 2))
    assert grids == [(2,), (2, 2), (2,), (2,), (1,)] * 2


def test_no_rows(interpreted: Interpreted) -> None:
    run_both(interpreted, Batch(torch.empty(0, 8), []))


def test_the_only_allowed_token_is_sampled_at_any_uniform_number(interpreted: Interpreted) -> None:
    settings = [SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(typical_p=0.9), SamplingParams(top_k=900)]
    rows: list[Row | None] = [Row(settings[seed % 4], seed, [1], 1, {650}) for seed in range(12)]
    batch = Batch(torch.zeros(12, 700), rows)
    run_both(interpreted, batch)
    assert batch.by_device() == [650] * 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocabulary", "num_top"), [(5, 20), (300, 0), (9000, 20)])
def test_logprobs_equal_the_twin(interpreted: Interpreted, vocabulary: int, num_top: int, dtype: torch.dtype) -> None:
    scores = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(0)).to(dtype) * 4
    scores[1, : vocabulary // 2] = -torch.inf
    rows = torch.tensor([2, 0, -1, 1, 1], dtype=torch.int32)
    tokens = torch.tensor([0, vocabulary - 1, 0, vocabulary - 2, 3], dtype=torch.int32) % vocabulary
    wanted = token_logprobs(scores, rows, tokens, num_top)
    found = interpreted("sampling.logprobs").token_logprobs(scores, rows, tokens, num_top)
    used = rows >= 0
    torch.testing.assert_close(found[used], wanted[used], rtol=1e-7, atol=1e-6)
    assert torch.equal(found[used, 1 : 2 + num_top], wanted[used, 1 : 2 + num_top])


def test_equal_logprobs_are_ordered_by_id(interpreted: Interpreted) -> None:
    scores = torch.full((1, 4200), -9.0)
    scores[0, [4150, 200, 70, 90]] = torch.tensor([0.0, 0.0, -0.0, 0.0])
    row, token = torch.zeros(1, dtype=torch.int32), torch.tensor([4150], dtype=torch.int32)
    found = [
        function(scores, row, token, 3)
        for function in (token_logprobs, interpreted("sampling.logprobs").token_logprobs)
    ]
    expected = by_cpu(scores, [4150], [3])
    assert [named for named, _ in expected[0].top] == [70, 90, 200]
    for packed in found:
        (got,) = unpack_logprobs(packed, [4150], [3])
        assert [named for named, _ in got.top] == [70, 90, 200]
        assert got.rank == expected[0].rank == 4

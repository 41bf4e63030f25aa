"""The sampler of the device against the one of the host. Here its operators run their twins."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.sampling.drawing import Draw, sample
from engine.sampling.test_logit_masks import allowing
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.sequence import RowParameters
from fastgen.kernels.gpu.sampling.logprobs import token_logprobs as on_device
from fastgen.sampling.device_sampler import DeviceSampler
from fastgen.sampling.logprobs import token_logprobs, unpack_logprobs
from fastgen.sampling.parameters import is_penalised
from fastgen.sampling.slots import SamplingSlots

CPU = torch.device("cpu")
ENDS = frozenset({0, 3})


@dataclass
class Row:
    """One sequence of a test."""

    sampling: SamplingParams
    seed: int
    tokens: list[int]
    num_prompt_tokens: int
    allowed: set[int] | None = None

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: self.num_prompt_tokens]

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def draw(self, vocabulary: int) -> Draw:
        """Return the input of the host's sampler."""
        mask = None if self.allowed is None else allowing(*self.allowed, words=-(-vocabulary // 32))
        return Draw(self.sampling, self.seed, self.tokens, self.num_prompt_tokens, ENDS, mask)


@dataclass
class Batch:
    """Rows in slots, some of which are padding (None), with their inputs of the device sampler."""

    logits: torch.Tensor
    rows: list[Row | None]
    slots: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        size = len(self.rows)
        slots = [-1 if row is None else (7 * index) % size for index, row in enumerate(self.rows)]
        assert size % 7 or not size, "the slots differ"
        self.slots = torch.tensor(slots, dtype=torch.int32)
        self.positions = torch.tensor([0 if row is None else len(row.tokens) for row in self.rows], dtype=torch.int32)

    def used(self) -> Iterator[tuple[int, Row]]:
        """Yield index and row of those that are not padding."""
        return ((index, row) for index, row in enumerate(self.rows) if row is not None)

    def admit(self, sampler: DeviceSampler | SamplingSlots) -> None:
        for index, row in self.used():
            sampler.admit(admission(int(self.slots[index]), row.sampling, row.seed, row.prompt, row.generated))

    def masks(self) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Return the grammar masks and the mask of each row."""
        width = -(-self.logits.shape[1] // 32)
        masks = []
        mask_rows = torch.full((len(self.rows),), -1, dtype=torch.int32)
        for index, row in self.used():
            if row.allowed is not None:
                mask_rows[index] = len(masks)
                masks.append(torch.from_numpy(allowing(*row.allowed, words=width).view(np.int32)))
        return (torch.stack(masks), mask_rows) if masks else (None, None)

    def by_host(self) -> list[int]:
        """Return the tokens of the host's sampler, 0 for padding."""
        indices = [index for index, _ in self.used()]
        sampled, _ = sample(self.logits[indices], [row.draw(self.logits.shape[1]) for _, row in self.used()])
        tokens = [0] * len(self.rows)
        for index, token in zip(indices, sampled, strict=True):
            tokens[index] = token
        return tokens

    def by_device(self) -> list[int]:
        """Return the tokens of the device sampler, 0 for padding."""
        sampler = DeviceSampler(self.logits.shape[1], len(self.rows), CPU, ENDS)
        self.admit(sampler)
        tokens: list[int] = sampler.sample(self.logits, self.slots, self.positions, *self.masks()).tolist()
        return tokens


def admission(
    slot: int, sampling: SamplingParams, seed: int, prompt: Sequence[int], generated: Sequence[int] = ()
) -> RowParameters:
    return RowParameters(slot, sampling, seed, len(prompt), [*prompt, *generated])


def random_sampling(source: random.Random, vocabulary: int) -> SamplingParams:
    """Return parameters that are each at their default in more than half of the cases."""

    def rarely(default: Any, value: Any) -> Any:
        return value if source.random() < 0.3 else default

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(source.choices(range(vocabulary), k=source.randint(1, most)))

    return SamplingParams(
        max_tokens=50,
        min_tokens=rarely(0, source.randint(0, 50)),
        temperature=source.choice([0.0, 1.0, 0.7, source.uniform(0, 3), 10 ** source.uniform(-5, 2)]),
        top_k=rarely(0, source.choice([1, 2, 40, 256, 257, vocabulary, source.randint(1, 2 * vocabulary)])),
        top_p=rarely(1.0, source.choice([1e-9, 0.9, 0.999, source.uniform(0.01, 1)])),
        min_p=rarely(0.0, source.choice([1.0, 1e-9, source.random() ** 4])),
        typical_p=rarely(1.0, source.uniform(0.01, 1)),
        repetition_penalty=rarely(1.0, source.uniform(0.1, 3)),
        presence_penalty=rarely(0.0, source.uniform(-2, 2)),
        frequency_penalty=rarely(0.0, source.uniform(-2, 2)),
        logit_bias=rarely((), tuple((token, source.uniform(-100, 100)) for token in tokens(5))),
        stop_token_ids=rarely((), tokens(3)),
        bad_words=rarely((), tuple(tokens(3) for _ in range(source.randint(1, 6)))),
        ignore_eos=source.random() < 0.5,
    )


def random_batch(source: random.Random, vocabulary: int, size: int, dtype: torch.dtype = torch.float32) -> Batch:
    generator = torch.Generator().manual_seed(source.getrandbits(60))
    spread = torch.tensor(source.choices([1.0, 3.0, 1e4], k=size))
    logits = torch.randn(size, vocabulary, generator=generator) * spread[:, None]
    rows: list[Row | None] = []
    for _ in range(size):
        tokens = source.choices(range(min(vocabulary, 20)), k=source.randint(1, 30))
        allowed = None
        if source.random() < 0.2:
            allowed = set(source.choices([*range(vocabulary), 0, 3], k=source.choice([1, 2, 9])))
        row = Row(
            random_sampling(source, vocabulary), source.getrandbits(63), tokens, source.randint(1, len(tokens)), allowed
        )
        rows.append(None if source.random() < 0.1 else row)
    return Batch(logits.clamp(-6e4, 6e4).to(dtype), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [4, 33, 300, 5000])
def test_tokens_equal_those_of_the_host(vocabulary: int, dtype: torch.dtype) -> None:
    """With 16 bits many scores are equal: ties rank by id."""
    source = random.Random(vocabulary)
    for _ in range(12 if dtype == torch.float32 else 4):
        batch = random_batch(source, vocabulary, 25, dtype)
        assert batch.by_device() == batch.by_host()


def test_tokens_of_flat_distributions_equal_those_of_the_host() -> None:
    """Thousands of scores so close that their weights differ by few roundings: no filter may cut them elsewhere."""
    source = random.Random(3)
    for seed in range(4):
        batch = random_batch(source, 5000, 25)
        batch.logits = torch.randn(25, 5000, generator=torch.Generator().manual_seed(seed)) * 0.01
        assert batch.by_device() == batch.by_host()


def test_a_generation_equals_that_of_the_host_across_preemptions() -> None:
    """Counts, bad words and min_tokens follow the tokens that the device sampled."""
    source = random.Random(1)
    vocabulary, size = 40, 24
    sampler = DeviceSampler(vocabulary, size + 3, CPU, ENDS)
    rows, slots = [], source.sample(range(size + 3), size)
    for index in range(size):
        prompt = source.choices(range(vocabulary), k=source.randint(1, 9))
        sampling = random_sampling(source, vocabulary)
        rows.append(Row(sampling, index, prompt, len(prompt)))
        sampler.admit(admission(slots[index], sampling, index, prompt))
    assert sum(is_penalised(row.sampling) for row in rows) > 8, "counts grow"
    for step in range(40):
        running = sorted(source.sample(range(size), source.randint(1, size)))
        logits = torch.randn(len(running), vocabulary, generator=torch.Generator().manual_seed(step)) * 2
        expected, _ = sample(logits, [rows[index].draw(vocabulary) for index in running])
        found = sampler.sample(
            torch.cat([logits, torch.full((1, vocabulary), torch.nan)]),
            torch.tensor([*(slots[index] for index in running), -1], dtype=torch.int32),
            torch.tensor([*(len(rows[index].tokens) for index in running), 0], dtype=torch.int32),
        )
        assert found[:-1].tolist() == expected
        for index, token in zip(running, expected, strict=True):
            rows[index].tokens.append(token)
            assert sampler.last_tokens[slots[index]] == token
        index = source.randrange(size)
        free = [slot for slot in range(size + 3) if slot not in slots]
        sampler.release(slots[index])
        slots[index] = source.choice(free)
        row = rows[index]
        sampler.admit(admission(slots[index], row.sampling, row.seed, row.prompt, row.generated))


def test_the_grammar_wins_over_min_tokens_and_bad_words_if_no_token_is_left() -> None:
    sampling = SamplingParams(temperature=0, min_tokens=5, max_tokens=9, bad_words=((1,),), stop_token_ids=(2,))
    rows: list[Row | None] = [Row(sampling, 0, [0], 1, {1, 2}), Row(sampling, 0, [0], 1, {0, 1, 2, 5})]
    batch = Batch(torch.arange(6.0).repeat(2, 1), rows)
    assert batch.by_device() == [2, 5] == batch.by_host()


class Operations(TorchDispatchMode):
    """Records the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_step_runs_three_operators_and_nothing_else() -> None:
    batch = random_batch(random.Random(2), 300, 25)
    sampler = DeviceSampler(300, 25, CPU, ENDS)
    batch.admit(sampler)
    sampler.sample(batch.logits, batch.slots, batch.positions, *batch.masks())
    inputs = (batch.logits, batch.slots, batch.positions + 1, *batch.masks())
    with Operations() as seen:
        sampler.sample(*inputs)
    assert seen.names == [f"fastgen.{name}.default" for name in ("process_logits", "sample_tokens", "commit_tokens")]


def test_admitted_rows_are_uploaded_together() -> None:
    source = random.Random(4)

    def operations(count: int) -> list[str]:
        rows = SamplingSlots(100, 40, CPU, ENDS)
        for slot in range(count):
            sampling = SamplingParams(presence_penalty=1.0, logit_bias=((source.randrange(100), 1.0),))
            rows.admit(admission(slot, sampling, slot, [1, 2]))
        with Operations() as seen:
            rows.flush()
        return seen.names

    assert operations(40) == operations(2)
    assert not operations(0)


def test_lists_and_counts_of_released_slots_are_reused() -> None:
    rows = SamplingSlots(50, 4, CPU, ENDS)
    biases = tuple((token, 1.0) for token in range(50))
    sampling = SamplingParams(logit_bias=biases, presence_penalty=1.0, min_tokens=3, bad_words=((1, 2, 3),) * 100)
    for step in range(40):
        rows.admit(admission(step % 4, sampling, 0, [1, 2, 3], [4]))
        rows.flush()
    assert len(rows.counts) == 4
    assert rows.counts.sum(-1).tolist() == [5] * 4  # 3 prompt tokens, one generated
    assert len(rows.lists) <= 8 * (2 * 50 + 4 * 102 + 200 + 2)


def test_running_out_of_memory_leaves_the_slot_free(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = SamplingSlots(50, 1, CPU, ENDS)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    sampling = SamplingParams(presence_penalty=1.0, bad_words=((1, 2),) * 2000)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "cat", fail)
        with pytest.raises(torch.OutOfMemoryError):
            rows.admit(admission(0, sampling, 0, [1]))
    rows.flush()
    rows.admit(admission(0, sampling, 0, [1]))
    rows.flush()
    assert len(rows.counts) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_equal_those_of_the_host(dtype: torch.dtype) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)).to(dtype) * 4
    rows, tokens, top = [4, 1, 1], [5, 299, 7], [20, 0, 3]
    packed = on_device(
        logits, torch.tensor([*rows, -1], dtype=torch.int32), torch.tensor([*tokens, 0], dtype=torch.int32), max(top)
    )
    found = unpack_logprobs(packed[:3], tokens, top)
    for got, wanted in zip(found, token_logprobs(logits[rows], tokens, top), strict=True):
        assert (got.token_id, got.rank) == (wanted.token_id, wanted.rank)
        assert abs(got.logprob - wanted.logprob) < 1e-6
        assert [token for token, _ in got.top] == [token for token, _ in wanted.top]
        assert all(abs(a - b) < 1e-6 for (_, a), (_, b) in zip(got.top, wanted.top, strict=True))


def test_requesting_more_top_tokens_than_the_vocabulary_returns_all() -> None:
    one = torch.zeros(1, dtype=torch.int32)
    (got,) = unpack_logprobs(on_device(torch.tensor([[0.0, 1.0, 2.0]]), one, one, 20), [0], [20])
    assert [token for token, _ in got.top] == [2, 1, 0]
    assert got.rank == 3

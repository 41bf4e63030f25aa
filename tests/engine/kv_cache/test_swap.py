"""The order of copies and forward passes on two streams: no block is used by two of them at once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from fastgen.engine import core
from fastgen.kv_cache.swap import Swapper
from fastgen.kv_cache.tensors import BlockPair
from fastgen.model.step_input import StepInput
from support.simulation import SimulatedRunner, SimulatedTicket, make_engine
from support.workloads import Arrival, play, random_workload

pytestmark = pytest.mark.slow  # together over ten seconds

BLOCK_SIZE = 16
FORWARD, COPIES = "forward", "copies"


@dataclass(frozen=True)
class Access:
    stream: str
    number: int  # of the stream's work
    writes: bool


class Device:
    """Two streams that record what their work reads and writes, instead of doing it.

    Work may run as soon as what it waits for is done. Two works of different streams that use a block, one of them
    writing it, must therefore not both be free to run: one has to wait for the other. Stands in for both
    `swap.CUDAStreams` and the cache.
    """

    def __init__(self, num_blocks: int = 8) -> None:
        self.num_blocks, self.block_size = num_blocks, BLOCK_SIZE
        self.waits: Counter[str] = Counter()
        self._enqueued = Counter({FORWARD: 0, COPIES: 0})
        # For each stream, the work of both that is done before its next work starts.
        self._done_before: dict[str, Counter[str]] = {FORWARD: Counter(), COPIES: Counter()}
        self._accesses: dict[tuple[str, int], list[Access]] = {}
        self._is_copying = False

    @contextmanager
    def copying(self) -> Iterator[None]:
        self._is_copying = True
        yield
        self._is_copying = False

    def copies_wait(self) -> None:
        self._wait(COPIES, FORWARD)

    def forward_waits(self) -> None:
        self._wait(FORWARD, COPIES)

    def _wait(self, stream: str, other: str) -> None:
        self.waits[stream] += 1
        self._done_before[stream] |= self._done_before[other]
        self._done_before[stream][other] = self._enqueued[other]

    def swap(self, out: Iterable[BlockPair], back: Iterable[BlockPair]) -> None:
        stream = COPIES if self._is_copying else FORWARD
        for block, host_block in out:
            self._run(stream, reads=[("device", block)], writes=[("host", host_block)])
        for block, host_block in back:
            self._run(stream, reads=[("host", host_block)], writes=[("device", block)])

    def forward(self, reads: Iterable[int], writes: Iterable[int]) -> int:
        """Enqueue a forward pass over blocks; return its number."""
        return self._run(FORWARD, [("device", block) for block in reads], [("device", block) for block in writes])

    def host_waited_for(self, forward: int) -> None:
        """Note that the host knows a forward pass to be done, so all work enqueued later follows it."""
        for stream in (FORWARD, COPIES):
            before = self._done_before[stream]
            before[FORWARD] = max(before[FORWARD], forward)

    def host_waited(self) -> None:
        """Note that the host knows all forward passes to be done."""
        self.host_waited_for(self._enqueued[FORWARD])

    def _run(self, stream: str, reads: list[tuple[str, int]], writes: list[tuple[str, int]]) -> int:
        self._enqueued[stream] += 1
        now, done = self._enqueued[stream], self._done_before[stream]
        for places, is_write in ((reads, False), (writes, True)):
            for place in places:
                for earlier in self._accesses.get(place, ()):
                    if earlier.stream != stream and (is_write or earlier.writes):
                        assert earlier.number <= done[earlier.stream], f"{stream} may use {place} beside {earlier}"
                self._accesses.setdefault(place, []).append(Access(stream, now, is_write))
        return now


def slots(*blocks: int) -> Any:
    return np.array([block * BLOCK_SIZE for block in blocks], np.int32)


def test_a_swap_out_follows_the_forward_pass_that_wrote_the_block() -> None:
    device = Device()
    swapper = Swapper(device, device)  # type: ignore[arg-type]
    device.forward([], [3])
    swapper.enqueue([(3, 0)], [], slots(4))
    device.forward([], [4])


def test_a_forward_pass_that_overwrites_a_block_follows_its_swap_out_even_steps_later() -> None:
    device = Device()
    swapper = Swapper(device, device)  # type: ignore[arg-type]
    swapper.enqueue([(3, 0), (5, 1)], [], slots(4))
    device.forward([], [4])
    assert not device.waits[FORWARD], "the step does not use the blocks"
    swapper.enqueue([], [], slots(4, 5))
    device.forward([4], [4, 5])
    swapper.enqueue([], [], slots(3))
    device.forward([], [3])
    assert device.waits == {COPIES: 1, FORWARD: 1}


def test_a_forward_pass_follows_the_swap_in_of_its_blocks() -> None:
    device = Device()
    swapper = Swapper(device, device)  # type: ignore[arg-type]
    swapper.enqueue([(3, 0)], [], slots(4))
    device.forward([], [4])
    swapper.enqueue([], [(3, 0)], slots(6))  # over the block that is being read
    device.forward([3], [6])
    assert device.waits[COPIES] == 1, "a swap-in waits for no forward pass"


def test_unordered_work_is_found() -> None:
    device = Device()
    device.forward([1], [2])
    with device.copying():
        device.swap([(1, 0)], [])  # both only read
        with pytest.raises(AssertionError, match="copies may use"):
            device.swap([(2, 0)], [])
        with pytest.raises(AssertionError, match="copies may use"):
            device.swap([], [(1, 0)])
    with pytest.raises(AssertionError, match="forward may use"):
        device.forward([], [1])
    device.forward_waits()
    device.forward([], [1])


@dataclass
class SwappingRunner(SimulatedRunner):
    """A simulated device whose copies and forward passes are also enqueued on two streams."""

    steps_in_flight: int = 2
    fails: bool = False  # launches run out of memory after their forward pass
    device: Device = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.device = Device(self.num_blocks)
        self.swapper = Swapper(self.device, self.device)  # type: ignore[arg-type]
        self._places: dict[tuple[int, int], int] = {}
        self._numbers: dict[int, int] = {}

    def launch(self, step: StepInput) -> SimulatedTicket:
        self.swapper.enqueue(step.swap_out.tolist(), step.swap_in.tolist(), step.slot_mapping)
        for row, place, block in step.table_updates.T.tolist():
            self._places[row, place] = block
        reads = {
            self._places[row, place]
            for row, length in zip(step.rows.tolist(), step.seq_lens.tolist(), strict=True)
            for place in range(-(-length // self.block_size))
        }
        forward = self.device.forward(reads, set((step.slot_mapping // self.block_size).tolist()))
        ticket = super().launch(step)
        self._numbers[id(ticket)] = forward
        if self.fails:
            self._launched.pop()
            raise MemoryError
        return ticket

    def run_until(self, ticket: SimulatedTicket) -> None:
        super().run_until(ticket)
        self.device.host_waited_for(self._numbers[id(ticket)])


def test_copies_and_forward_passes_of_random_workloads_never_use_a_block_at_once() -> None:
    swapped_out = swapped_in = waited = 0
    for seed in range(60):
        rng = random.Random(seed)
        workload = random_workload(rng, block_size=BLOCK_SIZE, longest_prompt=90)
        runner = SwappingRunner(workload.num_blocks, BLOCK_SIZE, num_host_blocks=50)
        engine = make_engine(
            runner,
            token_budget=workload.token_budget,
            max_sequences=workload.max_sequences,
            **{**workload.settings, "preemption": "swap"},
        )
        play(engine, workload.arrivals, lambda _engine, _step: None)
        swapped_out += sum(len(step.swap_out) > 0 for step in runner.steps)
        swapped_in += sum(len(step.swap_in) > 0 for step in runner.steps)
        waited += runner.device.waits[FORWARD]
    assert swapped_out > 50
    assert swapped_in > 50
    assert 0 < waited < swapped_out + swapped_in, "some swap-outs run beside the next forward pass"


def test_a_swap_in_follows_the_forward_passes_of_lost_steps_whose_blocks_it_overwrites(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = SwappingRunner(4, BLOCK_SIZE, num_host_blocks=4)
    monkeypatch.setattr(core, "release_cached_memory", runner.device.host_waited)
    engine = make_engine(runner, token_budget=32, max_sequences=2, preemption="swap")
    for number in range(2):
        engine.add(Arrival(step=0, prompt=30, generate=30).request(number))
    while not engine._scheduler.stats(0).num_swapped:
        engine.step()
    runner.fails = True
    engine.step()  # launches a step that will be lost
    runner.fails = False
    (running,) = engine._scheduler.running
    assert engine.cancel(running.id)
    while engine.has_work:
        engine.step()
    assert sum(len(step.swap_in) for step in runner.steps) > 0

"""A simulated device for the real engine and scheduler.

`SimulatedRunner` keeps a KV cache of checksums. The value written to a token's slot depends on the token, on the
previous slot as read through the block table, and on the request's seed; a sampled token depends on all slots. So a
block that is wrongly shared, lost, evicted too early, swapped wrongly or written out of order changes the output.
With slots for recurrent states, the previous value is read from a slot instead, which each token overwrites.
With blocks of layers with a window, a value is written there, too, and depends on those of the tokens before it in its
window, read through the second block table.

A device with `steps_in_flight` above 1 runs a launched step as late as it can: when the results of that step, or of a
later one, are read. So an input that the host changes too early, and a block that it frees too early, are found.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fastgen.core.blocks.block_pool import BlockPool
from fastgen.core.blocks.window_pool import WindowGroup
from fastgen.core.request import Request
from fastgen.core.step_output import StepOutput, TokenLogprobs
from fastgen.engine.core import Engine
from fastgen.model.step_input import StepInput
from fastgen.runner.interface import Mask
from fastgen.settings import EngineConfig

VOCABULARY = 1000


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def _written(token: int, before: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), before)


def _through_window(before: int, visible: array[int]) -> int:
    """Return what a token's value depends on besides the token: the value before it, and those in its window."""
    return zlib.crc32(visible.tobytes(), before)


def _before_all(seed: int) -> int:
    return seed & 0xFFFFFFFF


def _sampled(slots: array[int]) -> int:
    return zlib.crc32(slots.tobytes()) % VOCABULARY


def _logprob(slot: int) -> float:
    return -slot / 2**32


def _add_solo(slots: array[int], token: int, seed: int, window: int | None) -> None:
    """Append the value of a sequence's next token to those of the tokens before it."""
    before = slots[-1] if slots else _before_all(seed)
    if window is not None:
        before = _through_window(before, slots[max(0, len(slots) + 1 - window) :])
    slots.append(_written(token, before))


def solo(request: Request, window: int | None = None) -> Iterator[int]:
    """Yield the tokens that follow a request's prompt when it runs alone, endlessly."""
    slots, seed = array("L"), request.sampling.seed or 0
    for token in request.prompt_token_ids:
        _add_solo(slots, token, seed, window)
    while True:
        token = _sampled(slots)
        yield token
        _add_solo(slots, token, seed, window)


def solo_prompt_logprobs(request: Request, window: int | None = None) -> list[float]:
    """Return the log-probabilities of a request's prompt tokens but the first."""
    slots = array("L")
    for token in request.prompt_token_ids[:-1]:
        _add_solo(slots, token, request.sampling.seed or 0, window)
    return [_logprob(slot) for slot in slots]


@dataclass
class SimulatedRunner:
    """A device whose steps take base + token * tokens + kv_token * kv_tokens seconds, plus the block copies.

    Each pair of a query and a key of prompt chunks takes `pair` seconds more: also those within a chunk, which the
    engine's step model does not know. Each chunk's queries are padded to a multiple of `query_tile`, and the rows of a
    step to one of `row_tile`.
    """

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    num_state_slots: int = 0
    window_group: WindowGroup | None = None
    clock: Clock = field(default_factory=Clock)
    base: float = 0.02
    token: float = 0.0006
    kv_token: float = 2e-6
    pair: float = 0.0
    query_tile: int = 1
    row_tile: int = 1
    seconds_per_block: float = 0.001
    vocab_size: int = VOCABULARY
    eos_token_ids: frozenset[int] = frozenset({0})
    steps_in_flight: int = 1
    steps: list[StepInput] = field(default_factory=list)
    done_at: list[float] = field(default_factory=list)  # of each step, on the clock
    # To check that the blocks that a step reads and writes are held; None to leave it.
    pool: BlockPool | None = None

    def __post_init__(self) -> None:
        self._seeds: dict[int, int] = {}
        self._last_ids: dict[int, int] = {}
        self._tables: dict[tuple[int, int], int] = {}
        self._launched: deque[SimulatedTicket] = deque()
        self._busy_until = 0.0
        self.max_model_length = self.num_blocks * self.block_size
        self._cache = [array("L", bytes(8 * self.block_size)) for _ in range(self.num_blocks)]
        self._states = [0] * self.num_state_slots
        num_window_blocks = 0 if self.window_group is None else self.window_group.num_blocks
        self._window_cache = [array("L", bytes(8 * self.block_size)) for _ in range(num_window_blocks)]
        self._window_tables: dict[tuple[int, int], int] = {}
        self._host = [array("L", bytes(8 * self.block_size)) for _ in range(self.num_host_blocks)]

    def launch(self, step: StepInput) -> SimulatedTicket:
        self.steps.append(step)
        ticket = SimulatedTicket(self, step)
        self._launched.append(ticket)
        began = max(self.clock.now, self._busy_until)
        sizes = np.diff(step.query_starts)[step.num_decodes :].astype(np.int64)
        queries = -(-sizes // self.query_tile) * self.query_tile
        pairs = float((queries * (step.seq_lens[step.num_decodes :] - (sizes - 1) / 2)).sum())
        rows = -(-step.num_tokens // self.row_tile) * self.row_tile
        self._busy_until = began + self.seconds(rows, int(step.seq_lens.sum()), pairs)
        self._busy_until += (len(step.swap_out) + len(step.swap_in)) * self.seconds_per_block
        ticket.done_at = self._busy_until
        self.done_at.append(ticket.done_at)
        return ticket

    def run_until(self, ticket: SimulatedTicket) -> None:
        """Run all launched steps up to this one."""
        while ticket in self._launched:
            first = self._launched.popleft()
            assert first.masks is not None, "a step runs whose sampling was not enqueued"
            first.output = self._run(first.step)
        self.clock.now = max(self.clock.now, ticket.done_at)

    def seconds(self, tokens: int, kv_tokens: int, pairs: float = 0.0) -> float:
        return self.base + self.token * tokens + self.kv_token * kv_tokens + self.pair * pairs

    def _run(self, step: StepInput) -> StepOutput:
        for block, host in step.swap_out.tolist():
            self._host[host] = self._cache[block][:]
        for block, host in step.swap_in.tolist():
            self._cache[block] = self._host[host][:]
        for parameters in step.new_rows:
            self._seeds[parameters.row] = parameters.seed
        for row, place, block in step.table_updates.T.tolist():
            self._tables[row, place] = block
        for row, place, block in step.window_updates.T.tolist():
            assert block >= 0, "a block that was freed is sent"
            self._window_tables[row, place] = block
        fresh = set(step.rows[step.seq_lens == np.diff(step.query_starts)].tolist())
        for row in fresh - {parameters.row for parameters in step.new_rows}:
            self._seeds[row] = 0  # a prompt that is pooled
        before = self._states_before(step)
        written = [self._write(step, index, before[index]) for index in range(len(step.rows))]
        self._save_states(step, before, written)
        sampled = []
        for index in step.sampled.tolist():
            row = int(step.rows[index])
            self._last_ids[row] = self.sampled(self._read(row, int(step.seq_lens[index])))
            sampled.append(self._last_ids[row])
        return StepOutput(sampled, prompt_logprobs=_prompt_logprobs(step, written), pooled=_pooled(step, written))

    def sampled(self, slots: array[int]) -> int:
        return _sampled(slots)

    def _states_before(self, step: StepInput) -> list[int | None]:
        """Return each sequence's state before the step; None where it is read from the cache."""
        if not self.num_state_slots:
            return [None] * len(step.rows)
        return [
            _before_all(self._seeds[row]) if source < 0 else self._states[source]
            for row, source in zip(step.rows.tolist(), step.state_sources.tolist(), strict=True)
        ]

    def _save_states(self, step: StepInput, before: list[int | None], written: list[list[int]]) -> None:
        """Write the slots of a step, in any order: none is written twice, or written and read by another sequence."""
        if not self.num_state_slots:
            return
        targets = step.state_slots.tolist() + step.state_saves[:, 2].tolist()
        assert len(set(targets)) == len(targets), "a slot is written twice"
        for index, source in enumerate(step.state_sources.tolist()):
            own = {slot for number, _, slot in step.state_saves.tolist() if number == index}
            assert source not in set(targets) - own - {int(step.state_slots[index])}, "a step overwrites what it reads"
        for index, slot in enumerate(step.state_slots.tolist()):
            self._states[slot] = written[index][-1]
        for index, num_tokens, slot in step.state_saves.tolist():
            state = written[index][num_tokens - 1] if num_tokens else before[index]
            assert state is not None
            self._states[slot] = state

    def _write(self, step: StepInput, index: int, state: int | None) -> list[int]:
        row, size = int(step.rows[index]), self.block_size
        first, last = step.query_starts[index : index + 2].tolist()
        start = int(step.seq_lens[index]) - (last - first)
        for place in range(-(-int(step.seq_lens[index]) // size)):
            held = self.pool is None or self.pool._ref_counts[self._tables[row, place]]
            assert held, "a step uses a block that was freed"
        if state is not None:
            before = state
        elif start:
            before = self._cache[self._tables[row, (start - 1) // size]][(start - 1) % size]
        else:
            before = _before_all(self._seeds[row])
        written: list[int] = []
        if self.window_group is not None:
            self._check_window(row, max(0, start + 1 - self.window_group.window), start + last - first)
        for token, slot in zip(
            step.token_ids[first:last].tolist(), step.slot_mapping[first:last].tolist(), strict=True
        ):
            block, position = slot // size, start + len(written)
            assert block == self._tables[row, position // size], "the slot is not in the block table"
            if self.window_group is not None:
                begin = max(0, position + 1 - self.window_group.window)
                visible = array("L", [self._in_window(row, place) for place in range(begin, position)])
                before = _through_window(before, visible)
            before = _written(self._last_ids[row] if token < 0 else token, before)
            self._cache[block][slot % size] = before
            if self.window_group is not None:
                place = int(step.window_slots[first + len(written)])
                assert place // size == self._window_tables[row, position // size], "not in the block table of windows"
                assert place % size == slot % size
                self._window_cache[place // size][place % size] = before
            written.append(before)
        return written

    def _in_window(self, row: int, position: int) -> int:
        """Return the value of a token of a row in the blocks of layers with a window."""
        return self._window_cache[self._window_tables[row, position // self.block_size]][position % self.block_size]

    def _check_window(self, row: int, begin: int, end: int) -> None:
        """Assert that the row's blocks of layers with a window that hold positions `begin` to `end - 1` are held."""
        if self.pool is not None:
            assert self.pool.window is not None
            for place in range(begin // self.block_size, -(-end // self.block_size)):
                held = self.pool.window._ref_counts[self._window_tables[row, place]]
                assert held, "a step uses a block of a window that was freed"

    def _read(self, row: int, length: int) -> array[int]:
        slots = array("L")
        for place in range(-(-length // self.block_size)):
            slots.extend(self._cache[self._tables[row, place]])
        return slots[:length]


@dataclass(eq=False)
class SimulatedTicket:
    runner: SimulatedRunner
    step: StepInput
    done_at: float = 0.0
    masks: list[Mask] | None = None
    output: StepOutput | None = None

    def sample(self, masks: list[Mask]) -> None:
        assert self.masks is None, "sampling was enqueued twice"
        assert len(masks) == len(self.step.masked)
        self.masks = masks

    def result(self) -> StepOutput:
        self.runner.run_until(self)
        assert self.output is not None
        return self.output


def _prompt_logprobs(step: StepInput, written: list[list[int]]) -> dict[int, list[TokenLogprobs]]:
    slots = [slot for of_sequence in written for slot in of_sequence]
    found: dict[int, list[TokenLogprobs]] = {}
    for token, target in zip(step.scored_tokens.tolist(), step.scored_targets.tolist(), strict=True):
        index = int(np.searchsorted(step.query_starts, token, side="right")) - 1
        found.setdefault(index, []).append(TokenLogprobs(target, _logprob(slots[token]), 1))
    return found


def _state(slot: int) -> npt.NDArray[np.float32]:
    """Return the hidden state of a token: small whole numbers, whose sums are exact."""
    return np.array([slot & 0xFF, slot >> 8 & 0xFF], np.float32)


def _pooled(step: StepInput, written: list[list[int]]) -> dict[int, npt.NDArray[np.float32]]:
    slots = [slot for of_sequence in written for slot in of_sequence]
    parts = zip(step.pooled.tolist(), pairwise(step.pooled_starts.tolist()), strict=True)
    return {
        index: sum((_state(slots[token]) for token in step.pooled_tokens[first:end].tolist()), np.zeros(2, np.float32))
        for index, (first, end) in parts
    }


def solo_pooled(request: Request, window: int | None = None) -> bytes:
    """Return the result of a request that is pooled alone."""
    assert request.pooling is not None
    slots = array("L")
    for token in request.prompt_token_ids:
        _add_solo(slots, token, 0, window)
    states = [_state(slot) for slot in slots]
    match request.pooling.method:
        case "last":
            return states[-1].tobytes()
        case "mean":
            return bytes((sum(states, np.zeros(2, np.float32)) / np.float32(len(states))).tobytes())
        case "logprobs":
            return np.full(len(request.pooling.token_ids), _logprob(slots[-1]), np.float32).tobytes()


def make_engine(runner: SimulatedRunner, *, token_budget: int, max_sequences: int, **settings: object) -> Engine:
    """Return an engine with greedy chunks, no target and preemption by recomputation, except for `settings`."""
    plain = {"chunking": "greedy", "inter_token_target": "off", "preemption": "recompute"}
    config = EngineConfig(
        model="simulated",
        token_budget=token_budget,
        max_sequences=max_sequences,
        swap_space=runner.num_host_blocks,  # any non-zero size: the runner already has its host blocks
        **{**plain, **settings},  # type: ignore[arg-type]
    )
    engine = Engine(runner, config, runner.clock)
    runner.pool = engine._scheduler.pool
    return engine

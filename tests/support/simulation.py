"""A simulated device for the real engine and scheduler.

`SimulatedRunner` keeps a KV cache of checksums. The value written to a token's slot depends on the token, on the
previous slot as read through the block table, and on the cache salt; a sampled token depends on all slots. So a block
that is wrongly shared, lost, evicted too early, swapped wrongly or written out of order changes the output.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from fastgen.config import EngineConfig
from fastgen.core.request import Request
from fastgen.core.scheduler import Chunk, StepPlan
from fastgen.core.step_output import SampledToken, StepOutput, TokenLogprobs
from fastgen.engine.core import Engine

VOCABULARY = 1000


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def _written(token: int, before: int) -> int:
    return zlib.crc32(token.to_bytes(4, "little"), before)


def _before_all(salt: str) -> int:
    return zlib.crc32(salt.encode())


def _sampled(slots: array[int]) -> int:
    return zlib.crc32(slots.tobytes()) % VOCABULARY


def _logprob(slot: int) -> float:
    return -slot / 2**32


def solo(request: Request) -> Iterator[int]:
    """Yield the tokens that follow a request's prompt when it runs alone, endlessly."""
    slots, before = array("L"), _before_all(request.cache_salt)
    for token in request.prompt_token_ids:
        before = _written(token, before)
        slots.append(before)
    while True:
        token = _sampled(slots)
        yield token
        before = _written(token, before)
        slots.append(before)


def solo_prompt_logprobs(request: Request) -> list[float]:
    """Return the log-probabilities of a request's prompt tokens but the first."""
    found, before = [], _before_all(request.cache_salt)
    for token in request.prompt_token_ids[:-1]:
        before = _written(token, before)
        found.append(_logprob(before))
    return found


@dataclass
class SimulatedRunner:
    """A device whose steps take base + token * tokens + kv_token * kv_tokens seconds, plus the block copies."""

    num_blocks: int
    block_size: int
    num_host_blocks: int = 0
    clock: Clock = field(default_factory=Clock)
    base: float = 0.02
    token: float = 0.0006
    kv_token: float = 2e-6
    seconds_per_block: float = 0.001
    vocab_size: int = VOCABULARY
    eos_token_ids: frozenset[int] = frozenset({0})
    plans: list[StepPlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.max_model_length = self.num_blocks * self.block_size
        self._cache = [array("L", bytes(8 * self.block_size)) for _ in range(self.num_blocks)]
        self._host = [array("L", bytes(8 * self.block_size)) for _ in range(self.num_host_blocks)]

    def execute(self, plan: StepPlan) -> StepOutput:
        self.plans.append(plan)
        for block, host in plan.swap_out:
            self._host[host] = self._cache[block][:]
        for block, host in plan.swap_in:
            self._cache[block] = self._host[host][:]
        sampled, prompt_logprobs = [], {}
        for index, chunk in enumerate(plan.chunks):
            written = self._write(chunk)
            if chunk.samples:
                sampled.append(SampledToken(_sampled(self._read(chunk))))
            if chunk.sequence.sampling.prompt_logprobs is not None:
                prompt_logprobs[index] = _rows(chunk, written)
        copies = len(plan.swap_out) + len(plan.swap_in)
        self.clock.now += self.seconds(plan.num_tokens, plan.kv_tokens) + copies * self.seconds_per_block
        return StepOutput(sampled, prompt_logprobs)

    def seconds(self, tokens: int, kv_tokens: int) -> float:
        return self.base + self.token * tokens + self.kv_token * kv_tokens

    def _write(self, chunk: Chunk) -> list[int]:
        sequence, size = chunk.sequence, self.block_size
        table = sequence.block_table
        written = []
        if chunk.start:
            before = self._cache[table[(chunk.start - 1) // size]][(chunk.start - 1) % size]
        else:
            before = _before_all(sequence.cache_salt or "")
        for position in range(chunk.start, chunk.start + chunk.num_tokens):
            before = _written(sequence.tokens[position], before)
            self._cache[table[position // size]][position % size] = before
            written.append(before)
        return written

    def _read(self, chunk: Chunk) -> array[int]:
        end, slots = chunk.start + chunk.num_tokens, array("L")
        for block in chunk.sequence.block_table:
            slots.extend(self._cache[block])
        return slots[:end]


def _rows(chunk: Chunk, written: list[int]) -> list[TokenLogprobs]:
    following = chunk.sequence.tokens[chunk.start + 1 : chunk.sequence.num_prompt_tokens]
    return [TokenLogprobs(token, _logprob(slot), 1) for token, slot in zip(following, written, strict=False)]


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
    return Engine(runner, config, runner.clock)

"""How long passes take here: measured at start with real passes over scratch sequences.

The measurements set a token budget of `auto` (`fastgen.core.budget_tuning`) and seed the engine's step model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fastgen.config import EngineConfig
from fastgen.core.block_pool import BlockPool
from fastgen.core.budget_tuning import StepTime, TunedBudget, tune_budget
from fastgen.core.chunking import LEAST_PROMPT_TOKENS
from fastgen.core.request import Request, SamplingParams
from fastgen.core.sequence import Sequence as TokenSequence
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.engine.core import Runner

log = logging.getLogger("fastgen.engine.calibration")

# Every measured pass decodes for this many sequences: a pass under load does too.
_DECODERS = 4
# How much of a context each has: enough to see what resident KV costs.
_CONTEXT = 256
# A prompt chunk of a measured pass is at most this long: what a prompt of usual length brings.
_LONGEST_CHUNK = 512
# After this many sizes in a row that give no more throughput, larger ones are not tried.
_PATIENCE = 3
_FLAT = 1.01
_MOST_ROUNDS = 5
# How long measuring may go on once each size was seen: start to ready is counted in seconds.
_START_SECONDS = 2.0

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was measured.

    Attributes:
        curve: a point for each size of pass, all over the same resident KV.
        contexts: passes of one size over less and over more resident KV.
    """

    curve: tuple[StepTime, ...]
    contexts: tuple[StepTime, ...]

    @property
    def points(self) -> tuple[StepTime, ...]:
        """Everything, as the step model is fed."""
        return (*self.contexts, *self.curve)


def ladder(most_tokens: int) -> list[int]:
    """Sizes of pass to try: 16, 32, 48, 64, 96, 128, 192 and so on, the largest last."""
    sizes = {most_tokens}
    power = 16
    while power < most_tokens:
        sizes |= {power, power * 3 // 2} if power > 16 else {power}
        power *= 2
    return sorted(size for size in sizes if size <= most_tokens)


def calibrate(
    runner: Runner, config: EngineConfig, on_progress: OnProgress, clock: Callable[[], float] = time.perf_counter
) -> tuple[EngineConfig, tuple[StepTime, ...]]:
    """Measures what the settings ask for, before the engine takes its first request.

    Returns:
        The settings, with a number for a token budget of `auto`, and the step times that were measured.
    """
    started = clock()
    if config.budget != "auto":
        return config, ()
    found = measure(
        runner,
        ladder(config.most_tokens),
        seconds=_START_SECONDS,
        on_progress=lambda fraction: on_progress("measuring passes", fraction),
        clock=clock,
    )
    knee = tuned_budget(found, config)
    log.info("%s (measured in %.1f s)", describe(knee), clock() - started)
    return replace(config, token_budget=knee.token_budget), found.points


def tuned_budget(calibration: Calibration, config: EngineConfig) -> TunedBudget:
    """The token budget that the settings lead to on this curve."""
    target = config.inter_token_target
    return tune_budget(
        calibration.curve,
        target_seconds=target / 1000 if isinstance(target, int) else None,
        # Where no target can be met, a prompt still has to get on.
        at_least=config.max_sequences or LEAST_PROMPT_TOKENS,
        at_most=config.most_tokens,
    )


def describe(knee: TunedBudget) -> str:
    """What was chosen and why, in one line."""
    return (
        f"token budget auto: {knee.token_budget}, set by the {knee.bound}: a pass of {knee.token_budget} tokens takes "
        f"{knee.seconds * 1000:.1f} ms, {knee.throughput:.0f} tokens/s, {knee.throughput / knee.peak:.0%} of the peak"
    )


def measure(
    runner: Runner,
    sizes: Sequence[int],
    *,
    seconds: float,
    patience: int = _PATIENCE,
    context: int = _CONTEXT,
    on_progress: Callable[[float], None] = lambda _fraction: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Times passes of these sizes, smallest first; of several times of one size the least counts, as noise only adds.

    Sizes that the KV cache has no room for are left out.

    Args:
        runner: what passes run on; nothing else may use it meanwhile.
        sizes: forward tokens of each pass, ascending.
        seconds: sizes are measured again, up to five times, until this much time has gone by.
        patience: larger sizes are left out once this many in a row have given no more throughput.
        context: resident tokens of each of the four sequences that decode in every pass.
        on_progress: hears the share that is done, 0 to 1.
        clock: seconds.
    """
    started = clock()
    bench = _Bench(runner, context, clock)
    within = [size for size in sizes if size <= bench.most_tokens] or [bench.most_tokens]
    bench.fill(max(within))
    best: dict[int, StepTime] = {}
    for index, size in enumerate(within):
        best[size] = bench.time(size)
        on_progress((index + 1) / len(within) / _MOST_ROUNDS)
        if _is_flat([point.throughput for point in best.values()], patience):
            break
    contexts = [bench.time_contexts(share) for share in (0.0, 1.0)]
    for round_ in range(1, _MOST_ROUNDS):
        if clock() - started >= seconds:
            break
        for size in best:
            best[size] = min(best[size], bench.time(size), key=lambda point: point.seconds)
        again = [bench.time_contexts(share) for share in (0.0, 1.0)]
        contexts = [min(pair, key=lambda p: p.seconds) for pair in zip(contexts, again, strict=True)]
        on_progress((round_ + 1) / _MOST_ROUNDS)
    on_progress(1.0)
    return Calibration(tuple(best.values()), tuple(contexts))


def _is_flat(throughputs: Sequence[float], patience: int) -> bool:
    """Have the last `patience` sizes given no more than those before them?"""
    before, last = throughputs[:-patience], throughputs[-patience:]
    return bool(before) and max(last) < _FLAT * max(before)


class _Bench:
    """Scratch sequences in an empty KV cache, and a clock. Block tables are its own: the engine's pool knows nothing.

    Decoding sequences hold a context that real passes have written; prompt chunks use the blocks after theirs.
    """

    def __init__(self, runner: Runner, context: int, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self._pool = pool = BlockPool(runner.num_blocks, runner.block_size)
        self._context = min(context, runner.max_model_length - 1)
        # Half of the cache at most: the other half is for prompt chunks.
        fitting = runner.num_blocks // 2 // pool.blocks_for(self._context + 1)
        self._decoders = [self._sequence(self._context + 1) for _ in range(max(1, min(_DECODERS, fitting)))]
        for decoder in self._decoders:
            pool.extend(decoder.block_table, len(decoder.tokens))
        self._longest_chunk = max(1, min(_LONGEST_CHUNK, runner.max_model_length - 1))
        prompts = pool.num_free // pool.blocks_for(self._longest_chunk)
        self.most_tokens = len(self._decoders) + prompts * self._longest_chunk

    def fill(self, most_tokens: int) -> None:
        """Writes the decoders' contexts, in passes of at most this many tokens; warms up everything that runs."""
        behind = [decoder for decoder in self._decoders if decoder.num_computed_tokens < self._context]
        while behind:
            share = max(1, most_tokens // len(behind))
            chunks = []
            for decoder in behind:
                size = min(share, self._context - decoder.num_computed_tokens)
                chunks.append(Chunk(decoder, decoder.num_computed_tokens, size))
            self._run(chunks)
            for chunk in chunks:
                chunk.sequence.advance(chunk.num_tokens)
            behind = [decoder for decoder in behind if decoder.num_computed_tokens < self._context]

    def time(self, size: int) -> StepTime:
        """One pass of `size` tokens: the decoders' and prompt chunks."""
        decoding = self._decoders[:size]
        chunks = [Chunk(sequence, self._context, 1) for sequence in decoding]
        left, prompts = size - len(decoding), []
        while left:
            prompt = self._sequence(min(left, self._longest_chunk) + 1)
            self._pool.extend(prompt.block_table, len(prompt.tokens) - 1)
            prompts.append(prompt)
            left -= len(prompt.tokens) - 1
        chunks += [Chunk(prompt, 0, len(prompt.tokens) - 1) for prompt in prompts]
        point = self._run(chunks)
        for prompt in prompts:
            self._pool.release(prompt.block_table)
        return point

    def time_contexts(self, share: float) -> StepTime:
        """One pass of the decoders alone, each over this share of its context."""
        context = min(self._context, max(1, round(self._context * share)))
        chunks = []
        for decoder in self._decoders:
            sequence = self._sequence(context + 1)
            sequence.block_table = decoder.block_table
            sequence.num_computed_tokens = context
            chunks.append(Chunk(sequence, context, 1))
        return self._run(chunks)

    def _run(self, chunks: Sequence[Chunk]) -> StepTime:
        plan = StepPlan(tuple(sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)))
        begin = self._clock()
        self._runner.execute(plan)
        seconds = self._clock() - begin
        return StepTime(plan.num_tokens, plan.kv_tokens, max(seconds, 1e-9))

    def _sequence(self, num_tokens: int) -> TokenSequence:
        # Tokens that differ: a model of experts must not send all of them to the same ones.
        vocabulary = self._runner.vocab_size
        tokens = [(7919 * index + 13) % vocabulary for index in range(num_tokens)]
        request = Request(id="scratch", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=1))
        return TokenSequence(request, ordinal=0, arrival=0.0, seed=0)

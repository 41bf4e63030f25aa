"""Measures step times at start, with real steps over scratch sequences.

The measurements determine a token budget of `auto` (`fastgen.core.budget_tuning`) and seed the engine's step model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

from fastgen.core.blocks.block_pool import BlockPool
from fastgen.core.budget_tuning import TunedBudget, measured_sizes, tune_budget
from fastgen.core.chunking import MIN_PROMPT_TOKENS
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.sequence import Sequence as TokenSequence
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.core.step_times import StepTime
from fastgen.model.step_input import StepInputBuilder
from fastgen.runner.interface import Runner
from fastgen.settings import EngineConfig

log = logging.getLogger("fastgen.engine.calibration")

# Sequences that decode in the steps of the curve, as under load; fewer if they do not fit in half of the cache.
_NUM_DECODES = 4
# Tokens in the context of each: enough to measure the cost of reading KV.
_CONTEXT = 256
# Longest prompt chunk of a measured step.
_MAX_CHUNK = 512
# Tokens of a chunk over a long context, and of a short one over the longest context measured.
_CONTEXT_CHUNK, _SHORT_CHUNK = 64, 16
# The context of a chunk starts with _CHUNK_CONTEXT tokens and grows by the factor _CONTEXT_GROWTH, until the step takes
# _SLOWDOWN times as long as without a context.
_CHUNK_CONTEXT, _CONTEXT_GROWTH, _SLOWDOWN = 1024, 4, 2.0
# Then the chunk grows by the factor _CHUNK_GROWTH, until its step takes _SEPARATION times as long as that of a short
# chunk over the same context.
_CHUNK_GROWTH, _SEPARATION = 4, 2.0
# Larger steps are skipped after this many sizes in a row that improve throughput by less than _MIN_GAIN.
_PATIENCE = 3
_MIN_GAIN = 1.01
_MAX_ROUNDS = 5
# No further round is started after this time.
_START_SECONDS = 2.0

OnProgress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Measured step times.

    Attributes:
        curve: one point per step size, all with the same contexts of the decoding sequences.
        contexts: steps of one size over little and over much KV.
        chunks: steps of chunks over contexts of increasing length; empty if the model's length or the KV cache is too
            small for them.
    """

    curve: tuple[StepTime, ...]
    contexts: tuple[StepTime, ...]
    chunks: tuple[StepTime, ...]

    @property
    def points(self) -> tuple[StepTime, ...]:
        """All points, in the order for the step model."""
        return (*self.contexts, *self.chunks, *self.curve)


def calibrate(
    runner: Runner, config: EngineConfig, on_progress: OnProgress, clock: Callable[[], float] = time.perf_counter
) -> tuple[EngineConfig, tuple[StepTime, ...]]:
    """Measure step times if the token budget is `auto`. Call it before the first request.

    Returns:
        The settings with the token budget found, and the measured step times; the unchanged settings and no times if
        the token budget is a number.
    """
    started = clock()
    if config.budget != "auto":
        return config, ()
    calibration = measure(
        runner,
        measured_sizes(config.most_tokens),
        seconds=_START_SECONDS,
        on_progress=lambda fraction: on_progress("calibrating", fraction),
        clock=clock,
    )
    tuned = tuned_budget(calibration, config)
    log.info("%s (measured in %.1f s)", describe_budget(tuned), clock() - started)
    return replace(config, token_budget=tuned.token_budget), calibration.points


def tuned_budget(calibration: Calibration, config: EngineConfig) -> TunedBudget:
    """Return the token budget for the measured curve and the settings."""
    target = config.inter_token_target
    return tune_budget(
        calibration.curve,
        target_seconds=target / 1000 if isinstance(target, int) else None,
        # Prompts must advance even if no step meets the target, and beside as many decodes as may run.
        minimum=(config.max_sequences or 0) + MIN_PROMPT_TOKENS,
        maximum=config.most_tokens,
    )


def describe_budget(tuned: TunedBudget) -> str:
    """Return one line for the log: the budget and what determined it."""
    return (
        f"token budget auto: {tuned.token_budget}, set by the {tuned.bound}: a step of {tuned.token_budget} tokens "
        f"takes {tuned.seconds * 1000:.1f} ms, {tuned.throughput:.0f} tokens/s, {tuned.throughput / tuned.peak:.0%} "
        "of the peak"
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
    """Measure the times of steps by their size, by the KV of their decodes, and by the context of their chunks.

    The fastest time of each step is kept, because noise only adds time. Sizes that do not fit in the KV cache are
    skipped. If none fits, the largest step that does is measured.

    Args:
        runner: runs the steps; nothing else may use it meanwhile.
        sizes: tokens of the steps of the curve, ascending.
        seconds: all steps are measured again until this time has passed, in at most five rounds.
        patience: larger sizes are skipped after this many in a row that give less than 1 % more throughput.
        context: tokens in the context of each sequence that decodes in the steps of the curve. There are at most four.
        on_progress: called with the completed fraction, 0 to 1.
        clock: in seconds.
    """
    started = clock()
    bench = _Bench(runner, context, clock)
    within = [size for size in sizes if size <= bench.most_tokens] or [bench.most_tokens]
    bench.fill(max(within))
    best: dict[int, StepTime] = {}
    for index, size in enumerate(within):
        best[size] = bench.time(size)
        on_progress((index + 1) / len(within) / _MAX_ROUNDS)
        if _is_flat([point.throughput for point in best.values()], patience):
            break
    contexts = [bench.time_contexts(share) for share in (0.0, 1.0)]
    chunks = _time_chunks(bench)
    for round_ in range(1, _MAX_ROUNDS):
        if clock() - started >= seconds:
            break
        best = {size: _faster(point, bench.time(size)) for size, point in best.items()}
        contexts = [
            _faster(point, bench.time_contexts(share)) for point, share in zip(contexts, (0.0, 1.0), strict=True)
        ]
        chunks = {chunk: _faster(point, bench.time_chunks(*chunk)) for chunk, point in chunks.items()}
        on_progress((round_ + 1) / _MAX_ROUNDS)
    on_progress(1.0)
    return Calibration(tuple(best.values()), tuple(contexts), tuple(chunks.values()))


def _time_chunks(bench: _Bench) -> dict[tuple[int, int, int], StepTime]:
    """Time steps of chunks over longer and longer contexts; return them by the arguments of `_Bench.time_chunks`."""
    longest = bench.longest_context(_CONTEXT_CHUNK)
    if not longest:
        return {}
    found = dict[tuple[int, int, int], StepTime]()

    def time_chunks(context: int, num_tokens: int, count: int) -> float:
        point = found[context, num_tokens, count] = bench.time_chunks(context, num_tokens, count)
        return point.seconds

    plain, context = time_chunks(0, _CONTEXT_CHUNK, 1), 0
    seconds = plain
    while context < longest and seconds < _SLOWDOWN * plain:
        context = min(longest, _CONTEXT_GROWTH * context or _CHUNK_CONTEXT)
        seconds = time_chunks(context, _CONTEXT_CHUNK, 1)
    # Decodes over the context show the cost of reading the KV: a chunk reads it once, and each of its tokens attends to
    # it. On a GPU the attention of 64 tokens takes no longer than reading the KV, or than a launch: more tokens do.
    time_chunks(context, 1, _NUM_DECODES)
    short, size, largest = time_chunks(context, _SHORT_CHUNK, 1), _CONTEXT_CHUNK, bench.longest_chunk(context)
    while size < largest and seconds < _SEPARATION * short:
        size = min(largest, _CHUNK_GROWTH * size)
        seconds = time_chunks(context, size, 1)
    for part in (2, 4) if size > _CONTEXT_CHUNK else ():
        time_chunks(bench.whole_blocks(context // part), size, 1)
    return found


def _faster(one: StepTime, other: StepTime) -> StepTime:
    return min(one, other, key=lambda point: point.seconds)


def _is_flat(throughputs: Sequence[float], patience: int) -> bool:
    """Return whether the last `patience` sizes gave less than 1 % more throughput than those before them."""
    before, last = throughputs[:-patience], throughputs[-patience:]
    return bool(before) and max(last) < _MIN_GAIN * max(before)


class _Bench:
    """Scratch sequences in an empty KV cache, with a block pool of their own.

    The contexts of decoding sequences are written by real steps; prompt chunks use the remaining blocks.
    """

    def __init__(self, runner: Runner, context: int, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self._window = runner.window_group
        self._builder = StepInputBuilder(runner.block_size, has_window=self._window is not None)
        self._pool = pool = BlockPool(runner.num_blocks, runner.block_size)
        # Sequences may share slots of recurrent states: only the time of a step matters.
        self._state_slots = cycle(range(runner.num_state_slots))
        self._context = min(context, runner.max_model_length - 1)
        # At most half of the cache; the other half is for prompt chunks.
        fitting = runner.num_blocks // 2 // pool.blocks_for(self._context + 1)
        self._decoders = [self._sequence(self._context + 1) for _ in range(max(1, min(_NUM_DECODES, fitting)))]
        for decoder in self._decoders:
            pool.extend(decoder.block_table, len(decoder.tokens))
        self._longest_chunk = max(1, min(_MAX_CHUNK, runner.max_model_length - 1))
        prompts = pool.num_free // pool.blocks_for(self._longest_chunk)
        self.most_tokens = len(self._decoders) + prompts * self._longest_chunk

    def fill(self, most_tokens: int) -> None:
        """Write the decoders' contexts in steps of at most `most_tokens`, but at least a token of each.

        This also warms up the kernels.
        """
        while behind := [decoder for decoder in self._decoders if decoder.num_computed_tokens < self._context]:
            share = max(1, most_tokens // len(behind))
            starts = [decoder.num_computed_tokens for decoder in behind]
            chunks = [
                Chunk(decoder, start, min(share, self._context - start))
                for decoder, start in zip(behind, starts, strict=True)
            ]
            self._run(chunks)
            for chunk in chunks:
                chunk.sequence.num_computed_tokens += chunk.num_tokens

    def time(self, size: int) -> StepTime:
        """Time one step of `size` tokens: the decodes and prompt chunks."""
        chunks = [Chunk(sequence, self._context, 1) for sequence in self._decoders[:size]]
        for done in range(len(chunks), size, self._longest_chunk):
            num_tokens = min(size - done, self._longest_chunk)
            prompt = self._sequence(num_tokens + 1)
            self._pool.extend(prompt.block_table, num_tokens)
            chunks.append(Chunk(prompt, 0, num_tokens))
        point = self._run(chunks)
        for chunk in chunks[len(self._decoders) :]:
            self._builder.release(chunk.sequence)
            self._pool.release(chunk.sequence.block_table)
        return point

    def time_contexts(self, share: float) -> StepTime:
        """Time one step of decodes only, each over this share of its context."""
        context = min(self._context, max(1, round(self._context * share)))
        chunks = []
        for decoder in self._decoders:
            sequence = self._sequence(context + 1)
            sequence.block_table = decoder.block_table
            sequence.num_computed_tokens = context
            chunks.append(Chunk(sequence, context, 1))
        point = self._run(chunks)
        for chunk in chunks:
            self._builder.release(chunk.sequence)
        return point

    def longest_context(self, num_tokens: int) -> int:
        """Return the longest context over which a chunk can be timed; 0 if there is none."""
        size = self._pool.block_size
        if self._context < size or self._pool.num_free < self._pool.blocks_for(num_tokens):
            return 0
        # Where the model allows it, longer chunks can be timed over it, too.
        room = max(num_tokens, min(self._longest_chunk, self._runner.max_model_length // 4))
        return self.whole_blocks(max(0, self._runner.max_model_length - room))

    def whole_blocks(self, num_tokens: int) -> int:
        """Return the tokens of the whole blocks among `num_tokens`."""
        return num_tokens // self._pool.block_size * self._pool.block_size

    def longest_chunk(self, context: int) -> int:
        """Return the tokens of the longest chunk that can be timed over a context."""
        free = self._pool.num_free * self._pool.block_size
        return min(self._longest_chunk, free, self._runner.max_model_length - context)

    def time_chunks(self, context: int, num_tokens: int, count: int) -> StepTime:
        """Time one step of equal chunks, at most `count`, each over a context of whole blocks.

        The contexts consist of the full blocks of a decoder, over and over: they need no memory of their own.
        """
        blocks = self._decoders[0].block_table[: self._context // self._pool.block_size]
        repeated = list(islice(cycle(blocks), context // self._pool.block_size))
        chunks = []
        for _ in range(min(count, self._pool.num_free // self._pool.blocks_for(num_tokens))):
            sequence = self._sequence(context + num_tokens)
            sequence.num_computed_tokens = context
            sequence.block_table = list(repeated)
            self._pool.extend(sequence.block_table, context + num_tokens)
            chunks.append(Chunk(sequence, context, num_tokens))
        point = self._run(chunks)
        for chunk in chunks:
            self._builder.release(chunk.sequence)
            self._pool.release(chunk.sequence.block_table[len(repeated) :])
        return point

    def _run(self, chunks: Sequence[Chunk]) -> StepTime:
        plan = StepPlan(tuple(sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)))
        if self._window is not None:
            # Sequences may share blocks of layers with a window, too.
            for sequence in plan.sequences:
                sequence.window_table = [block % self._window.num_blocks for block in sequence.block_table]
        begin = self._clock()
        ticket = self._runner.launch(self._builder.build(plan))
        ticket.sample([])
        ticket.result()
        seconds = self._clock() - begin
        return StepTime(plan.work, max(seconds, 1e-9))

    def _sequence(self, num_tokens: int) -> TokenSequence:
        # Different tokens, so that a mixture-of-experts model does not route all of them to the same experts.
        tokens = [(7919 * index + 13) % self._runner.vocab_size for index in range(num_tokens)]
        request = Request(id="scratch", prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=1))
        sequence = TokenSequence(request, ordinal=0, arrival=0.0, seed=0)
        sequence.state_slot = next(self._state_slots, None)
        return sequence

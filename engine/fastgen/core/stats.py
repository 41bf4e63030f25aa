"""Statistics of a step and of the scheduler's state after it, and the trace of a step."""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from itertools import islice

from fastgen.core.sequence import Sequence
from fastgen.core.step_output import EagerReason
from fastgen.core.step_plan import StepPlan

# Queued requests that a trace lists. `SchedulerStats` counts all.
_MOST_QUEUED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The scheduler's state between two steps.

    Attributes:
        num_running: sequences that hold KV blocks.
        num_waiting: queued sequences without KV, including preempted ones that will be recomputed, and sequences whose
            grammar is being compiled.
        num_swapped: queued sequences whose KV is in the host buffer.
        kv_tokens: tokens of running sequences whose KV is in the cache. A token shared by several sequences counts
            once for each.
        kv_blocks_used: blocks held by sequences.
        window_blocks_used: the same for the blocks of layers with a sliding window, where these have their own.
        backlog_prompt_tokens: prompt tokens not yet computed, of queued and mid-prefill sequences, and of those whose
            grammar is being compiled. Tokens to recompute count. Unbounded: it grows while load exceeds capacity.
        oldest_waiting_seconds: age of the oldest sequence that is waiting or swapped; 0 if there is none.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    kv_tokens: int = 0
    kv_blocks_used: int = 0
    window_blocks_used: int = 0
    backlog_prompt_tokens: int = 0
    oldest_waiting_seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class StepStats:
    """Counters of one step. All fields are 0, empty or None in a report without a step.

    Attributes:
        step_seconds: duration, set when the step is done.
        queue_seconds: for each request scheduled for the first time, how long it was queued.
        preemptions: sequences that lost their blocks to this step. `swapped_out` of them moved to the host buffer; the
            others will be recomputed.
        out_of_memory: 1 if the step ran out of memory. It has no results then: its tokens are scheduled again, or its
            only request ends. Of the other fields only `preemptions` is set.
        prefix_cache_query_tokens: prompt tokens of the requests scheduled for the first time, without those whose
            prompt is not looked up in the prefix cache. `prefix_cache_hit_tokens` of them were found in it.
        eager_reason: why the step was not replayed from a CUDA graph, set when it is done; None if it was replayed.
    """

    step_seconds: float = 0.0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    queue_seconds: list[float] = field(default_factory=list)
    preemptions: int = 0
    swapped_out: int = 0
    out_of_memory: int = 0
    prefix_cache_query_tokens: int = 0
    prefix_cache_hit_tokens: int = 0
    eager_reason: EagerReason | None = None

    @classmethod
    def of(cls, plan: StepPlan, now: float) -> StepStats:
        """Return the counts of `plan`. Call it before `first_scheduled` is set; `now` is when the step starts."""
        stats = cls(
            preemptions=len(plan.preempted),
            swapped_out=sum(bool(sequence.host_blocks) for sequence in plan.preempted),
            decode_tokens=plan.num_decode_tokens,
        )
        stats.prefill_tokens = plan.num_tokens - stats.decode_tokens
        for sequence in plan.sequences[plan.num_continued :]:
            if sequence.first_scheduled is None:
                stats.queue_seconds.append(now - sequence.arrival)
                if sequence.reads_prefix_cache:
                    stats.prefix_cache_query_tokens += sequence.num_prompt_tokens
                    stats.prefix_cache_hit_tokens += sequence.num_cached_tokens
        return stats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """What one step computed for each request, and the queue and KV blocks after it.

    Built only while a client watches the steps.

    Attributes:
        decodes: ids of the requests with one decode token in the step.
        prompts: (id, tokens in the step) of the other ones: prompt tokens, and tokens that are recomputed.
        queue: (id, tokens to compute) of the first queued requests, in scheduling order.
        blocks: (id, KV blocks held) of running requests. A block shared by several counts once for each.
    """

    decodes: list[str]
    prompts: list[tuple[str, int]]
    queue: list[tuple[str, int]]
    blocks: list[tuple[str, int]]

    @classmethod
    def of(cls, plan: StepPlan | None, running: abc.Iterable[Sequence], waiting: abc.Iterable[Sequence]) -> StepTrace:
        """Describe a step, if there was one, and the state after it."""
        plan = plan or StepPlan()
        indices = range(len(plan.sequences))
        return cls(
            decodes=[plan.sequences[i].id for i in indices if plan.is_decode(i)],
            prompts=[(plan.sequences[i].id, plan.ends[i] - plan.starts[i]) for i in indices if not plan.is_decode(i)],
            queue=[(sequence.id, sequence.num_pending_tokens) for sequence in islice(waiting, _MOST_QUEUED)],
            blocks=[(sequence.id, len(sequence.block_table)) for sequence in running],
        )

"""What the scheduler says of itself after a pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """A snapshot between two passes.

    Attributes:
        num_running: sequences that hold KV blocks.
        num_waiting: sequences that hold none, those that were preempted and are to be recomputed among them.
        num_swapped: sequences whose KV is in the host buffer.
        kv_tokens: tokens of running sequences whose KV is in the cache; one that several share counts for each.
        kv_blocks_used: blocks held by sequences.
        backlog_prompt_tokens: prompt tokens not yet computed, of waiting and half-prefilled sequences. Recomputation
            counts. Unbounded: it grows with load that the engine cannot take.
        oldest_waiting_seconds: how long ago the one arrived that has been alive longest of those waiting or swapped.
    """

    num_running: int
    num_waiting: int
    num_swapped: int
    kv_tokens: int
    kv_blocks_used: int
    backlog_prompt_tokens: int
    oldest_waiting_seconds: float

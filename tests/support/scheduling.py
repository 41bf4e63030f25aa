"""A scheduler without an engine, over hand-made sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastgen.core.blocks.block_pool import BlockPool
from fastgen.core.blocks.window_pool import WindowGroup
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.scheduler import Scheduler
from fastgen.core.sequence import Sequence
from fastgen.core.step_plan import StepPlan
from fastgen.core.step_times import StepCoefficients


@dataclass
class Known:
    """Step times that need no fit."""

    coefficients: StepCoefficients


def scheduler(
    *,
    blocks: int = 1000,
    block_size: int = 4,
    budget: int = 16,
    sequences: int = 8,
    state_slots: int = 0,
    window_group: WindowGroup | None = None,
    **parts: Any,
) -> Scheduler:
    """Return a scheduler of plain Dynamic SplitFuse, except for `parts`."""
    pool = BlockPool(blocks, block_size, state_slots, window_group)
    return Scheduler(pool, token_budget=budget, max_sequences=sequences, end_tokens=frozenset({0}), **parts)


class Arrivals:
    """Creates sequences by arrival. `prompt`: tokens or a length. Without a salt, sequences share no blocks."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(
        self,
        prompt: int | list[int],
        generate: int = 5,
        *,
        priority: int = 0,
        deadline: float | None = None,
        salt: str | None = None,
        **sampling: object,
    ) -> Sequence:
        params = SamplingParams(max_tokens=generate, **sampling)  # type: ignore[arg-type]
        request = Request(
            id=str(self.count),
            prompt_token_ids=[1] * prompt if isinstance(prompt, int) else prompt,
            sampling=params,
            priority=priority,
            deadline_seconds=deadline,
        )
        self.count += 1
        made = Sequence(request, ordinal=self.count, arrival=float(self.count), seed=0)
        made.cache_salt = salt
        return made


def run(s: Scheduler, token: int = 7) -> StepPlan:
    """Run one step in which every sampled token is `token`."""
    plan = s.schedule()
    assert plan is not None
    s.settle(plan, [token for chunk in plan.chunks if chunk.samples])
    s.check_integrity()
    return plan


def run_to_end(s: Scheduler, token: int = 7) -> None:
    """Run steps until all sequences have finished."""
    while s.has_work:
        run(s, token)


def serve(s: Scheduler, sequence: Sequence) -> int:
    """Run a sequence to its end and return how many tokens of its prompt were cached."""
    s.add(sequence)
    run_to_end(s)
    return sequence.num_cached_tokens


def sizes(plan: StepPlan) -> dict[str, int]:
    """Return the tokens of the step by request id."""
    return {chunk.sequence.id: chunk.num_tokens for chunk in plan.chunks}

"""What one step computed for which request, for people who watch a server.

Ids and token counts, no tokens. It is built only while somebody watches: see `fastgen.engine.messages.Watch`.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from itertools import islice

from fastgen.core.sequence import Sequence
from fastgen.core.step_plan import StepPlan

# Queued requests that a trace lists. `SchedulerStats` counts all.
_MOST_QUEUED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """A step by request, and the owners of queue places and KV blocks after it.

    Attributes:
        decodes: ids of the requests with one decode token in the step.
        prompts: (id, prompt tokens in the step).
        queue: (id, tokens to compute) of the first queued requests, in scheduling order.
        blocks: (id, KV blocks held) of running requests. A block shared by several counts once for each.
    """

    decodes: list[str]
    prompts: list[tuple[str, int]]
    queue: list[tuple[str, int]]
    blocks: list[tuple[str, int]]

    @classmethod
    def of(cls, plan: StepPlan | None, running: abc.Iterable[Sequence], waiting: abc.Iterable[Sequence]) -> StepTrace:
        """Describe a step, or None without one, and the state after it."""
        plan = plan or StepPlan()
        decodes: list[str] = []
        prompts: list[tuple[str, int]] = []
        for index, sequence in enumerate(plan.sequences):
            if plan.is_decode(index):
                decodes.append(sequence.id)
            else:
                prompts.append((sequence.id, plan.ends[index] - plan.starts[index]))
        return cls(
            decodes=decodes,
            prompts=prompts,
            queue=[(sequence.id, sequence.num_pending_tokens) for sequence in islice(waiting, _MOST_QUEUED)],
            blocks=[(sequence.id, len(sequence.block_table)) for sequence in running],
        )

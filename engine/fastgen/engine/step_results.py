"""What the results of a step add to each request's output."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastgen.core.sequence import Sequence
from fastgen.core.step_output import StepOutput, TokenLogprobs
from fastgen.core.step_plan import StepPlan
from fastgen.link.messages import TokenOutput


def token_output(
    sequence: Sequence,
    token_ids: list[int],
    logprobs: TokenLogprobs | None = None,
    prompt_logprobs: list[TokenLogprobs] | None = None,
    pooled: bytes | None = None,
) -> TokenOutput:
    """Return the output of a sequence in a step.

    The sequence's first output also has the cached tokens and the queue time.
    """
    cached_tokens = queue_seconds = None
    if not sequence.is_reported and sequence.first_scheduled is not None:
        sequence.is_reported = True
        cached_tokens, queue_seconds = sequence.num_cached_tokens, sequence.first_scheduled - sequence.arrival
    return TokenOutput(
        request_id=sequence.id,
        token_ids=token_ids,
        finish_reason=sequence.finish_reason,
        logprobs=None if logprobs is None else [logprobs],
        prompt_logprobs=prompt_logprobs,
        cached_tokens=cached_tokens,
        queue_seconds=queue_seconds,
        pooled=pooled,
    )


def new_prompt_logprobs(plan: StepPlan, result: StepOutput) -> dict[Sequence, list[TokenLogprobs]]:
    """Return the prompt log-probabilities of each unfinished sequence that is not pooled.

    Those that were reported before it was preempted are left out.

    Row j of a chunk belongs to prompt token `start + j + 1`.
    """
    new = {}
    for index, rows in result.prompt_logprobs.items():
        sequence, start = plan.sequences[index], plan.starts[index]
        if sequence.finish_reason is not None or sequence.pooling is not None:
            continue
        unreported = rows[max(0, sequence.num_prompt_logprobs - start) :]
        if unreported:
            sequence.num_prompt_logprobs = start + len(rows)
            new[sequence] = unreported
    return new


def add_pooled(plan: StepPlan, result: StepOutput) -> dict[Sequence, list[TokenLogprobs]]:
    """Add the step's hidden states to the sum of each unfinished pooled sequence.

    Call it before the step is settled.

    Returns:
        These sequences with the log-probabilities that the step computed for them.
    """
    pooled = {}
    for index in range(plan.num_continued, len(plan.sequences)):
        sequence = plan.sequences[index]
        if sequence.pooling is None or sequence.finish_reason is not None:
            continue
        if index in result.pooled:
            states = result.pooled[index]
            # A recomputed sequence starts again at token 0.
            is_first = plan.starts[index] == 0 or sequence.pooled_sum is None
            sequence.pooled_sum = states if is_first else sequence.pooled_sum + states
        pooled[sequence] = result.prompt_logprobs.get(index, [])
    return pooled


def pooled_result(sequence: Sequence, logprobs: list[TokenLogprobs]) -> bytes:
    """Return the result of a finished pooled sequence, as in `TokenOutput.pooled`."""
    assert sequence.pooling is not None
    result: Any = sequence.pooled_sum
    match sequence.pooling.method:
        case "mean":
            result = result / np.float32(sequence.num_prompt_tokens)
        case "logprobs":
            result = [entry.logprob for entry in logprobs]
    return np.ascontiguousarray(result, "<f4").tobytes()

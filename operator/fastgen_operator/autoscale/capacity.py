"""Estimate the capacity of one replica: forward tokens per second within the inter-token target. Pure.

In the steady state of Dynamic SplitFuse, each step processes one token of each of N decoding sequences, and prompt
tokens at the rate at which sequences arrive and finish. A request contributes I prompt tokens over O steps, so a step
has N (1 + I/O) forward tokens and N (P + O/2) resident KV tokens, where P also includes the prompt tokens from the
prefix cache. The step time, a + b · tokens + c · resident tokens, is linear in N. The largest N within all bounds gives
the capacity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from fastgen_operator.autoscale.observation import Sample

# Target utilization of the KV cache. Above it, preemptions become likely.
KV_SHARE: Final = 0.80

# If the target leaves fewer forward tokens per step than this, no number of replicas meets it.
_LEAST_TOKENS: Final = 16

Source = Literal["StepModel", "Throughput"]


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The mean request: prompt tokens computed, prompt tokens in total, and tokens generated."""

    computed: float
    prompt: float
    generated: float


# A typical chat request, assumed until requests have finished.
DEFAULT_SHAPE: Final = RequestShape(computed=512.0, prompt=512.0, generated=128.0)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of one replica.

    Attributes:
        tokens_per_second: forward tokens per second.
        token_budget: maximum forward tokens per step.
        source: StepModel (the engines' step-time model) or Throughput (measured while a backlog existed).
    """

    tokens_per_second: float
    token_budget: int
    source: Source


def modelled(sample: Sample, shape: RequestShape, inter_token_seconds: float, max_sequences: int) -> float | None:
    """Return the forward tokens per second according to the replica's step model; None until it is fitted.

    The inter-token target is ignored if no step can meet it: more replicas would not help.
    """
    a, b, c = sample.step_model
    # Steps of equal size cannot separate a from b: the engine then reports a = c = 0, which underrates larger steps.
    if b <= 0 or a + c <= 0 or sample.token_budget < 1:
        return None
    generated = max(1.0, shape.generated)
    tokens = 1 + shape.computed / generated
    resident = shape.prompt + generated / 2
    bounds = [sample.token_budget / tokens, float(max_sequences)]
    if sample.kv_capacity_tokens > 0:
        bounds.append(max(1.0, KV_SHARE * sample.kv_capacity_tokens / resident))
    sequence_seconds = b * tokens + c * resident
    in_time = (inter_token_seconds - a) / sequence_seconds
    if in_time * tokens >= _LEAST_TOKENS:
        bounds.append(in_time)
    sequences = min(bounds)
    return sequences * tokens / (a + sequences * sequence_seconds)


def fleet_capacity(
    samples: Sequence[Sample], shape: RequestShape, observed: float | None, inter_token_seconds: float, sequences: int
) -> Capacity | None:
    """Return the capacity of one replica as the median over all replicas, which tolerates outliers; None if unknown.

    Args:
        samples: the newest sample of each replica, at least one.
        observed: throughput of one replica measured under a backlog; it caps the modelled capacity. 0 is ignored: the
            replica is stuck, which says nothing about its capacity.
        sequences: maximum number of sequences that one replica runs.
    """
    found = [modelled(sample, shape, inter_token_seconds, sequences) for sample in samples]
    known = [value for value in found if value is not None]
    model = median(known) if known else math.inf
    budget = int(median(sample.token_budget for sample in samples))
    if observed and observed < model:
        return Capacity(observed, budget, "Throughput")
    return Capacity(model, budget, "StepModel") if known else None

"""How many forward tokens a second one replica can take, within the inter-token target. Pure.

In the steady state of Dynamic SplitFuse each pass carries one token of each of N decoding sequences, and prompt tokens
at the rate at which sequences come and go: a request brings I prompt tokens for O passes, so a pass has N (1 + I/O)
forward tokens and N (P + O/2) resident ones, where P counts also what the prefix cache gave. Its time, a + b · tokens +
c · resident tokens, is linear in N: the largest N that every bound allows gives the capacity.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from fastgen_operator.autoscale.observation import Sample

# The KV cache is planned to this share: above it sequences are preempted.
KV_SHARE: Final = 0.80

# A target that leaves a pass fewer forward tokens than this cannot be met by any fleet.
_LEAST_TOKENS: Final = 16

Source = Literal["StepModel", "Throughput"]


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The mean request: forward tokens of its prompt, all tokens of its prompt, and tokens generated."""

    computed: float
    prompt: float
    generated: float


# A chat's turn, until requests have ended.
USUAL_SHAPE: Final = RequestShape(computed=512.0, prompt=512.0, generated=128.0)


@dataclass(frozen=True, slots=True)
class Capacity:
    """Of one replica.

    Attributes:
        tokens_per_second: forward tokens.
        token_budget: forward tokens of a pass, at most.
        source: where the number comes from: the engines' step model, or the throughput seen under a backlog.
    """

    tokens_per_second: float
    token_budget: int
    source: Source


def modelled(sample: Sample, shape: RequestShape, inter_token_seconds: float, max_sequences: int) -> float | None:
    """Forward tokens a second by the replica's own step model; None while it is not fitted.

    Where no pass at all would meet the inter-token target, more replicas would not help: the target bounds nothing.
    """
    a, b, c = sample.step_model
    # Passes of one size do not tell a from b: the engine then says a = c = 0, which underrates larger passes.
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
    samples: Iterable[Sample], shape: RequestShape, observed: float | None, inter_token_seconds: float, sequences: int
) -> Capacity | None:
    """One replica's capacity, from all replicas' words: the median, so that one odd replica does not matter.

    `observed` is the throughput of a replica seen under a backlog: a model that promises more is not believed. None
    where nothing is known.
    """
    samples = tuple(samples)
    found = [modelled(sample, shape, inter_token_seconds, sequences) for sample in samples]
    known = [value for value in found if value is not None]
    budget = int(median(sample.token_budget for sample in samples)) if samples else 0
    if not known:
        return None if observed is None else Capacity(observed, budget, "Throughput")
    model = median(known)
    if observed is None or observed >= model:
        return Capacity(model, budget, "StepModel")
    return Capacity(observed, budget, "Throughput")

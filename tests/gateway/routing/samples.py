"""Metrics of replicas for the tests of choices."""

from __future__ import annotations

from typing import Any

from fastgen_operator.autoscale.sample import Sample, StepCoefficients

# A step of 10 ms and 0.1 ms for each token: 256 tokens in 36 ms.
MODEL = StepCoefficients(0.01, 0.0001, 0.0, 0.0)


def sample(time: float = 0.0, **fields: Any) -> Sample:
    """Return the metrics of an idle replica, changed by `fields`."""
    idle = {"token_budget": 256.0, "kv_capacity_tokens": 100_000.0, "step_model": MODEL}
    return Sample(time=time, **{**idle, **fields})

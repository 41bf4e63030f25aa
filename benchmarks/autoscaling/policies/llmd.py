"""llm-d's workload variant autoscaler: its saturation rules (V1) and its token capacity (V2).

V1: a replica is saturated if 80 % of its KV cache is in use or 5 requests wait. Add a replica if the unsaturated ones
have on average less than 10 % of the cache or 3 requests to spare, remove one if N - 1 replicas would still have that.
No decision while pods start or terminate. V2 (`internal/engines/analyzers/saturation_v2`): a replica's capacity in
resident tokens is the minimum of 80 % of its cache and the tokens it held while requests waited, or the tokens that its
batch would hold. Scale up above 85 % of ready and starting capacity, down below 70 % of ready capacity. In both
versions an HPA applies the result.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from benchmarks.autoscaling.policies.hpa import Behavior
from benchmarks.autoscaling.replica import ReplicaMetrics
from benchmarks.autoscaling.simulation import View

_KV, _QUEUE, _SPARE_KV, _SPARE_QUEUE = 0.80, 5.0, 0.10, 3.0


@dataclass(slots=True)
class Saturation:
    """Saturation rules (V1)."""

    period: float = 30.0
    behavior: Behavior = field(default_factory=lambda: Behavior(up=240.0, down=240.0))

    def observe(self, view: View) -> int:
        """Return the current replicas, or one more or fewer."""
        return self.behavior.limit(view.now, view.desired_replicas, max(1, self._recommend(view)))

    def _recommend(self, view: View) -> int:
        replicas, number = view.replicas, len(view.replicas)
        if not replicas or view.pending_ages or view.terminating:
            return view.desired_replicas
        kv = [r.kv_tokens / r.kv_capacity_tokens for r in replicas]
        healthy = [(k, r.waiting) for k, r in zip(kv, replicas, strict=True) if k < _KV and r.waiting < _QUEUE]
        if not healthy:
            return view.desired_replicas + 1
        spare_kv = sum(_KV - k for k, _ in healthy) / len(healthy)
        spare_queue = sum(_QUEUE - w for _, w in healthy) / len(healthy)
        if spare_kv < _SPARE_KV or spare_queue < _SPARE_QUEUE:
            return view.desired_replicas + 1
        if number < 2 or len(healthy) < number:
            return view.desired_replicas
        load_kv, load_queue = sum(k for k, _ in healthy) / (number - 1), sum(w for _, w in healthy) / (number - 1)
        fits = _KV - load_kv >= _SPARE_KV and _QUEUE - load_queue >= _SPARE_QUEUE
        return view.desired_replicas - 1 if fits else view.desired_replicas


@dataclass(slots=True)
class TokenCapacity:
    """Token capacity (V2).

    Attributes:
        up, down: utilization above which to scale up, and below which to scale down.
    """

    period: float = 30.0
    up: float = 0.85
    down: float = 0.70
    behavior: Behavior = field(default_factory=lambda: Behavior(up=240.0, down=240.0))
    _saturated: deque[float] = field(default_factory=lambda: deque(maxlen=10))

    def observe(self, view: View) -> int:
        """Return the replicas required by the token demand."""
        return self.behavior.limit(view.now, view.desired_replicas, max(1, self._recommend(view)))

    def _recommend(self, view: View) -> int:
        if not view.replicas:
            return view.desired_replicas
        ended = sum(r.ended for r in view.replicas)
        prompt = sum(r.ended_prompt_tokens for r in view.replicas) / ended if ended else 0.0
        generated = sum(r.ended_generated_tokens for r in view.replicas) / ended if ended else 0.0
        for metrics in view.replicas:
            if metrics.waiting >= _QUEUE:
                self._saturated.append(float(metrics.kv_tokens))
        capacity = median(self._capacity(r, prompt, generated) for r in view.replicas)
        share = len(view.ready) / len(view.replicas)
        demand = share * sum(r.kv_tokens + r.waiting * prompt for r in view.replicas)
        missing = demand / self.up - view.alive * capacity
        if missing > 0:
            return view.alive + math.ceil(missing / capacity)
        spare = len(view.ready) * capacity - demand / self.down
        if spare > 0 and not view.pending_ages:
            return len(view.ready) - math.floor(spare / capacity)
        return view.desired_replicas

    def _capacity(self, metrics: ReplicaMetrics, prompt: float, generated: float) -> float:
        most = _KV * metrics.kv_capacity_tokens
        if self._saturated:
            return max(1.0, min(most, sum(self._saturated) / len(self._saturated)))
        if prompt + generated <= 0:
            return most
        sequences = min(metrics.token_budget * generated / (prompt + generated), float(metrics.max_sequences))
        return max(1.0, min(most, sequences * (prompt + generated / 2)))

"""What the operator can see of a simulated fleet: pods as Kubernetes shows them, and engine metrics as text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from benchmarks.autoscaling.fleet import Pod, State
from benchmarks.autoscaling.replica import ReplicaMetrics

MODEL = "simulated"
# The simulation's time 0.
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_GRACE_SECONDS = 90.0


def pod_manifest(pod: Pod) -> dict[str, Any]:
    """Return the pod with the fields that the operator reads. Times have whole seconds, as in Kubernetes."""
    scheduled = pod.state is not State.PENDING
    ready = pod.state is State.READY
    conditions: list[dict[str, Any]] = [
        {
            "type": "PodScheduled",
            "status": str(scheduled),
            "lastTransitionTime": _time(pod.scheduled if scheduled else pod.created),
            **({} if scheduled else {"reason": "Unschedulable", "message": "Insufficient nvidia.com/gpu"}),
        },
        {"type": "Ready", "status": str(ready), "lastTransitionTime": _time(pod.ready if ready else pod.created)},
    ]
    status: dict[str, Any] = {"phase": "Running" if scheduled else "Pending", "conditions": conditions}
    if scheduled:
        running = {"running": {"startedAt": _time(pod.scheduled)}}
        status["containerStatuses"] = [
            {"name": "engine", "ready": ready, "started": ready, "restartCount": 0, "state": running}
        ]
    metadata: dict[str, Any] = {"name": pod.name, "creationTimestamp": _time(pod.created), "labels": {}}
    if pod.state is State.DRAINING:
        metadata["deletionTimestamp"] = _time(pod.deleted + _GRACE_SECONDS)
    return {"metadata": metadata, "spec": {"nodeName": "node"} if scheduled else {}, "status": status}


def exposition(metrics: ReplicaMetrics) -> str:
    """Return a scrape in the Prometheus text format, with the metrics that the operator reads."""
    values: dict[tuple[str, str], float] = {
        ("arrived_prompt_tokens_total", ""): metrics.arrived_prompt_tokens,
        ("rejected_prompt_tokens_total", ""): metrics.rejected_prompt_tokens,
        ("cancelled_prompt_tokens_total", ""): metrics.cancelled_prompt_tokens,
        ("scheduled_tokens_total", ',phase="prefill"'): metrics.scheduled_prefill_tokens,
        ("scheduled_tokens_total", ',phase="decode"'): metrics.scheduled_decode_tokens,
        ("prefix_cache_hit_tokens_total", ""): metrics.cached_prompt_tokens,
        ("request_prompt_tokens_count", ""): metrics.ended,
        ("request_prompt_tokens_sum", ""): metrics.ended_prompt_tokens,
        ("request_generation_tokens_sum", ""): metrics.ended_generated_tokens,
        ("backlog_prompt_tokens", ""): metrics.backlog_prompt_tokens,
        ("num_requests_running", ""): metrics.running,
        ("num_requests_waiting", ""): metrics.waiting,
        ("kv_cache_usage_ratio", ""): min(1.0, metrics.kv_tokens / metrics.kv_capacity_tokens),
        ("kv_cache_capacity_tokens", ""): metrics.kv_capacity_tokens,
        ("kv_cache_tokens", ""): metrics.kv_tokens,
        ("token_budget", ""): metrics.token_budget,
    }
    lines = [f'{name}{{model_name="{MODEL}"{label}}} {value!r}' for (name, label), value in values.items()]
    for name, value in metrics.fit()._asdict().items():  # labels are sorted, as in an engine's text
        lines.append(f'step_model{{coefficient="{name}",model_name="{MODEL}"}} {value!r}')
    return "".join(f"fastgen_{line}\n" for line in lines)


def _time(seconds: float) -> str:
    return (EPOCH + timedelta(seconds=int(seconds))).isoformat()

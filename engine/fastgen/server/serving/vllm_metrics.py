"""The server's metrics under vLLM's names, for dashboards and gateways that read those.

They are derived from the server's own metrics at scrape time, so both always agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

# vLLM's name and help text by our name of the metric. Names are without prefix, those of counters without `_total`.
_NAMES: dict[str, tuple[str, str]] = {
    "num_requests_running": ("num_requests_running", "Sequences that hold KV cache blocks."),
    "num_requests_waiting": ("num_requests_waiting", "Sequences waiting in the queue."),
    "num_requests_swapped": ("num_requests_swapped", "Sequences swapped out to host memory."),
    "kv_cache_usage_ratio": ("kv_cache_usage_perc", "Fraction of KV cache blocks in use, 0 to 1."),
    "prefix_cache_query_tokens": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hit_tokens": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "preemptions": ("num_preemptions", "Preempted sequences."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of requests that produced their first token."),
    "generation_tokens": ("generation_tokens", "Generated tokens."),
    "request_success": ("request_success", "Finished requests, by finish reason."),
    "step_tokens": ("iteration_tokens_total", "Tokens per step."),
    "time_to_first_token_seconds": ("time_to_first_token_seconds", "Time from a request's arrival to its first token."),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "Time between consecutive tokens."),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds", "Time from a request's arrival to its end."),
    "request_queue_seconds": ("request_queue_time_seconds", "Time from a request's arrival to its first step."),
    "request_prompt_tokens": ("request_prompt_tokens", "Prompt tokens per finished request."),
    "request_generation_tokens": ("request_generation_tokens", "Generated tokens per finished request."),
    "cache_config": ("cache_config", "KV cache configuration."),
}
# vLLM's names of our labels. All other labels are dropped, and their series added up.
_LABELS = {"model_name": "model_name", "finish_reason": "finished_reason", "block_size": "block_size", "le": "le"}
_LABELS_OF_INFO = {**_LABELS, "num_blocks": "num_gpu_blocks"}
# Finish reasons that vLLM does not have.
_REASONS = {"deadline": "abort", "out_of_memory": "error", "grammar": "error", "rejected": "error"}
# vLLM has one series per engine of a server; there is one here.
_ENGINE = {"engine": "0"}


class WithVLLMNames(Collector):
    """Collects the metrics of `source`, then those that vLLM has too, under vLLM's names."""

    def __init__(self, source: Collector) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        families = list(self._source.collect())
        yield from families
        yield from (_renamed(family, *_NAMES[own]) for family, own in _own_names(families) if own in _NAMES)


def _own_names(families: Iterable[Metric]) -> Iterator[tuple[Metric, str]]:
    return ((family, family.name.removeprefix("fastgen_")) for family in families)


def _renamed(family: Metric, name: str, help_text: str) -> Metric:
    name, labels_kept = f"vllm:{name}", _LABELS_OF_INFO if family.type == "info" else _LABELS
    renamed, sums = Metric(name, help_text, family.type), dict[tuple[str, tuple[tuple[str, str], ...]], float]()
    for sample in family.samples:
        if sample.name.endswith("_created"):  # times, which cannot be added up
            continue
        kept = {
            labels_kept[label]: _REASONS.get(value, value)
            for label, value in sample.labels.items()
            if label in labels_kept
        }
        key = name + sample.name.removeprefix(family.name), tuple({**_ENGINE, **kept}.items())
        sums[key] = sample.value if family.type == "info" else sums.get(key, 0.0) + sample.value
    for (sample_name, labels), value in sums.items():
        renamed.add_sample(sample_name, dict(labels), value)
    return renamed

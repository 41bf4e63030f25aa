"""Prometheus metrics of the server and the engine.

Names, types and labels are a contract with the dashboards, the operator and inference gateways.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from fastgen.core.request import FinishReason
from fastgen.core.step_output import EagerReason
from fastgen.core.step_times import StepCoefficients
from fastgen.link.messages import EngineInfo, StepReport
from fastgen.server.serving.metrics_exchange import MetricFamily, Sum
from fastgen.server.serving.plain_metrics import PlainCounter, PlainHistogram
from fastgen.server.serving.vllm_metrics import WithVLLMNames

_STEP_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10)
# Small models decode in a few milliseconds, so the buckets start below that.
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
# Gauges of the scheduler's state: the field of `SchedulerStats`, the name and the help text.
_SCHEDULER_GAUGES = (
    ("num_running", "num_requests_running", "Sequences that hold KV cache blocks."),
    ("num_waiting", "num_requests_waiting", "Sequences waiting in the queue, without KV cache blocks."),
    ("num_swapped", "num_requests_swapped", "Sequences swapped out to host memory."),
    ("kv_tokens", "kv_cache_tokens", "Tokens held in the KV cache."),
    (
        "backlog_prompt_tokens",
        "backlog_prompt_tokens",
        "Prompt tokens not yet computed, of waiting and partially prefilled requests.",
    ),
    ("oldest_waiting_seconds", "oldest_waiting_seconds", "Time the oldest waiting request has waited, in seconds."),
)
# Finish reasons that, before the first token, mean that the client no longer waits, or that nothing was computed.
_CANCELLED = (FinishReason.ABORT, FinishReason.DEADLINE, FinishReason.REJECTED)

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram, Info)


class Metrics:
    """The server's metrics, in their own registry. `record` takes the engine's step reports.

    Args:
        model_name: label of all metrics.
        compat: `vllm` exposes them under vLLM's names too, `none` does not.

    Attributes:
        registry: all metrics.
        generation_tokens: counts generated tokens.
        inter_token_latency: seconds from a token to the next one of its request.
    """

    def __init__(self, model_name: str, compat: str = "none") -> None:
        self.registry = CollectorRegistry()
        self._has_vllm_names = compat == "vllm"
        self._model_name = model_name
        self._labels = {"model_name": model_name}
        self._capacity_blocks = self._window_blocks = 0
        self._latest: StepReport | None = None
        self._define_engine_state()
        self._define_steps()
        self._define_requests()

    def _make(
        self, kind: type[_Metric], name: str, help_text: str, labels: Iterable[str] = (), **options: object
    ) -> _Metric:
        metric = kind(f"fastgen_{name}", help_text, ["model_name", *labels], registry=self.registry, **options)  # type: ignore[arg-type]
        return metric if labels else metric.labels(self._model_name)

    def _define_engine_state(self) -> None:
        self._scheduler = {field: self._make(Gauge, name, text) for field, name, text in _SCHEDULER_GAUGES}
        self._open = self._make(Gauge, "http_requests_open", "Open HTTP POST requests.")
        self._kv_usage = self._make(Gauge, "kv_cache_usage_ratio", "Fraction of KV cache blocks in use, 0 to 1.")
        self._kv_capacity = self._make(Gauge, "kv_cache_capacity_tokens", "Capacity of the KV cache in tokens.")
        self._token_budget = self._make(Gauge, "token_budget", "Maximum number of tokens per step.")
        self._cache_config = self._make(Info, "cache_config", "KV cache configuration.")
        self._engine = self._make(Info, "engine", "Engine version, device, dtype and quantization.")

    def _define_steps(self) -> None:
        tokens = self._make(Counter, "scheduled_tokens", "Tokens scheduled, by phase.", ["phase"])
        self._prefill_tokens = tokens.labels(self._model_name, "prefill")
        self._decode_tokens = tokens.labels(self._model_name, "decode")
        self._step_tokens = self._make(Histogram, "step_tokens", "Tokens per step.", buckets=_TOKENS)
        self._step_seconds = self._make(Histogram, "step_seconds", "Step duration in seconds.", buckets=_STEP_SECONDS)
        self._graph_steps = self._make(Counter, "graph_steps", "Steps replayed from a CUDA graph.")
        eager = self._make(
            Counter,
            "eager_steps",
            "Steps run without a CUDA graph, by reason: off, tokens, prompt_logprobs or pooling.",
            ["reason"],
        )
        self._eager_steps = {reason: eager.labels(self._model_name, reason) for reason in get_args(EagerReason)}
        preemptions = self._make(Counter, "preemptions", "Preempted sequences, by mode: recompute or swap.", ["mode"])
        self._recomputations = preemptions.labels(self._model_name, "recompute")
        self._swaps = preemptions.labels(self._model_name, "swap")
        self._out_of_memory = self._make(
            Counter,
            "steps_out_of_memory",
            "Steps that ran out of memory. They were rolled back and retried with less; a request that fails alone, "
            "with one token, ends.",
        )
        self._cache_queries = self._make(
            Counter, "prefix_cache_query_tokens", "Prompt tokens looked up in the prefix cache."
        )
        self._cache_hits = self._make(Counter, "prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache.")
        model = self._make(
            Gauge, "step_model", "Online fit: step seconds = base + token * tokens + kv_token * KV cache tokens + "
            "context_pair * sum over prompt chunks of (tokens - 1) * tokens before the chunk.",
            ["coefficient"],
        )  # fmt: skip
        self._step_model = [model.labels(self._model_name, name) for name in StepCoefficients._fields]

    def _define_requests(self) -> None:
        self._num_admitted = self._num_admitted_tokens = 0
        self._arrived_tokens = self._make(
            Counter, "arrived_prompt_tokens", "Prompt tokens of requests, whether admitted or rejected."
        )
        self._rejected_tokens = self._make(
            Counter,
            "rejected_prompt_tokens",
            "Prompt tokens of requests rejected because the queue was full, each as long as the mean admitted prompt.",
        )
        self._cancelled_tokens = self._make(
            Counter,
            "cancelled_prompt_tokens",
            "Prompt tokens of requests that ended before their first token: disconnected, or past their timeout.",
        )
        self._prompt_tokens = self._make(
            Counter, "prompt_tokens", "Prompt tokens of requests that produced their first token."
        )
        self.generation_tokens = PlainCounter("fastgen_generation_tokens", "Generated tokens.", self._labels)
        self.registry.register(self.generation_tokens)
        self._success = self._make(
            Counter, "request_success", "Finished requests, by finish reason.", ["finish_reason"]
        )
        self._rejected = self._make(Counter, "request_rejected", "Rejected requests, by error code.", ["reason"])
        for reason in FinishReason:
            self._success.labels(self._model_name, reason.value)
        self._first_token = self._make(
            Histogram, "time_to_first_token_seconds", "Time from a request's arrival to its first token, in seconds.",
            buckets=_FIRST_TOKEN_SECONDS,
        )  # fmt: skip
        self.inter_token_latency = PlainHistogram(
            "fastgen_inter_token_latency_seconds",
            "Time between consecutive tokens, in seconds.",
            self._labels,
            _TOKEN_SECONDS,
        )
        self.registry.register(self.inter_token_latency)
        self._end_to_end = self._make(
            Histogram,
            "e2e_request_latency_seconds",
            "Time from a request's arrival to its end, in seconds.",
            buckets=_REQUEST_SECONDS,
        )
        self._queued = self._make(
            Histogram, "request_queue_seconds", "Time from a request's arrival in the engine to its first step.",
            buckets=_QUEUE_SECONDS,
        )  # fmt: skip
        self._request_prompt = self._make(
            Histogram, "request_prompt_tokens", "Prompt tokens per finished request.", buckets=_TOKENS
        )
        self._request_generation = self._make(
            Histogram, "request_generation_tokens", "Generated tokens per finished request.", buckets=_TOKENS
        )

    def describe(self, info: EngineInfo, version: str) -> None:
        """Set the metrics that are constant once the engine is ready."""
        self._capacity_blocks, self._window_blocks = info.num_blocks, info.num_window_blocks
        self._kv_capacity.set(info.num_blocks * info.block_size)
        self._token_budget.set(info.token_budget)
        self._cache_config.info({"block_size": str(info.block_size), "num_blocks": str(info.num_blocks)})
        self._engine.info(
            {"version": version, "device": info.device, "dtype": info.dtype, "quantization": info.quantization}
        )

    def record(self, report: StepReport) -> None:
        """Count one step report. Gauges are set at scrape time: there are many steps per scrape."""
        self._latest = report
        stats = report.step
        for seconds in stats.queue_seconds:
            self._queued.observe(seconds)
        if stats.preemptions:
            self._recomputations.inc(stats.preemptions - stats.swapped_out)
            self._swaps.inc(stats.swapped_out)
        if stats.out_of_memory:
            self._out_of_memory.inc(stats.out_of_memory)
        if stats.prefix_cache_query_tokens:
            self._cache_queries.inc(stats.prefix_cache_query_tokens)
            self._cache_hits.inc(stats.prefix_cache_hit_tokens)
        step_tokens = stats.prefill_tokens + stats.decode_tokens
        if not step_tokens:  # a report between steps
            return
        self._prefill_tokens.inc(stats.prefill_tokens)
        self._decode_tokens.inc(stats.decode_tokens)
        self._step_tokens.observe(step_tokens)
        self._step_seconds.observe(stats.step_seconds)
        counter = self._graph_steps if stats.eager_reason is None else self._eager_steps[stats.eager_reason]
        counter.inc()

    def _set_gauges(self, report: StepReport) -> None:
        stats = report.scheduler
        for field, gauge in self._scheduler.items():
            gauge.set(getattr(stats, field))
        usages = (stats.kv_blocks_used, self._capacity_blocks), (stats.window_blocks_used, self._window_blocks)
        self._kv_usage.set(max(used / have if have else 0.0 for used, have in usages))
        for gauge, coefficient in zip(self._step_model, report.step_model, strict=True):
            gauge.set(coefficient)

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """Record the first token of a generation, `seconds` after its request's arrival."""
        self._first_token.observe(seconds)
        self._prompt_tokens.inc(prompt_tokens)

    def finished(self, reason: FinishReason, seconds: float, prompt_tokens: int, generation_tokens: int) -> None:
        """Record the end of a generation, `seconds` after its request's arrival."""
        self._success.labels(self._model_name, reason.value).inc()
        self._end_to_end.observe(seconds)
        self._request_prompt.observe(prompt_tokens)
        self._request_generation.observe(generation_tokens)
        if generation_tokens == 0 and reason in _CANCELLED:
            self._cancelled_tokens.inc(prompt_tokens)

    def admitted(self, prompt_tokens: Sequence[int]) -> None:
        """Count the prompt tokens of admitted generations."""
        self._arrived_tokens.inc(sum(prompt_tokens))
        self._num_admitted += len(prompt_tokens)
        self._num_admitted_tokens += sum(prompt_tokens)

    def rejected(self, generations: int) -> None:
        """Count generations that are rejected because the queue is full.

        Each counts with the mean prompt tokens of the admitted ones. Their prompts are not tokenised: rejecting costs
        next to nothing.
        """
        prompt_tokens = generations * self._num_admitted_tokens / max(1, self._num_admitted)
        self._arrived_tokens.inc(prompt_tokens)
        self._rejected_tokens.inc(prompt_tokens)

    def count_rejected(self, reason: str) -> None:
        """Count a rejected request by its error code."""
        self._rejected.labels(self._model_name, reason).inc()

    def expose(
        self, accept: str, num_open: int, names: Sequence[str] = (), others: Sequence[MetricFamily] = ()
    ) -> tuple[bytes, str]:
        """Return the metrics and their content type, in the format that the Accept header prefers.

        With vLLM's names, the format is always Prometheus text.

        Args:
            accept: the scraper's Accept header.
            num_open: number of open HTTP POST requests of this process.
            names: names of samples, without labels; if given, only these are returned.
            others: metrics of the other API processes.
        """
        self.update(num_open)
        exposed: CollectorRegistry = self.registry
        if others or self._has_vllm_names:
            source: Collector = Sum(self.registry, others) if others else self.registry
            exposed = CollectorRegistry(auto_describe=bool(names))  # `restricted_registry` needs the names
            exposed.register(WithVLLMNames(source) if self._has_vllm_names else source)
        # In OpenMetrics, the library would replace the colons of vLLM's names.
        encode, content_type = choose_encoder("" if self._has_vllm_names else accept)
        return encode(exposed.restricted_registry(names) if names else exposed), content_type

    def update(self, num_open: int) -> None:
        """Set the gauges. They are set at scrape time: there are many steps per scrape."""
        self._open.set(num_open)
        if self._latest is not None:
            self._set_gauges(self._latest)

"""What Prometheus reads. Names, types and labels are the contract with dashboards, the operator and gateways."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.exposition import choose_encoder

from fastgen.core.request import FinishReason
from fastgen.engine.messages import EngineInfo, StepReport

_PASS_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10)
# A small model decodes in a few milliseconds: the buckets begin below that.
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1),
    *(2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
_REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_QUEUE_SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)

_Metric = TypeVar("_Metric", Counter, Gauge, Histogram, Info)


class Metrics:
    """The server's metrics, in a registry of their own. Also the engine's recorder: see `record`."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._capacity_blocks = 0
        self._latest: StepReport | None = None
        self._define_engine_state()
        self._define_passes()
        self._define_requests()

    def _make(
        self, kind: type[_Metric], name: str, text: str, labels: Iterable[str] = (), **options: object
    ) -> _Metric:
        metric = kind(f"fastgen_{name}", text, ["model_name", *labels], registry=self.registry, **options)  # type: ignore[arg-type]
        return metric if labels else metric.labels(self._model_name)

    def _define_engine_state(self) -> None:
        self._running = self._make(Gauge, "num_requests_running", "Sequences that hold KV cache.")
        self._waiting = self._make(Gauge, "num_requests_waiting", "Sequences in the queue.")
        self._swapped = self._make(Gauge, "num_requests_swapped", "Sequences whose KV is in the host buffer.")
        self._open = self._make(Gauge, "http_requests_open", "HTTP requests for work that are under way.")
        self._kv_usage = self._make(Gauge, "kv_cache_usage_ratio", "Share of the KV cache's blocks in use, 0 to 1.")
        self._kv_tokens = self._make(Gauge, "kv_cache_tokens", "Tokens whose keys and values are in the cache.")
        self._kv_capacity = self._make(Gauge, "kv_cache_capacity_tokens", "Tokens that the KV cache can hold.")
        self._token_budget = self._make(Gauge, "token_budget", "Forward tokens per pass, at most.")
        self._backlog = self._make(
            Gauge, "backlog_prompt_tokens", "Prompt tokens not yet computed, of waiting and of half-prefilled requests."
        )
        self._oldest_waiting = self._make(
            Gauge, "oldest_waiting_seconds", "How long the first in the queue has waited."
        )
        self._cache_config = self._make(Info, "cache_config", "Shape of the KV cache.")
        self._engine = self._make(Info, "engine", "What engine this is.")

    def _define_passes(self) -> None:
        tokens = self._make(Counter, "scheduled_tokens", "What passes were filled with.", ["phase"])
        self._prefill_tokens = tokens.labels(self._model_name, "prefill")
        self._decode_tokens = tokens.labels(self._model_name, "decode")
        self._step_tokens = self._make(Histogram, "step_tokens", "Forward tokens of each pass.", buckets=_TOKENS)
        self._step_seconds = self._make(Histogram, "step_seconds", "Duration of each pass.", buckets=_PASS_SECONDS)
        preemptions = self._make(Counter, "preemptions", "Sequences that lost their KV blocks for a while.", ["mode"])
        self._recomputations = preemptions.labels(self._model_name, "recompute")
        self._swaps = preemptions.labels(self._model_name, "swap")
        self._cache_queries = self._make(
            Counter, "prefix_cache_query_tokens", "Prompt tokens that were looked up in the prefix cache."
        )
        self._cache_hits = self._make(
            Counter, "prefix_cache_hit_tokens", "Prompt tokens that came from the prefix cache."
        )
        model = self._make(
            Gauge, "step_model", "Online fit of a pass's seconds: base + token * tokens + kv_token * resident KV.",
            ["coefficient"],
        )  # fmt: skip
        self._step_model = [model.labels(self._model_name, name) for name in ("base", "token", "kv_token")]

    def _define_requests(self) -> None:
        self._prompt_tokens = self._make(Counter, "prompt_tokens", "Prompt tokens of requests whose first token came.")
        self._generation_tokens = self._make(Counter, "generation_tokens", "Tokens generated.")
        self._success = self._make(Counter, "request_success", "Requests that ended, by how.", ["finish_reason"])
        self._rejected = self._make(Counter, "request_rejected", "Requests refused, by why.", ["reason"])
        for reason in FinishReason:
            self._success.labels(self._model_name, reason.value)
        self._first_token = self._make(
            Histogram, "time_to_first_token_seconds", "From a request's arrival to its first token.",
            buckets=_FIRST_TOKEN_SECONDS,
        )  # fmt: skip
        self._inter_token = self._make(
            Histogram, "inter_token_latency_seconds", "Every gap between two tokens.", buckets=_TOKEN_SECONDS
        )
        self._end_to_end = self._make(
            Histogram, "e2e_request_latency_seconds", "From a request's arrival to its end.", buckets=_REQUEST_SECONDS
        )
        self._queued = self._make(
            Histogram, "request_queue_seconds", "From a request's arrival in the engine to its first pass.",
            buckets=_QUEUE_SECONDS,
        )  # fmt: skip
        self._request_prompt = self._make(
            Histogram, "request_prompt_tokens", "Prompt tokens of a request that ended.", buckets=_TOKENS
        )
        self._request_generation = self._make(
            Histogram, "request_generation_tokens", "Generated tokens of a request that ended.", buckets=_TOKENS
        )

    def describe(self, info: EngineInfo, version: str) -> None:
        """Takes what does not change from an engine that is ready."""
        self._capacity_blocks = info.num_blocks
        self._kv_capacity.set(info.num_blocks * info.block_size)
        self._token_budget.set(info.token_budget)
        self._cache_config.info({"block_size": str(info.block_size), "num_blocks": str(info.num_blocks)})
        self._engine.info({"version": version, "device": info.device, "dtype": info.dtype})

    def record(self, report: StepReport) -> None:
        """Takes in one report of the engine. Gauges wait until they are read: there are many passes to a scrape."""
        self._latest = report
        stats = report.step
        for seconds in stats.queue_seconds:
            self._queued.observe(seconds)
        if stats.preemptions:
            self._recomputations.inc(stats.preemptions - stats.swapped_out)
            self._swaps.inc(stats.swapped_out)
        if stats.prefix_cache_query_tokens:
            self._cache_queries.inc(stats.prefix_cache_query_tokens)
            self._cache_hits.inc(stats.prefix_cache_hit_tokens)
        step_tokens = stats.prefill_tokens + stats.decode_tokens
        if not step_tokens:  # a report between passes
            return
        self._prefill_tokens.inc(stats.prefill_tokens)
        self._decode_tokens.inc(stats.decode_tokens)
        self._step_tokens.observe(step_tokens)
        self._step_seconds.observe(stats.step_seconds)

    def _set_gauges(self, report: StepReport) -> None:
        stats = report.scheduler
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        self._swapped.set(stats.num_swapped)
        self._kv_tokens.set(stats.kv_tokens)
        self._kv_usage.set(stats.kv_blocks_used / self._capacity_blocks if self._capacity_blocks else 0.0)
        self._backlog.set(stats.backlog_prompt_tokens)
        self._oldest_waiting.set(stats.oldest_waiting_seconds)
        for gauge, coefficient in zip(self._step_model, report.step_model, strict=True):
            gauge.set(coefficient)

    def first_token(self, seconds: float, prompt_tokens: int) -> None:
        """A request's first token came `seconds` after the request."""
        self._first_token.observe(seconds)
        self._prompt_tokens.inc(prompt_tokens)

    def next_token(self, seconds: float) -> None:
        """A further token came `seconds` after the one before it."""
        self._inter_token.observe(seconds)

    def generated(self, num_tokens: int) -> None:
        """Tokens came."""
        self._generation_tokens.inc(num_tokens)

    def finished(self, reason: FinishReason, seconds: float, prompt_tokens: int, generation_tokens: int) -> None:
        """A request ended, `seconds` after it came."""
        self._success.labels(self._model_name, reason.value).inc()
        self._end_to_end.observe(seconds)
        self._request_prompt.observe(prompt_tokens)
        self._request_generation.observe(generation_tokens)

    def count_rejected(self, reason: str) -> None:
        """A request was refused."""
        self._rejected.labels(self._model_name, reason).inc()

    def expose(self, accept: str, num_open: int) -> tuple[bytes, str]:
        """The metrics and their content type, in the format that the Accept header prefers.

        `num_open`: HTTP requests for work that are under way.
        """
        self._open.set(num_open)
        if self._latest is not None:
            self._set_gauges(self._latest)
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type

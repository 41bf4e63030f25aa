"""Fake engines that serve only metrics, each at its own loopback address."""

from __future__ import annotations

import json
import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from fastgen_operator.objects.container import HTTP_PORT
from harness.fluid import BUDGET, GENERATED, PROMPT, STEP
from harness.get_server import GetServer

Fault = Literal["none", "hangs", "nan", "huge", "other model"]
# Above any deadline of the operator.
_HANG_SECONDS = 30.0
_TOKENS = 50
# What engines say about their model.
MODEL = {
    **{"family": "llama", "format": "GGUF Q4_1", "parameters": 134_515_008, "bytes": 98_765_432},
    "max_model_len": 2048,
}


@dataclass
class FakeEngine:
    """Serves metrics as an engine would. A test sets its load and how it misbehaves.

    Attributes:
        address: an IPv4 address of the loopback network.
        prompt_rate: reported prompt tokens per second, with a random error of up to 10 %.
        backlog: reported queued prompt tokens.
        running: reported sequences.
        request_rate: finished requests per second, and as many tokens after the first of each as `_TOKENS`.
        error_share: share of them that fail with a server error.
        first_token_seconds, gap_seconds: mean times of them.
        fault: what is wrong with its responses.
        described: what it says about its model.
        scrapes: number of requests for metrics so far.
    """

    address: str
    model: str = "chat"
    prompt_rate: float = 0.0
    backlog: float = 0.0
    running: float = 1.0
    request_rate: float = 0.0
    error_share: float = 0.0
    first_token_seconds: float = 0.1
    gap_seconds: float = 0.02
    fault: Fault = "none"
    described: dict[str, Any] = field(default_factory=lambda: dict(MODEL))
    scrapes: int = 0
    _computed: float = 0.0
    _finished: float = 0.0
    _failed: float = 0.0
    _first_token_seconds: float = 0.0
    _gap_seconds: float = 0.0
    _since: float = field(default_factory=time.monotonic)
    _closing: threading.Event = field(default_factory=threading.Event)
    _server: GetServer | None = None

    def start(self) -> FakeEngine:
        """Serve until closed."""
        self._server = GetServer(self.address, HTTP_PORT, self._answer)
        return self

    def close(self) -> None:
        """Stop serving and release the address."""
        self._closing.set()
        if self._server is not None:
            self._server.close()

    def _answer(self, path: str) -> tuple[int, bytes]:
        if path.startswith("/ready"):
            return 200, json.dumps({"status": "ready", "model": self.described}).encode()
        self.scrapes += 1
        if self.fault == "hangs":
            self._closing.wait(_HANG_SECONDS)
        return 200, self.exposition().encode()

    def exposition(self) -> str:
        """Return the current metrics in the Prometheus text format."""
        now = time.monotonic()
        self._computed += (now - self._since) * self.prompt_rate * random.uniform(0.9, 1.1)
        requests = (now - self._since) * self.request_rate
        self._finished += requests
        self._failed += requests * self.error_share
        self._first_token_seconds += requests * self.first_token_seconds
        self._gap_seconds += requests * _TOKENS * self.gap_seconds
        self._since = now
        backlog = {"nan": "NaN", "huge": "1e300"}.get(self.fault, str(self.backlog))
        ended = self._computed / PROMPT
        values = {
            ("arrived_prompt_tokens_total", ""): self._computed + self.backlog,
            ("rejected_prompt_tokens_total", ""): 0.0,
            ("cancelled_prompt_tokens_total", ""): 0.0,
            ("scheduled_tokens_total", 'phase="prefill"'): self._computed,
            ("scheduled_tokens_total", 'phase="decode"'): ended * GENERATED,
            ("prefix_cache_hit_tokens_total", ""): 0.0,
            ("request_prompt_tokens_count", ""): ended,
            ("request_prompt_tokens_sum", ""): self._computed,
            ("request_generation_tokens_sum", ""): ended * GENERATED,
            ("backlog_prompt_tokens", ""): backlog,
            ("num_requests_running", ""): self.running,
            ("num_requests_waiting", ""): 0.0,
            ("kv_cache_usage_ratio", ""): 0.1,
            ("kv_cache_capacity_tokens", ""): 1e6,
            ("kv_cache_tokens", ""): 1000.0,
            ("token_budget", ""): BUDGET,
            **(self._outcomes() if self.request_rate else {}),
            **{("step_model", f'coefficient="{name}"'): value for name, value in zip(STEP._fields, STEP, strict=True)},
        }
        model = "another" if self.fault == "other model" else self.model
        owner = f'model_name="{model}"'
        lines = [
            f"fastgen_{name}{{{','.join(filter(None, (owner, label)))}}} {value}"
            for (name, label), value in values.items()
        ]
        return "\n".join(lines) + "\n"

    def _outcomes(self) -> dict[tuple[str, str], float]:
        return {
            ("request_success_total", 'finish_reason="stop"'): self._finished,
            ("request_rejected_total", 'reason="internal_error"'): self._failed,
            ("time_to_first_token_seconds_count", ""): self._finished,
            ("time_to_first_token_seconds_sum", ""): self._first_token_seconds,
            ("inter_token_latency_seconds_count", ""): self._finished * _TOKENS,
            ("inter_token_latency_seconds_sum", ""): self._gap_seconds,
        }

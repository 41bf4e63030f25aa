"""Fake engines that serve only metrics, each at its own loopback address."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from fastgen_operator.objects.container import HTTP_PORT
from harness.fluid import BUDGET, GENERATED, PROMPT, STEP

Fault = Literal["none", "hangs", "nan", "huge", "other model"]
# Above any deadline of the operator.
_HANG_SECONDS = 30.0


@dataclass
class FakeEngine:
    """Serves metrics as an engine would. A test sets its load and how it misbehaves.

    Attributes:
        address: an IPv4 address of the loopback network.
        prompt_rate: reported prompt tokens per second, with a random error of up to 10 %.
        backlog: reported queued prompt tokens.
        fault: what is wrong with its responses.
        scrapes: number of requests so far.
    """

    address: str
    model: str = "chat"
    prompt_rate: float = 0.0
    backlog: float = 0.0
    fault: Fault = "none"
    scrapes: int = 0
    _computed: float = 0.0
    _since: float = field(default_factory=time.monotonic)
    _closing: threading.Event = field(default_factory=threading.Event)
    _server: ThreadingHTTPServer | None = None

    def start(self) -> FakeEngine:
        """Serve until closed."""
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                engine.scrapes += 1
                if engine.fault == "hangs":
                    engine._closing.wait(_HANG_SECONDS)
                body = engine.exposition().encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle()

        self._server = ThreadingHTTPServer((self.address, HTTP_PORT), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def close(self) -> None:
        """Stop serving and release the address."""
        self._closing.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def exposition(self) -> str:
        """Return the current metrics in the Prometheus text format."""
        now = time.monotonic()
        self._computed += (now - self._since) * self.prompt_rate * random.uniform(0.9, 1.1)
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
            ("num_requests_running", ""): 1.0,
            ("num_requests_waiting", ""): 0.0,
            ("kv_cache_usage_ratio", ""): 0.1,
            ("kv_cache_capacity_tokens", ""): 1e6,
            ("kv_cache_tokens", ""): 1000.0,
            ("token_budget", ""): BUDGET,
            **{("step_model", f'coefficient="{name}"'): value for name, value in zip(STEP._fields, STEP, strict=True)},
        }
        model = "another" if self.fault == "other model" else self.model
        owner = f'model_name="{model}"'
        lines = [
            f"fastgen_{name}{{{','.join(filter(None, (owner, label)))}}} {value}"
            for (name, label), value in values.items()
        ]
        return "\n".join(lines) + "\n"

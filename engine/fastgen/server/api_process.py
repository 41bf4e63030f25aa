"""An API process from start to exit: listens at once, loads the model, serves, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from fastgen.link.client import EngineClient
from fastgen.link.launch import EngineProcess
from fastgen.link.messages import StepReport
from fastgen.link.shared_counts import SharedCounts
from fastgen.model.generation_defaults import in_words
from fastgen.server.app import create_app
from fastgen.server.http.auth import KeyRing
from fastgen.server.http.host_check import is_loopback
from fastgen.server.http.off_loop import prefer_event_loop
from fastgen.server.http.server import FLUSH_SECONDS, HTTPServer
from fastgen.server.http.tracing import Tracer
from fastgen.server.loading import ModelFiles, load_served_model
from fastgen.server.processes import APIProcesses
from fastgen.server.serving.held_memory import HeldMemory
from fastgen.server.serving.lifecycle import Lifecycle
from fastgen.server.serving.metrics import Metrics
from fastgen.server.serving.metrics_exchange import MetricsExchange
from fastgen.server.serving.service import Service
from fastgen.server.supervision import Supervision
from fastgen.server.ui.step_feed import StepFeed
from fastgen.settings import EngineConfig, ServerConfig
from fastgen.version import VERSION

log = logging.getLogger("fastgen.server")

# After the engine died: time for /health to report it and for open streams to get their error.
_DEAD_ENGINE_GRACE_SECONDS = 1.0
# How long a connection without a request stays open during a drain. A busy client uses it again within that time, and
# learns from the response that it ends.
_IDLE_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Role:
    """Role of an API process in its server.

    Attributes:
        process: its number. Number 0 started the engine and the other processes, and ends if one of them does.
        engine: the engine process.
        counts: counts that all API processes share.
        folder: directory of the server's sockets.
        others: the other API processes, in number 0; None in all others.
    """

    process: int
    engine: EngineProcess
    counts: SharedCounts
    folder: Path
    others: APIProcesses | None


@dataclass(eq=False)
class APIProcess:
    """One of the processes that serve HTTP.

    Attributes:
        engine_config: the engine's settings.
        server_config: the server's settings.
        files: the model's files.
        listener: the listening socket.
        keys: valid API keys.
        tracer: None if tracing is off.
        role: its role in the server. `role.engine` waits for its configuration.
        started: start time of the server, in seconds of the monotonic clock.
    """

    engine_config: EngineConfig
    server_config: ServerConfig
    files: ModelFiles
    listener: socket.socket
    keys: KeyRing
    tracer: Tracer | None
    role: Role
    started: float

    def __post_init__(self) -> None:
        config, role = self.server_config, self.role
        counts = self._counts = role.counts.of(role.process)
        lifecycle = self._lifecycle = Lifecycle(counts)
        metrics = self._metrics = Metrics(self.files.names[0], config.metrics_compat)
        self._exchange = MetricsExchange(
            metrics.registry,
            lambda: metrics.update(lifecycle.num_open),
            role.folder,
            role.process,
            role.counts.num_processes,
        )
        memory = HeldMemory(2 * config.max_bodies_size)
        service = Service(self.files.names, lifecycle, metrics, config, memory)
        self._steps = StepFeed() if config.ui else None
        self._stop_requested = asyncio.Event()
        self._second_signal = asyncio.Event()
        self._supervision = Supervision(role.others, self._forget)
        self._engine: EngineClient | None = None  # once it is ready
        app = create_app(service, config, self.keys, self.tracer, self._steps, self._exchange)
        self._http = HTTPServer(app, config.request_read_seconds)

    async def run(self) -> int:
        """Serve until a signal arrives and return the exit code.

        Raises:
            ConfigError: if the settings or the model are not supported.
            EngineStartError: if the engine fails to start for another reason.
            EngineDeadError: if the engine dies or hangs.
            APIProcessError: if another API process ends by itself.
        """
        # Ctrl-C in a terminal reaches all processes. The first one passes it on, as SIGTERM.
        for number in (signal.SIGTERM, signal.SIGINT) if self._is_first else (signal.SIGTERM,):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        serving = asyncio.create_task(self._http.serve(sockets=[self.listener]))
        try:
            async with self._exchange.serving():
                return await self._serve_with_others()
        finally:
            self._http.should_exit = True
            if self._steps is not None:
                self._steps.close()
            await serving
            if self.tracer is not None:
                await self.tracer.close()

    async def _serve_with_others(self) -> int:
        supervising = asyncio.create_task(self._supervision.run())
        try:
            return await self._load_and_serve(supervising)
        finally:
            # If the engine has failed, the other processes still tell their clients.
            self._supervision.stop_others()
            await asyncio.wait((supervising,), timeout=2 * FLUSH_SECONDS)
            supervising.cancel()

    async def _load_and_serve(self, supervising: asyncio.Task[None]) -> int:
        loading = asyncio.create_task(load_served_model(self.files, self.server_config, self._start_engine()))
        stopping = asyncio.create_task(self._stop_requested.wait())
        losing = asyncio.create_task(self._supervision.lost.wait())
        await asyncio.wait((loading, stopping, losing), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            await asyncio.wait((loading,))
            if self._supervision.loss is not None:
                raise self._supervision.loss
            return 0
        model = loading.result()
        engine = self._engine = model.engine
        try:
            prefer_event_loop()
            self._lifecycle.begin_serving(model)
            if self._is_first:
                self._metrics.describe(engine.info, VERSION)
                self._announce(engine)
            dead = asyncio.create_task(engine.wait_dead())
            await asyncio.wait((dead, stopping, losing), return_when=asyncio.FIRST_COMPLETED)
            if dead.done():
                await asyncio.sleep(_DEAD_ENGINE_GRACE_SECONDS)
                raise engine.dead()
            if not stopping.done():
                log.error("%s", self._supervision.loss)
                self._stop()
            await self._drain(engine, dead, supervising)
            if self._supervision.loss is not None:
                raise self._supervision.loss
            return 0
        finally:
            model.grammars.close()
            await engine.stop()

    @property
    def _is_first(self) -> bool:
        return self.role.process == 0

    def _start_engine(self) -> asyncio.Task[EngineClient]:
        if self._is_first:
            log.info("fastgen %s: loading %s", VERSION, self.engine_config.model)
        return asyncio.create_task(
            EngineClient.start(
                self.role.engine,
                self.files.engine_config(self.engine_config),
                self._lifecycle.set_loading_progress,
                on_report=self._record,
                step_timeout=self.server_config.step_timeout_seconds,
                counts=self._counts,
            )
        )

    def _record(self, report: StepReport) -> None:
        if self._is_first:
            self._metrics.record(report)
        if self._steps is not None:
            self._steps.record(report)

    def _forget(self, process: int) -> None:
        """Clear the counts of a process that has exited, and end its requests in the engine."""
        self.role.counts.clear(process)
        if self._engine is not None:
            self._engine.leave(process)

    def _on_signal(self, number: int) -> None:
        if self._is_first:
            log.info("received %s", signal.Signals(number).name)
        self._stop()

    def _stop(self) -> None:
        """Drain in all processes; end at once if called again."""
        (self._second_signal if self._stop_requested.is_set() else self._stop_requested).set()
        self._supervision.stop_others()

    async def _drain(self, engine: EngineClient, dead: asyncio.Task[None], supervising: asyncio.Task[None]) -> None:
        """Let open requests finish within the drain time, then abort the rest.

        A second signal aborts them at once. Aborted requests keep their output so far. Connections made before the
        drain end with their next response, and idle ones after `_IDLE_SECONDS`. The first API process also waits for
        the others.

        Raises:
            EngineDeadError: if the engine dies or hangs.
        """
        began = time.monotonic()
        self._lifecycle.begin_draining()
        self._http.end_connections(_IDLE_SECONDS)
        seconds = self.server_config.drain_seconds
        if self._is_first:
            log.info("draining: %d open requests, up to %d s", self._lifecycle.total_open, seconds)
        idle = asyncio.create_task(self._wait_idle())
        immediate = asyncio.create_task(self._second_signal.wait())
        await asyncio.wait((idle, immediate, dead), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not idle.done():
            log.info("aborting %d requests that have not finished", self._lifecycle.num_open)
            engine.abort_all()
            await asyncio.wait((idle, dead), timeout=FLUSH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        # The other processes got the signal at the same time as this one, and have as much time to drain.
        remaining = max(0.0, began + seconds - time.monotonic()) + 2 * FLUSH_SECONDS
        await asyncio.wait((supervising, dead), timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
        if dead.done():
            raise engine.dead()
        if self._is_first:
            log.info("stopped")

    async def _wait_idle(self) -> None:
        """Wait until no request is open and no idle connection may bring another one."""
        await self._lifecycle.wait_idle()
        while self._http.has_idle_connections:
            await asyncio.sleep(_IDLE_SECONDS / 20)
            await self._lifecycle.wait_idle()

    def _announce(self, engine: EngineClient) -> None:
        info, files = engine.info, self.files
        host, port = self.listener.getsockname()[:2]
        log.info(
            "model %s: %s, %.0f M parameters, %s on %s",
            files.names[0],
            info.architecture,
            info.num_parameters / 1e6,
            info.dtype,
            info.device,
        )
        log.info(
            "KV cache: %d blocks of %d tokens; token budget %d, at most %d sequences, longest request %d tokens",
            info.num_blocks,
            info.block_size,
            info.token_budget,
            info.max_sequences,
            info.max_model_length,
        )
        if not self.keys and not is_loopback(host):
            log.warning(
                "no API key is configured: whoever can reach port %d may use the server; set --api-key-file or "
                "FASTGEN_API_KEY, or listen on --host 127.0.0.1",
                port,
            )
        if files.task.name != "generate":
            log.info("this server %s", files.task.description)
        if files.defaults:
            log.info(
                "the model's sampling defaults: %s; --generation-config none ignores them", in_words(files.defaults)
            )
        address = f"[{host}]" if ":" in host else host
        log.info("ready on http://%s:%d after %.1f s", address, port, time.monotonic() - self.started)
        if self._steps is not None:
            log.info("page: http://%s:%d/ui", address, port)

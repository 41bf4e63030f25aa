"""The server process: listens at once, loads the engine, serves, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import prometheus_client
import uvicorn
import uvloop

from fastgen import exit_codes
from fastgen.config import ConfigError, EngineConfig, ServerConfig, default_model_name
from fastgen.engine.client import EngineClient, EngineError, EngineStartError
from fastgen.engine.launch import EngineProcess, Launch
from fastgen.engine.messages import StepReport
from fastgen.engine.shared_counts import SharedCounts
from fastgen.model.generation_defaults import generation_defaults
from fastgen.model.hub import hub_repository
from fastgen.model.source import ModelSource
from fastgen.server.app import create_app
from fastgen.server.http.auth import KeyRing
from fastgen.server.http.connection import CLOSE, Connection, connection_class
from fastgen.server.http.host_check import is_loopback
from fastgen.server.http.listening import allow_many_connections, listen
from fastgen.server.http.off_loop import prefer_event_loop
from fastgen.server.http.tracing import Tracer, is_configured
from fastgen.server.processes import APIProcessError, APIProcesses
from fastgen.server.serving.encoding import PromptSizeLimit
from fastgen.server.serving.grammars import GrammarChecker
from fastgen.server.serving.held_memory import HeldMemory
from fastgen.server.serving.lifecycle import Lifecycle, ServedModel
from fastgen.server.serving.metrics import Metrics
from fastgen.server.serving.metrics_exchange import MetricsExchange
from fastgen.server.serving.service import Service
from fastgen.server.serving.task import ServedTask
from fastgen.server.ui.step_feed import StepFeed
from fastgen.text import reranker
from fastgen.text.guarded_encoding import GuardedEncoder
from fastgen.text.reasoning import ReasoningFormat, reasoning_format
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tools.registry import choose_format
from fastgen.version import VERSION

log = logging.getLogger("fastgen.server")

# After the engine died: time for /health to report it and for open streams to get their error.
_DEAD_ENGINE_GRACE_SECONDS = 1.0
# After the drain: time to flush the last bytes to the clients.
_FLUSH_SECONDS = 5
# How long a connection without a request stays open during a drain. A busy client uses it again within that time, and
# learns from the response that it ends.
_IDLE_SECONDS = 2
# After another API process ended by itself: time for this one to find the cause, most often that the engine failed.
_FINDING_SECONDS = 5.0
_KEEP_ALIVE_SECONDS = 75  # longer than the 60 s common in proxies, which must be the side that closes


def run(engine_config: EngineConfig, server_config: ServerConfig, launch: Launch) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code.

    Args:
        engine_config: the engine's settings.
        server_config: the server's settings.
        launch: the engine process, which waits for its configuration.

    Raises:
        ConfigError: if the settings or the model are not supported.
        EngineStartError: if the engine fails to start for another reason.
        EngineDeadError: if the engine dies or hangs while it serves.
        APIProcessError: if another API process than this first one dies.
    """
    started = time.monotonic()
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # twice the output, and unused
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # Quick checks first, so that their errors appear before anything is started or logged.
    source = ModelSource.open(engine_config.model)
    keys = KeyRing(server_config.api_key_file, os.environ)
    endpoint = server_config.otlp_endpoint
    allow_many_connections()
    num_processes = server_config.api_processes
    listeners = listen(server_config.host, server_config.port, num_processes)
    counts = SharedCounts(num_processes)

    def serve(process: int, engine: EngineProcess, others: APIProcesses | None) -> int:
        for number, listener in enumerate(listeners):
            if number != process:
                listener.close()  # its process alone accepts its connections
        tracer = Tracer(endpoint) if is_configured(endpoint, os.environ) else None  # it has a thread
        role = Role(process, engine, counts, launch.folder, others)
        listener = listeners[process]
        try:
            return uvloop.run(Server(engine_config, server_config, source, listener, keys, tracer, role, started).run())
        finally:
            listener.close()

    def serve_beside(process: int) -> int:
        try:
            return serve(process, launch.shared(process), None)
        except (ConfigError, EngineError) as error:  # the first process finds the same, and its line is the last
            log.error("API process %d: %s", process, error)
            return error.exit_code if isinstance(error, EngineError) else exit_codes.BAD_CONFIGURATION

    others = APIProcesses(num_processes - 1, serve_beside)
    return serve(0, launch, others)


@dataclass(frozen=True, slots=True)
class Role:
    """What an API process is within its server.

    Attributes:
        process: its number; the first, 0, started the engine and the others, and ends with them.
        engine: the engine process.
        counts: what the processes count together.
        folder: private to the server.
        others: the other processes; None in each of them.
    """

    process: int
    engine: EngineProcess
    counts: SharedCounts
    folder: Path
    others: APIProcesses | None


@dataclass(eq=False)
class Server:
    """An API process from start to exit.

    Attributes:
        engine_config: the engine's settings.
        server_config: the server's settings.
        source: the model's files.
        listener: the listening socket.
        keys: valid API keys.
        tracer: None if tracing is off.
        role: which of the server's processes it is, and its engine, which waits for its configuration.
        started: start time of the server, in seconds of the monotonic clock.
    """

    engine_config: EngineConfig
    server_config: ServerConfig
    source: ModelSource
    listener: socket.socket
    keys: KeyRing
    tracer: Tracer | None
    role: Role
    started: float

    def __post_init__(self) -> None:
        default_name = hub_repository(self.engine_config.model) or default_model_name(self.engine_config.model)
        names = self.server_config.served_model_names or (default_name,)
        self._defaults = generation_defaults(self.server_config.generation_config, self.source.path)
        self._task = ServedTask.of(self.source, self.server_config.task, self.server_config.pooling)
        counts = self._counts = self.role.counts.of(self.role.process)
        self._lifecycle = lifecycle = Lifecycle(counts)
        self._metrics = metrics = Metrics(names[0], self.server_config.metrics_compat)
        self._exchange = MetricsExchange(
            metrics.registry,
            lambda: metrics.update(lifecycle.num_open),
            self.role.folder,
            self.role.process,
            self.role.counts.num_processes,
        )
        self._service = Service(
            names,
            self._lifecycle,
            self._metrics,
            self.server_config.max_queued_requests,
            self.server_config.trust_request_chat_template,
            self.server_config.cache_isolation,
            HeldMemory(2 * self.server_config.max_bodies_size),
        )
        self._steps = StepFeed() if self.server_config.ui else None
        self._stop_requested = asyncio.Event()
        self._second_signal = asyncio.Event()
        self._lost = asyncio.Event()
        self._loss: APIProcessError | None = None  # which process
        self._engine: EngineClient | None = None  # once it is ready
        self._http = _HTTPServer(
            uvicorn.Config(
                create_app(self._service, self.server_config, self.keys, self.tracer, self._steps, self._exchange),
                http=connection_class(self.server_config.request_read_seconds),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=_FLUSH_SECONDS,
            )
        )

    async def run(self) -> int:
        """Serve until a signal arrives and return the exit code.

        Raises:
            EngineDeadError: if the engine dies or hangs.
            APIProcessError: if another API process dies.
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
        supervising = asyncio.create_task(self._supervise())
        try:
            return await self._load_and_serve(supervising)
        finally:
            # If the engine has failed, the other processes still tell their clients.
            self._signal_others()
            await asyncio.wait((supervising,), timeout=2 * _FLUSH_SECONDS)
            supervising.cancel()

    async def _load_and_serve(self, supervising: asyncio.Task[None]) -> int:
        loading = asyncio.create_task(self._load())
        stopping = asyncio.create_task(self._stop_requested.wait())
        losing = asyncio.create_task(self._lost.wait())
        await asyncio.wait((loading, stopping, losing), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            await asyncio.wait((loading,))
            if self._loss is not None:
                raise self._loss
            return 0
        model = loading.result()
        engine = self._engine = model.engine
        try:
            if self._is_first:
                self._metrics.describe(engine.info, VERSION)
            prefer_event_loop()
            self._lifecycle.begin_serving(model)
            if self._is_first:
                self._announce(engine)
            dead = asyncio.create_task(engine.wait_dead())
            await asyncio.wait((dead, stopping, losing), return_when=asyncio.FIRST_COMPLETED)
            if dead.done():
                await asyncio.sleep(_DEAD_ENGINE_GRACE_SECONDS)
                raise engine.dead()
            if not stopping.done():
                log.error("%s", self._loss)
                self._stop()
            await self._drain(engine, dead, supervising)
            if self._loss is not None:
                raise self._loss
            return 0
        finally:
            model.grammars.close()
            await engine.stop()

    @property
    def _is_first(self) -> bool:
        return self.role.process == 0

    async def _supervise(self) -> None:
        """Handle the exits of the other API processes, until there are no more."""
        others, counts = self.role.others, self.role.counts
        while others is not None and others.num_running:
            process, code = await others.wait_exit()
            counts.clear(process)
            if self._engine is not None:
                self._engine.leave(process)
            if self._stop_requested.is_set() and code in (0, -signal.SIGTERM):  # it may have had no handler yet
                continue
            error = APIProcessError.of(process, code)
            if code > 0:  # this process is about to find out why, unless the error was the other one's alone
                asyncio.get_running_loop().call_later(_FINDING_SECONDS, self._lose, error)
            else:
                self._lose(error)

    def _lose(self, error: APIProcessError) -> None:
        """End the server because another API process has ended."""
        if self._loss is None:
            self._loss = error
            self._lost.set()

    def _stop(self) -> None:
        """Drain in all processes; end at once if called again."""
        (self._second_signal if self._stop_requested.is_set() else self._stop_requested).set()
        self._signal_others()

    def _signal_others(self) -> None:
        if self.role.others is not None:
            self.role.others.signal(signal.SIGTERM)

    def _record(self, report: StepReport) -> None:
        if self._is_first:
            self._metrics.record(report)
        if self._steps is not None:
            self._steps.record(report)

    async def _load(self) -> ServedModel:
        """Load the tokenizer here while the engine process loads the weights."""
        # The local path: the download is complete, so the engine process does not contact the hub.
        config = replace(self.engine_config, model=str(self.source.path))
        if self._is_first:
            log.info("fastgen %s: loading %s", VERSION, self.engine_config.model)
        engine = asyncio.create_task(
            EngineClient.start(
                self.role.engine,
                config,
                self._lifecycle.set_loading_progress,
                on_report=self._record,
                step_timeout=self.server_config.step_timeout_seconds,
                counts=self._counts,
            )
        )
        try:
            tokenizer = await asyncio.to_thread(Tokenizer.load, self.source.tokenizer)
            tool_format = choose_format(self.server_config.tool_parser, tokenizer)
            thinking = reasoning_format(self.server_config.reasoning_parser, tokenizer)
            task = self._task.with_answers(tokenizer)
            ready = await engine
            limit = PromptSizeLimit(tokenizer, ready.info.max_model_length)
            guarded = self._guarded(tokenizer, thinking, ready.info.max_model_length)
            return ServedModel(
                ready, tokenizer, limit, GrammarChecker(tokenizer), tool_format, thinking, self._defaults, task, guarded
            )
        except EngineStartError as error:
            if error.exit_code == exit_codes.BAD_CONFIGURATION:
                raise ConfigError(str(error)) from None
            raise
        except BaseException:
            engine.cancel()
            await asyncio.wait((engine,))
            if not engine.cancelled() and engine.exception() is None:
                await engine.result().stop()
            raise

    def _guarded(self, tokenizer: Tokenizer, thinking: ReasoningFormat | None, longest: int) -> GuardedEncoder | None:
        """Return what encodes prompts in which clients cannot write special tokens, if that is set."""
        if self.server_config.message_special_tokens == "allow":
            return None
        template = tokenizer.chat_template
        written = reranker.LITERAL_TEXT + ("" if template is None else template.literal_text())
        control = tokenizer.control_tokens(written, thinking.marks if thinking else ())
        return GuardedEncoder(tokenizer, control, longest)

    def _announce(self, engine: EngineClient) -> None:
        info = engine.info
        host, port = self.listener.getsockname()[:2]
        log.info(
            "model %s: %s, %.0f M parameters, %s on %s",
            self._service.names[0],
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
        if self._task.name != "generate":
            log.info("this server %s", self._task.description)
        if self._defaults:
            named = ", ".join(f"{name} {value:g}" for name, value in self._defaults.items())
            log.info("defaults of generation_config.json: %s; --generation-config none ignores them", named)
        address = f"[{host}]" if ":" in host else host
        log.info("ready on http://%s:%d after %.1f s", address, port, time.monotonic() - self.started)
        if self._steps is not None:
            log.info("page: http://%s:%d/ui", address, port)

    async def _drain(self, engine: EngineClient, dead: asyncio.Task[None], supervising: asyncio.Task[None]) -> None:
        """Let open requests finish within the drain time, then abort the rest.

        Aborted requests keep their output so far. Connections made before end with their next response, and idle ones
        after a moment. The first API process also waits for the others.

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
            await asyncio.wait((idle, dead), timeout=_FLUSH_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        # The other processes have got the signal when this one has, and drain as long as it may.
        remaining = max(0.0, began + seconds - time.monotonic()) + 2 * _FLUSH_SECONDS
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

    def _on_signal(self, number: int) -> None:
        if self._is_first:
            log.info("received %s", signal.Signals(number).name)
        self._stop()


class _HTTPServer(uvicorn.Server):
    """uvicorn without its signal handlers, because the server drains before it shuts down."""

    @property
    def has_idle_connections(self) -> bool:
        """Return whether a connection waits for its next request."""
        return any(connection.is_idle for connection in self._connections())

    def end_connections(self, idle_seconds: float) -> None:
        """Say `Connection: close` in each response from now on, and close connections that stay idle."""
        self.config.encoded_headers.append(CLOSE)  # uvicorn rebuilds the headers of all responses from it
        self.server_state.default_headers = [*self.server_state.default_headers, CLOSE]
        for connection in self._connections():
            connection.end_soon(idle_seconds)

    def _connections(self) -> list[Connection]:
        return [connection for connection in self.server_state.connections if isinstance(connection, Connection)]

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

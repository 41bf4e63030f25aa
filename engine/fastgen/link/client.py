"""Client of the engine process: sends it requests, receives its reports, and detects its end.

Once the engine has its configuration, a client and the engine share only a ZeroMQ PAIR socket in a private directory.
`fastgen.link.messages` defines the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from fastgen import exit_codes
from fastgen.core.request import FinishReason, Request
from fastgen.link.in_flight import InFlight, Receiver
from fastgen.link.launch import EngineProcess
from fastgen.link.messages import (
    Add,
    Cancel,
    Command,
    EngineInfo,
    Event,
    Failed,
    Gone,
    Loading,
    Ready,
    Shutdown,
    StepReport,
    TokenOutput,
    Watch,
)
from fastgen.link.shared_counts import Count, Counts
from fastgen.link.silence import Silence, is_stopped
from fastgen.link.watchdog import ProcessorWait, Watchdog
from fastgen.settings import EngineConfig

# After the process exited, its socket is drained until no message has arrived for this long.
_DRAIN_SECONDS = 0.05
# An engine that does not exit within this time after Shutdown is killed. A step takes far less.
_STOP_SECONDS = 5.0
# The engine process is checked at least this often.
_LOOK_SECONDS = 0.5
# An engine that reported its failure is killed if it has not exited after this time. A killed one is not waited for any
# longer either: a process that waits for a broken device may not end.
_EXIT_SECONDS = 3.0


class EngineError(Exception):
    """The engine has failed; the message is one line. `fastgen.exit_codes` has the exit codes."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineStartError(EngineError):
    """The engine could not start."""


class EngineDeadError(EngineError):
    """The engine process has exited, failed or hangs; the message says how."""


class EngineClient:
    """Client of one engine process. Use it only in the event loop that started it.

    Attributes:
        info: the served model and its limits.
        in_flight: this process's requests in the engine. Both are set when the engine is ready.
    """

    info: EngineInfo
    in_flight: InFlight

    def __init__(
        self,
        process: EngineProcess,
        on_loading: Callable[[str, float], None],
        on_report: Callable[[StepReport], None],
        step_timeout: float,
        counts: Counts,
        *,
        num_ranks: int,
    ) -> None:
        self._process = process
        self._num_ranks = num_ranks
        self._on_loading = on_loading
        self._on_report = on_report
        self._step_timeout = step_timeout
        self._counts = counts
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.LINGER, 0)
        # Never drop a report while the loop is busy. The engine's send queue bounds how many are on their way.
        self._socket.set(zmq.RCVHWM, 0)
        # Commands are bounded by the queue's limit, and none may be lost.
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.bind(process.address)
        # Becomes readable when there are events, but not again before the socket has been found empty.
        self._descriptor = int(self._socket.get(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[None] = self._loop.create_future()  # an event could not be handled
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._failure: Failed | None = None
        self._failed = asyncio.Event()
        self._dead = asyncio.Event()
        self._watchdog: Watchdog | None = None  # from `Ready` on; before, the engine reads no messages
        self._owes_report = False  # a command was sent after the last report
        self._num_received = 0
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        process: EngineProcess,
        config: EngineConfig,
        on_loading: Callable[[str, float], None],
        *,
        on_report: Callable[[StepReport], None],
        step_timeout: float,
        counts: Counts,
    ) -> EngineClient:
        """Send the configuration and wait until the engine is ready for requests.

        Args:
            process: the started process.
            config: the model to serve and its settings.
            on_loading: called with a stage and its completed fraction, 0 to 1.
            on_report: called with every report, in order; must return quickly.
            step_timeout: see `ServerConfig.step_timeout_seconds`.
            counts: of this process, among those of all clients of the engine.

        Raises:
            EngineStartError: if the engine cannot serve `config` or exits while loading.
        """
        engine = cls(process, on_loading, on_report, step_timeout, counts, num_ranks=config.tensor_parallel)
        process.hand_over(config)
        try:
            await engine._wait_ready()
        except BaseException:
            await engine.stop()
            raise
        return engine

    async def _wait_ready(self) -> None:
        self._watcher = asyncio.create_task(self._watch())
        await _first_of(self._started, self._watcher)
        if not self._started.done():
            raise EngineStartError(self.exit_message, self.exit_code)

    @property
    def alive(self) -> bool:
        """Whether the engine is not known to have exited, failed or hung."""
        return not self._dead.is_set()

    @property
    def _is_ready(self) -> bool:
        return self._watchdog is not None

    @property
    def why_late(self) -> str | None:
        """Why the engine seems to hang: a step takes far longer than predicted. None if it does not."""
        return self._watchdog.message() if self._watchdog is not None and self._watchdog.is_late else None

    @property
    def exit_code(self) -> int:
        """Exit code for the server, once the engine has exited, failed or hung."""
        return exit_codes.FAILED if self._failure is None else self._failure.exit_code

    @property
    def exit_message(self) -> str:
        """How the engine exited, failed or hung, once it has."""
        if self._failure is not None:
            return self._failure.message
        code = self._process.poll()
        return f"the engine process {'has ended' if code is None else exit_codes.how_ended(code)}"

    def start_request(self, request: Request, receiver: Receiver) -> None:
        """Start a request, which must have passed `Request.check`. Its outputs go to `receiver`.

        Raises:
            EngineDeadError: if the engine has exited, failed or hangs.
        """
        if not self.alive:
            raise self.dead()
        self.in_flight.open(request.id, receiver)
        self._send(Add(request))

    def cancel(self, request_id: str) -> None:
        """End a request, if it has not ended; its receiver gets no more outputs."""
        if self.in_flight.close(request_id) and self.alive:
            self._send(Cancel(request_id))

    def watch(self, *, on: bool) -> None:
        """Let the engine add a trace to its reports from now on, or stop doing so."""
        if self.alive:
            self._send(Watch(on))

    def leave(self, client: int) -> None:
        """Tell the engine that another client has exited, so that it ends the client's requests."""
        if self.alive and self._is_ready:
            self._send(Gone(client))

    def abort_all(self) -> None:
        """End all requests of this process with finish reason `abort`; their outputs so far remain valid."""
        for request_id in self.in_flight.ids():
            self.in_flight.deliver(TokenOutput(request_id, [], FinishReason.ABORT))
            self._send(Cancel(request_id))

    async def wait_dead(self) -> None:
        """Wait until the engine has exited, failed or hangs."""
        await self._dead.wait()

    def dead(self) -> EngineDeadError:
        """Return the error for requests after the engine has exited, failed or hung."""
        return EngineDeadError(self.exit_message, self.exit_code)

    async def stop(self) -> None:
        """Stop the engine process, if this process started it, and wait some seconds for its exit.

        Calls `fail` on the receivers of unfinished requests.
        """
        if self._process.is_owned:
            if self.alive and self._is_ready:
                self._send(Shutdown())
                await _first_of(asyncio.create_task(_wait_exit(self._process.pid)), timeout=_STOP_SECONDS)
            if self._process.poll() is None:
                self._process.kill()
                await _first_of(asyncio.create_task(_wait_exit(self._process.pid)), timeout=_EXIT_SECONDS)
        if self._watcher is not None:
            if self._process.is_owned:
                self._failed.set()  # so that it does not wait for a process that cannot be killed
            else:
                self._watcher.cancel()
            await asyncio.wait((self._watcher,))
            if not self._watcher.cancelled():
                self._watcher.result()
        self._socket.close()
        self._process.end()

    def _send(self, command: Command) -> None:
        with contextlib.suppress(zmq.Again):  # the engine has exited; the watcher will notice
            self._socket.send(self._encoder.encode(command), zmq.NOBLOCK)
        self._owes_report = True
        # Sending may have consumed the signal that there are events.
        self._loop.call_soon(self._receive)

    async def _watch(self) -> None:
        """Receive messages until the engine exits, fails or hangs; then drain the socket and end all requests.

        Does not kill the process: `stop` does.
        """
        self._loop.add_reader(self._descriptor, self._receive)
        self._receive()
        exited = asyncio.create_task(_wait_exit(self._process.pid))
        failed = asyncio.create_task(self._failed.wait())
        guard = asyncio.create_task(self._guard())
        try:
            await _first_of(exited, self._broken, failed, guard)
            if self._broken.done() and self._failure is None:
                message = f"a message of the engine process could not be handled: {self._broken.exception()}"
                self._failure = Failed(message, exit_codes.FAILED)
            if failed.done():
                await _first_of(exited, timeout=_EXIT_SECONDS)
            num_received = -1
            while num_received != self._num_received:
                num_received = self._num_received
                await asyncio.sleep(_DRAIN_SECONDS)
        finally:
            for task in (exited, failed, guard):
                task.cancel()
            self._loop.remove_reader(self._descriptor)
            self._dead.set()
            if self._is_ready:
                self.in_flight.end_all()

    def _receive(self) -> None:
        """Handle all events that have arrived. An asyncio socket of ZeroMQ would take a task step for each."""
        try:
            while not (self._dead.is_set() or self._broken.done()):
                self._handle(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            pass
        except Exception as error:
            self._broken.set_exception(error)

    def _handle(self, event: Event) -> None:
        self._num_received += 1
        match event:
            case StepReport():
                self._owes_report = False
                if self._watchdog is not None:
                    self._watchdog.record(event)
                self._on_report(event)
                self.in_flight.record(event)
            case Loading(stage, fraction):
                self._on_loading(stage, fraction)
            case Ready(info):
                # At once: a report about another client's requests may follow.
                self.info = info
                self.in_flight = InFlight(info.max_sequences, self._counts)
                self._watchdog = Watchdog(self._step_timeout, info)
                self._started.set_result(None)
            case Failed():
                self._failure = event
                self._failed.set()

    async def _guard(self) -> None:
        """Return when the engine hangs."""
        starving, stopped = ProcessorWait(self._process.pid), Silence(_LOOK_SECONDS)
        while True:
            period = _LOOK_SECONDS if self._watchdog is None else self._watchdog.period
            await asyncio.sleep(min(_LOOK_SECONDS, period))
            now, starved = time.monotonic(), starving.since_last()
            if self._num_ranks > 1:  # the other ranks wait for it, and cannot report that
                stopped.look(now, is_silent=is_stopped(self._process.pid), starved=starved)
                if stopped.is_hung:
                    failure = stopped.failure()
                    self._failure = Failed(f"rank 0: {failure.message}", failure.exit_code)
                    return
            if self._watchdog is None:
                continue
            # A report may be on its way that was sent before the engine read the last command.
            self._counts.set(Count.AWAITING, self._owes_report or bool(self.in_flight.ids()))
            has_work = self._counts.total(Count.AWAITING) > 0
            self._watchdog.look(now, has_work=has_work, starved=starved)
            if self._watchdog.is_hung:
                self._failure = Failed(self._watchdog.message(), exit_codes.HUNG)
                return


async def _wait_exit(pid: int) -> None:
    """Wait without a thread for a process to exit: its pidfd becomes readable (pidfd_open(2)).

    The process is not reaped, so its number is not reused until its parent asks for the exit code.
    """
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:  # it has been reaped
        return
    loop.add_reader(descriptor, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

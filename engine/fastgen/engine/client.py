"""Client of the engine process: sends it requests, receives its reports, and detects its end.

The two processes share only a ZeroMQ PAIR socket in a private directory; `fastgen.engine.messages` defines the
messages. This module must not import torch.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from fastgen import exit_codes
from fastgen.config import EngineConfig
from fastgen.core.request import FinishReason, Request
from fastgen.engine.in_flight import InFlight, Receiver
from fastgen.engine.launch import Launch
from fastgen.engine.messages import (
    Add,
    Cancel,
    Command,
    EngineInfo,
    Event,
    Failed,
    Loading,
    Ready,
    Shutdown,
    StepReport,
    TokenOutput,
    Watch,
)
from fastgen.engine.watchdog import Watchdog

# After the process exited, its socket is drained until no message has arrived for this long.
_DRAIN_SECONDS = 0.05
# An engine that does not exit within this time after Shutdown is killed. A step takes far less.
_STOP_SECONDS = 5.0
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
    """The engine process has exited or hangs; the message tells how."""


class EngineClient:
    """Client of one engine process. Use it only in the event loop that started it.

    Attributes:
        info: the served model and its limits.
        in_flight: the requests in the engine.
    """

    info: EngineInfo
    in_flight: InFlight

    def __init__(
        self,
        launch: Launch,
        socket: zmq.asyncio.Socket,
        on_report: Callable[[StepReport], None] | None,
        step_timeout: float,
    ) -> None:
        self._launch = launch
        self._process = launch.process
        self._socket = socket
        self._on_report = on_report
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._failure: Failed | None = None
        self._failed = asyncio.Event()
        self._step_timeout = step_timeout
        self._watchdog: Watchdog | None = None  # while the engine is ready
        self._owes_report = False  # a command was sent after the last report
        self._num_received = 0
        self._ready = False  # the engine reads no messages before
        self._dead = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        launch: Launch,
        config: EngineConfig,
        on_loading: Callable[[str, float], None],
        *,
        on_report: Callable[[StepReport], None] | None = None,
        step_timeout: float,
    ) -> EngineClient:
        """Send the configuration and wait until the engine is ready for requests.

        Args:
            launch: the started process.
            config: the model to serve and its settings.
            on_loading: called with a stage and its completed fraction, 0 to 1.
            on_report: called with every report, in order; must return quickly.
            step_timeout: see `ServerConfig.step_timeout_seconds`.

        Raises:
            EngineStartError: if the engine cannot serve `config` or exits while loading.
        """
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set(zmq.LINGER, 0)
        # Never drop a report while the loop is busy. The engine's send queue bounds how many are on their way.
        socket.set(zmq.RCVHWM, 0)
        socket.bind(launch.address)
        engine = cls(launch, socket, on_report, step_timeout)
        launch.hand_over(config)
        try:
            await engine._wait_ready(on_loading)
        except BaseException:
            await engine.stop()
            raise
        return engine

    async def _wait_ready(self, on_loading: Callable[[str, float], None]) -> None:
        ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._watcher = asyncio.create_task(self._watch(ready, on_loading))
        dead = asyncio.create_task(self._dead.wait())
        try:
            await _first_of(ready, dead)
        finally:
            dead.cancel()
        if not ready.done():
            raise EngineStartError(self.exit_message, self.exit_code)
        self.info = ready.result()
        self.in_flight = InFlight(self.info.max_sequences)
        self._watchdog = Watchdog(self._step_timeout, self.info)
        self._ready = True

    @property
    def alive(self) -> bool:
        """Return whether the engine process is running, as far as known."""
        return not self._dead.is_set()

    @property
    def why_late(self) -> str | None:
        """Why the engine may hang: its step takes far longer than predicted. None if it does not."""
        return self._watchdog.message() if self._watchdog is not None and self._watchdog.is_late else None

    @property
    def exit_code(self) -> int:
        """The exit code for the server once the engine has exited."""
        return exit_codes.FAILED if self._failure is None else self._failure.exit_code

    @property
    def exit_message(self) -> str:
        """How the engine exited; meaningful once it has."""
        if self._failure is not None:
            return self._failure.message
        code = self._process.returncode
        if code is not None and code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return f"the engine process was killed by {signal.Signals(-code).name}{hint}"
        return f"the engine process ended with exit code {code}"

    def start_request(self, request: Request, receiver: Receiver) -> None:
        """Start a request, which must have passed `Request.check`. Its outputs go to `receiver`.

        Raises:
            EngineDeadError: if the engine has exited.
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

    def abort_all(self) -> None:
        """End all requests with finish reason `abort`; their outputs so far remain valid."""
        for request_id in self.in_flight.ids():
            self.in_flight.deliver(TokenOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT))
            self._send(Cancel(request_id))

    async def wait_dead(self) -> None:
        """Wait until the engine has exited or hangs."""
        await self._dead.wait()

    def dead(self) -> EngineDeadError:
        """Return the error that tells how the engine exited."""
        return EngineDeadError(self.exit_message, self.exit_code)

    async def stop(self) -> None:
        """Stop the engine process and wait for its exit. Unfinished requests get EngineDeadError."""
        if self.alive and self._ready:
            self._send(Shutdown())
            await _first_of(asyncio.create_task(_wait_exit(self._process)), timeout=_STOP_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
        await _first_of(asyncio.create_task(_wait_exit(self._process)), timeout=_EXIT_SECONDS)
        if self._watcher is not None:
            self._failed.set()  # so that it does not wait for a process that cannot be killed
            await self._watcher
        self._socket.close()
        self._launch.end()

    def _send(self, command: Command) -> None:
        # Not awaited: the future is done at once unless the queue is full, and messages keep their order either way.
        self._socket.send(self._encoder.encode(command))
        self._owes_report = True

    async def _watch(self, ready: asyncio.Future[EngineInfo], on_loading: Callable[[str, float], None]) -> None:
        """Receive messages until the engine exits, fails or hangs; then drain the socket and wake all waiters.

        Does not kill the process: `stop` does.
        """
        receiver = asyncio.create_task(self._receive(ready, on_loading))
        exited = asyncio.create_task(_wait_exit(self._process))
        failed = asyncio.create_task(self._failed.wait())
        guard = asyncio.create_task(self._guard())
        await _first_of(exited, receiver, failed, guard)
        if receiver.done() and self._failure is None:
            message = f"the engine process sent a message that cannot be decoded: {receiver.exception()}"
            self._failure = Failed(message, exit_codes.FAILED)
        if failed.done():
            await _first_of(exited, timeout=_EXIT_SECONDS)
        for task in (exited, failed, guard):
            task.cancel()
        num_received = -1
        while num_received != self._num_received:
            num_received = self._num_received
            await asyncio.sleep(_DRAIN_SECONDS)
        receiver.cancel()
        self._dead.set()
        if self._ready:
            self.in_flight.end_all()

    async def _receive(self, ready: asyncio.Future[EngineInfo], on_loading: Callable[[str, float], None]) -> None:
        while True:
            event = self._decoder.decode(await self._socket.recv())
            self._num_received += 1
            match event:
                case StepReport():
                    self._owes_report = False
                    if self._watchdog is not None:
                        self._watchdog.record(event)
                    if self._on_report is not None:
                        self._on_report(event)
                    self.in_flight.record(event)
                case Loading(stage, fraction):
                    on_loading(stage, fraction)
                case Ready(info):
                    ready.set_result(info)
                case Failed():
                    self._failure = event
                    self._failed.set()

    async def _guard(self) -> None:
        """Return when the engine hangs."""
        while True:
            await asyncio.sleep(0.5 if self._watchdog is None else self._watchdog.period)
            if self._watchdog is None:
                continue
            # A report may be on its way that was sent before the engine read the last command.
            has_work = self._owes_report or bool(self.in_flight.ids())
            self._watchdog.look(time.monotonic(), has_work=has_work)
            if self._watchdog.is_hung:
                self._failure = Failed(self._watchdog.message(), exit_codes.HUNG)
                return


async def _wait_exit(process: subprocess.Popen[bytes]) -> None:
    """Wait for a process to exit, without a thread: its pidfd becomes readable (pidfd_open(2))."""
    if process.poll() is not None:
        return
    loop, exited = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, exited.set)
    try:
        await exited.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()


async def _first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

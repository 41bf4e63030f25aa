"""The server's handle on the engine process: starts it, talks to it, notices when it ends.

The two processes share only a ZeroMQ PAIR socket in a private folder; `fastgen.engine.messages` defines the messages.
Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from fastgen.config import EngineConfig
from fastgen.core.request import FinishReason, Request
from fastgen.engine.in_flight import InFlight
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
)

# How long a process that has ended may take to be heard out: its last words are on their way through the socket.
_LAST_WORDS_SECONDS = 0.05
# A pass takes far less; an engine that has not followed a Shutdown by then is killed.
_STOP_SECONDS = 5.0


class EngineStartError(Exception):
    """The engine could not start; `exit_code` 2 means that what it was asked to serve is at fault."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class EngineDeadError(Exception):
    """The engine process has ended; the message says how."""


class EngineClient:
    """An engine in a process of its own. Belongs to the event loop that started it.

    Attributes:
        info: what the engine serves.
        in_flight: the requests under way in it.
    """

    info: EngineInfo
    in_flight: InFlight

    def __init__(self, launch: Launch, socket: zmq.asyncio.Socket, on_report: Callable[[StepReport], None] | None):
        self._launch = launch
        self._process = launch.process
        self._socket = socket
        self._on_report = on_report
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)
        self._failure: Failed | None = None
        self._num_received = 0
        self._listens = False  # while it loads, the engine does not
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
    ) -> EngineClient:
        """Start the engine and return when it is ready for requests.

        Args:
            launch: the engine process.
            config: what it serves.
            on_loading: called with the loading stage and its completed fraction, 0 to 1.
            on_report: called once for each step report, in order; must be quick.

        Raises:
            EngineStartError: when it cannot serve what `config` asks for, or fails on the way.
        """
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.set(zmq.LINGER, 0)
        # A report must never be lost, however long the loop is busy: the engine decides how much may be on its way.
        socket.set(zmq.RCVHWM, 0)
        socket.bind(launch.address)
        engine = cls(launch, socket, on_report)
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
            exit_code = self._failure.exit_code if self._failure is not None else 1
            raise EngineStartError(self.end, exit_code)
        self.info = ready.result()
        self.in_flight = InFlight(self.info.max_sequences)
        self._listens = True

    @property
    def alive(self) -> bool:
        """Is the engine process running?"""
        return not self._dead.is_set()

    @property
    def end(self) -> str:
        """How the engine ended, in words for people; meaningful once it has."""
        if self._failure is not None:
            return self._failure.message
        code = self._process.returncode
        if code is not None and code < 0:
            hint = " (out of memory?)" if code == -signal.SIGKILL else ""
            return f"the engine process was killed by {signal.Signals(-code).name}{hint}"
        return f"the engine process ended with exit code {code}"

    async def generate(self, request: Request) -> AsyncGenerator[TokenOutput]:
        """The tokens of one request as they come; the last output has a finish reason.

        Closing the iterator before that frees what the request holds in the engine. The request must have passed
        `Request.check`.

        Raises:
            EngineDeadError: when the engine is or becomes dead.
        """
        if not self.alive:
            raise EngineDeadError(self.end)
        outputs = self.in_flight.open(request.id)
        self._send(Add(request))
        try:
            while True:
                output = await outputs.get()
                if output is None:
                    raise EngineDeadError(self.end)
                yield output
                if output.finish_reason is not None:
                    return
        finally:
            # Whether its end has come is seen when it comes, not when it is read: after it there is nothing to cancel.
            if self.in_flight.close(request.id) and self.alive:
                self._send(Cancel(request.id))

    def abort_all(self) -> None:
        """Ends every request under way with finish reason `abort`, keeping what it has generated."""
        for request_id in self.in_flight.ids():
            self.in_flight.give(TokenOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT))
            self._send(Cancel(request_id))

    async def wait_dead(self) -> int:
        """Waits until the engine has ended; returns its exit code (negative: the signal that killed it)."""
        await self._dead.wait()
        code = self._process.returncode
        assert code is not None
        return code

    async def stop(self) -> None:
        """Ends the engine process and waits for its end. Requests under way get EngineDeadError."""
        if self.alive and self._listens:
            self._send(Shutdown())
            await _first_of(asyncio.create_task(_end_of(self._process)), timeout=_STOP_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
        await _end_of(self._process)
        if self._watcher is not None:
            await self._watcher
        self._socket.close()
        self._launch.end()

    def _send(self, command: Command) -> None:
        # The future that this gives is done at once but for a full queue, and sends keep their order either way.
        self._socket.send(self._encoder.encode(command))

    async def _watch(self, ready: asyncio.Future[EngineInfo], on_loading: Callable[[str, float], None]) -> None:
        """Hears the engine until its process has ended and nothing is left to hear."""
        listener = asyncio.create_task(self._listen(ready, on_loading))
        end = asyncio.create_task(_end_of(self._process))
        await _first_of(end, listener)
        if not end.done():
            # An engine that cannot be understood is of no use.
            self._failure = Failed(f"the engine process cannot be understood: {listener.exception()}", exit_code=1)
            self._process.kill()
            await end
        heard = -1
        while heard != self._num_received:
            heard = self._num_received
            await asyncio.sleep(_LAST_WORDS_SECONDS)
        listener.cancel()
        self._dead.set()
        if self._listens:
            self.in_flight.end_all()

    async def _listen(self, ready: asyncio.Future[EngineInfo], on_loading: Callable[[str, float], None]) -> None:
        while True:
            event = self._decoder.decode(await self._socket.recv())
            self._num_received += 1
            match event:
                case StepReport():
                    if self._on_report is not None:
                        self._on_report(event)
                    self.in_flight.take(event)
                case Loading(stage, fraction):
                    on_loading(stage, fraction)
                case Ready(info):
                    ready.set_result(info)
                case Failed():
                    self._failure = event


async def _end_of(process: subprocess.Popen[bytes]) -> None:
    """Waits for the end of a process without a thread: a pidfd is readable from then on (pidfd_open(2))."""
    if process.poll() is not None:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    process.wait()


async def _first_of(*futures: asyncio.Future[Any], timeout: float | None = None) -> None:
    await asyncio.wait(futures, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

"""The engine process.

Loads the model, then runs the step loop and exchanges messages with the API processes. `fastgen.engine.launch` starts
it as `python -m fastgen.engine.process LOG_FORMAT ADDRESS...`, with the `EngineConfig` as JSON on standard input. It is
a separate process so that HTTP work never delays a step.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import zmq

from fastgen import exit_codes, logs
from fastgen.config import ConfigError, EngineConfig
from fastgen.core.request import FinishReason, RequestError
from fastgen.engine.clients import Clients
from fastgen.engine.messages import (
    Add,
    Cancel,
    Command,
    Failed,
    Gone,
    Loading,
    Ready,
    Shutdown,
    StepReport,
    TokenOutput,
    Watch,
)
from fastgen.kernels.cpu import environment
from fastgen.runner.device_errors import first_line, is_device_failure, is_out_of_memory

log = logging.getLogger("fastgen.engine.process")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# A server that leaves this many reports unread has stopped reading. Sending then blocks.
_SEND_QUEUE = 10_000
# What would delay requests is done when there has been no work for this long.
_IDLE_SECONDS = 1.0


class Channel:
    """The engine's ends of the socket pairs, one per client."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._sockets = [_connect(address) for address in addresses]
        self._poller = zmq.Poller()
        self._client = {socket: client for client, socket in enumerate(self._sockets)}
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        self.clients = Clients(len(self._sockets))

    def send(self, event: Loading | Ready | Failed) -> None:
        """Send one event to all clients."""
        encoded = self._encoder.encode(event)
        for client in self.clients.present:
            self._sockets[client].send(encoded)

    def report(self, report: StepReport) -> None:
        """Send each client its part of a report."""
        for client, part in self.clients.split(report):
            self._sockets[client].send(self._encoder.encode(part))

    def receive(self, *, wait: float | None) -> list[tuple[int, Command]]:
        """Return all pending commands, each with its client.

        Wait at most `wait` seconds for the first one, or without limit if `wait` is None. The commands of one client
        are in order.
        """
        commands: list[tuple[int, Command]] = []
        for socket, _ in self._poller.poll(None if wait is None else round(wait * 1000)):
            client = self._client[socket]
            while socket.poll(0, zmq.POLLIN):
                commands.append((client, self._decoder.decode(socket.recv())))
        return commands

    def leave(self, client: int) -> list[str]:
        """Stop exchanging messages with a client that has gone; return its requests."""
        requests = self.clients.leave(client)
        self._poller.unregister(self._sockets[client])
        self._sockets[client].close(linger=0)
        return requests


def _connect(address: str) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set(zmq.SNDHWM, _SEND_QUEUE)
    socket.set(zmq.LINGER, 1000)
    socket.connect(address)
    return socket


def serve(channel: Channel, config: EngineConfig) -> None:
    """Load the model and run the step loop until Shutdown.

    Raises:
        ConfigError: if the configuration cannot be served.
    """
    # Imported here because torch takes seconds to import, and the channel reports progress before.
    from fastgen.engine.build import build_engine
    from fastgen.model.source import ModelSource
    from fastgen.text.tokenizer import Tokenizer

    source = ModelSource.open(config.model)
    loaded = build_engine(
        source,
        config,
        partial(Tokenizer.load, source.tokenizer),
        lambda stage, fraction: channel.send(Loading(stage, fraction)),
    )
    engine, clients = loaded.engine, channel.clients
    gc.freeze()
    gc.enable()
    channel.send(Ready(loaded.info))
    # In the background: probes and endpoints take longer to bring the first request, and no later one is delayed.
    engine.prepare_grammars()
    is_rested = False
    while True:
        owes_report = False
        rejected: list[TokenOutput] = []
        commands = channel.receive(wait=0.0 if engine.has_work else None if is_rested else _IDLE_SECONDS)
        if not commands and not engine.has_work:
            engine.check_integrity()
            is_rested = True
        for client, command in commands:
            if client not in clients.present:  # it has gone, which another one has just said
                continue
            match command:
                case Add(request):
                    clients.open(request.id, client)
                    try:
                        engine.add(request)
                    except RequestError as error:
                        # The server applies the same checks before. If they disagree nevertheless, abort this request
                        # only.
                        log.error("request %s rejected: %s", request.id, error)
                        rejected.append(_aborted(request.id))
                case Cancel(request_id):
                    clients.close(request_id)
                    owes_report |= engine.cancel(request_id)
                case Watch(on):
                    clients.watch(client, on=on)
                    engine.is_watched = clients.is_watched
                    owes_report = True
                case Gone(gone):
                    for request_id in channel.leave(gone):
                        engine.cancel(request_id)
                    engine.is_watched = clients.is_watched
                    owes_report = True
                case Shutdown():
                    return
        if rejected or (owes_report and not engine.has_work):
            channel.report(engine.report(rejected))
        if engine.has_work:
            is_rested = False
            channel.report(engine.step())


def _aborted(request_id: str) -> TokenOutput:
    return TokenOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT)


def import_torch() -> None:
    """Import torch before the configuration arrives: the server is still reading the model's metadata."""
    environment.prepare()
    importlib.import_module("torch")


def main(prepare: Callable[[], None]) -> int:
    """Run the process and return its exit code. `prepare` is called before the configuration is read."""
    # Importing hundreds of modules creates objects that stay. Collecting garbage meanwhile takes a tenth of the start
    # time.
    gc.disable()
    # The server decides when to stop, and Ctrl-C in a terminal reaches both processes. If the server dies, the kernel
    # kills this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    log_format, *addresses = sys.argv[1:]
    logs.configure(log_format)
    channel = Channel(addresses)
    prepare()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    try:
        serve(channel, config)
    except Exception as error:
        failed = _failure(error)
        if failed.exit_code == exit_codes.FAILED:
            log.exception("the engine failed")
        channel.send(failed)
        return failed.exit_code
    return 0


def _failure(error: Exception) -> Failed:
    """Return the message for an error that ends the engine: one line with the cause and what to do."""
    text = first_line(error)
    if isinstance(error, ConfigError):
        return Failed(str(error), exit_codes.BAD_CONFIGURATION)
    if is_out_of_memory(error):  # while it loads: afterwards the engine makes its steps smaller
        return Failed(f"out of memory: {text}; lower --memory-percent or --token-budget", exit_codes.FAILED)
    if is_device_failure(error):
        advice = "look for Xid messages in the node's dmesg, and replace the GPU if they return"
        return Failed(f"the GPU failed: {text}; {advice}", exit_codes.DEVICE_FAILED)
    return Failed(f"{type(error).__name__}: {text}", exit_codes.FAILED)


if __name__ == "__main__":
    sys.exit(main(import_torch))

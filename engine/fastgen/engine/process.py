"""The engine process: loads the model, then steps the engine and talks to the server over a local socket.

Started by `fastgen.engine.client` as `python -m fastgen.engine.process ADDRESS LOG_FORMAT`, with the `EngineConfig` as
JSON on standard input. It is a separate process so that HTTP work never delays a step.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import msgspec
import zmq

from fastgen import logs
from fastgen.config import ConfigError, EngineConfig
from fastgen.core.request import FinishReason, RequestError
from fastgen.engine.messages import (
    Add,
    Cancel,
    Command,
    Event,
    Failed,
    Loading,
    Ready,
    Shutdown,
    TokenOutput,
)
from fastgen.kernels.cpu import environment

log = logging.getLogger("fastgen.engine.process")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# A queue that holds this many unsent reports means a server that has stopped reading; waiting for it is right then.
_SEND_QUEUE = 10_000


class Channel:
    """The engine's end of the socket pair."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, _SEND_QUEUE)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def send(self, event: Event) -> None:
        """Sends one event."""
        self._socket.send(self._encoder.encode(event))

    def receive(self, *, wait: bool) -> list[Command]:
        """All commands that have come; where `wait`, blocks until there is one."""
        commands = []
        if wait:
            commands.append(self._decoder.decode(self._socket.recv()))
        while self._socket.poll(0, zmq.POLLIN):
            commands.append(self._decoder.decode(self._socket.recv()))
        return commands


def serve(channel: Channel, config: EngineConfig, started: float) -> None:
    """Loads the model and steps until told to shut down.

    Raises:
        ConfigError: when what is asked for cannot be served.
    """
    # Imported here, not above: torch takes seconds, and the channel should report from the start.
    from fastgen.engine.build import build_engine
    from fastgen.model.source import ModelSource
    from fastgen.text.tokenizer import Tokenizer

    source = ModelSource.open(config.model)
    loaded = build_engine(
        source,
        config,
        partial(Tokenizer.load, source.tokenizer),
        lambda stage, fraction: channel.send(Loading(stage, fraction)),
        started=started,
    )
    engine = loaded.engine
    gc.freeze()
    gc.enable()
    channel.send(Ready(loaded.info))
    while True:
        changed = False
        refused: list[TokenOutput] = []
        for command in channel.receive(wait=not engine.has_work):
            match command:
                case Add(request):
                    try:
                        engine.add(request)
                    except RequestError as error:
                        # The server checks requests by the same rules first. Where they disagree, one request ends,
                        # not the engine with everybody's.
                        log.error("request %s refused: %s", request.id, error)
                        refused.append(_aborted(request.id))
                case Cancel(request_id):
                    changed |= engine.cancel(request_id)
                case Shutdown():
                    return
        if refused or (changed and not engine.has_work):
            channel.send(engine.report(refused))
        if engine.has_work:
            channel.send(engine.step())


def _aborted(request_id: str) -> TokenOutput:
    return TokenOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT)


def import_torch() -> None:
    """What takes longest comes before the configuration, which the server sends when it has read its own part."""
    environment.prepare()
    importlib.import_module("torch")


def main(prepare: Callable[[], None]) -> int:
    """Runs the process; returns its exit code. `prepare` is called before the configuration is read."""
    started = time.monotonic()
    # Hundreds of modules are on their way, and what they make stays: looking for garbage among it takes a tenth of the
    # time to be ready.
    gc.disable()
    # The server decides when to stop: a Ctrl-C in the terminal reaches both processes. If it is gone, so are we.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    logs.configure(sys.argv[2])
    channel = Channel(sys.argv[1])
    prepare()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    try:
        serve(channel, config, started)
    except ConfigError as error:
        channel.send(Failed(str(error), exit_code=2))
        return 2
    except Exception as error:
        log.exception("the engine failed")
        channel.send(Failed(f"{type(error).__name__}: {error}", exit_code=1))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(import_torch))

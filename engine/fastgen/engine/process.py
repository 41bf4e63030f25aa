"""The engine process: loads the model, then runs the step loop and exchanges messages with the server.

`fastgen.engine.launch` starts it as `python -m fastgen.engine.process ADDRESS LOG_FORMAT`, with the `EngineConfig` as
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

from fastgen import exit_codes, logs
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
    """The engine's end of the socket pair."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.set(zmq.SNDHWM, _SEND_QUEUE)
        self._socket.set(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)

    def send(self, event: Event) -> None:
        """Send one event."""
        self._socket.send(self._encoder.encode(event))

    def receive(self, *, wait: float | None) -> list[Command]:
        """Return all pending commands. Wait for the first one for at most `wait` seconds; without limit if None."""
        commands: list[Command] = []
        timeout = None if wait is None else round(wait * 1000)
        while self._socket.poll(0 if commands else timeout, zmq.POLLIN):
            commands.append(self._decoder.decode(self._socket.recv()))
        return commands


def serve(channel: Channel, config: EngineConfig, started: float) -> None:
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
        started=started,
    )
    engine = loaded.engine
    gc.freeze()
    gc.enable()
    channel.send(Ready(loaded.info))
    is_rested = False
    while True:
        owes_report = False
        rejected: list[TokenOutput] = []
        commands = channel.receive(wait=0.0 if engine.has_work else None if is_rested else _IDLE_SECONDS)
        if not commands and not engine.has_work:
            engine.check_integrity()
            engine.prepare_grammars()
            is_rested = True
        for command in commands:
            match command:
                case Add(request):
                    try:
                        engine.add(request)
                    except RequestError as error:
                        # The server applies the same checks before. If they disagree nevertheless, abort this request
                        # only.
                        log.error("request %s rejected: %s", request.id, error)
                        rejected.append(_aborted(request.id))
                case Cancel(request_id):
                    owes_report |= engine.cancel(request_id)
                case Watch(on):
                    engine.is_watched = on
                    owes_report = True
                case Shutdown():
                    return
        if rejected or (owes_report and not engine.has_work):
            channel.send(engine.report(rejected))
        if engine.has_work:
            is_rested = False
            channel.send(engine.step())


def _aborted(request_id: str) -> TokenOutput:
    return TokenOutput(request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT)


def import_torch() -> None:
    """Import torch before the configuration arrives: the server is still reading the model's metadata."""
    environment.prepare()
    importlib.import_module("torch")


def main(prepare: Callable[[], None]) -> int:
    """Run the process and return its exit code. `prepare` is called before the configuration is read."""
    started = time.monotonic()
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
    logs.configure(sys.argv[2])
    channel = Channel(sys.argv[1])
    prepare()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    try:
        serve(channel, config, started)
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

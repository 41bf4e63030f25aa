"""The engine process: loads the model, then runs the step loop and serves the API processes.

`fastgen.link.launch` starts it as `python -m fastgen.engine.process LOG_FORMAT ADDRESS...`, with the `EngineConfig`
as JSON on standard input. It is a separate process so that HTTP work never delays a step.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import msgspec

from fastgen import exit_codes, logs
from fastgen.core.request import FinishReason
from fastgen.core.request_error import RequestError
from fastgen.engine.channel import Channel, Unreadable
from fastgen.kernels.cpu import environment
from fastgen.link.messages import Add, Cancel, Gone, Loading, Ready, Shutdown, TokenOutput, Watch
from fastgen.runner.failures import RankFailed, describe
from fastgen.settings import EngineConfig

log = logging.getLogger("fastgen.engine.process")

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# The integrity check, which would delay requests, runs when there has been no work for this long.
_IDLE_SECONDS = 1.0


def serve_channel(channel: Channel, config: EngineConfig) -> None:
    """Load the model and run the step loop until Shutdown.

    Raises:
        ConfigError: if the configuration cannot be served.
    """
    # Imported here, not at the top: a failing import is then reported to the server, too.
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
    # A model that is divided among processes needs all of them: look after them while nothing runs, too.
    longest_wait = _IDLE_SECONDS if config.tensor_parallel > 1 else None
    gc.freeze()
    gc.enable()
    channel.send(Ready(loaded.info))
    # Now, in the background: it is done before probes and endpoints bring the first request.
    engine.prepare_grammars()
    is_checked = False  # since the last step
    while True:
        owes_report = False
        rejected: list[TokenOutput] = []
        commands = channel.receive(wait=0.0 if engine.has_work else longest_wait if is_checked else _IDLE_SECONDS)
        if longest_wait is not None:
            loaded.runner.check()
        if not commands and not engine.has_work:
            engine.check_integrity()
            is_checked = True
        for client, command in commands:
            if client not in clients.present:  # another client has just reported that it is gone
                continue
            match command:
                case Add(request):
                    clients.open(request.id, client)
                    try:
                        engine.add(request)
                    except RequestError as error:
                        # The server makes the same checks. If they disagree nevertheless, end only this request.
                        log.error("request %s rejected: %s", request.id, error)
                        rejected.append(TokenOutput(request.id, [], FinishReason.REJECTED))
                case Unreadable(fault, request_id):
                    log.error("a message of API process %d is unreadable, request %s: %s", client, request_id, fault)
                    owes_report = True
                    if request_id is not None:
                        clients.open(request_id, client)
                        rejected.append(TokenOutput(request_id, [], FinishReason.REJECTED))
                case Cancel(request_id):
                    clients.close(request_id)
                    owes_report |= engine.cancel(request_id)
                case Watch(on):
                    clients.watch(client, on=on)
                    owes_report = True
                case Gone(gone):
                    for request_id in channel.leave(gone) if gone in clients.present else ():
                        engine.cancel(request_id)
                    owes_report = True
                case Shutdown():
                    return
        engine.is_watched = clients.is_watched
        if rejected or (owes_report and not engine.has_work):
            channel.report(engine.report(rejected))
        if engine.has_work:
            is_checked = False
            channel.report(engine.step())


def import_torch() -> None:
    """Import torch before the configuration arrives: the server is still reading the model's metadata."""
    environment.prepare()
    importlib.import_module("torch")


def main(prepare: Callable[[], None]) -> int:
    """Run the process and return its exit code. `prepare` is called before the configuration is read."""
    # Imports create objects that stay. Collecting garbage meanwhile would take a tenth of the start time.
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
        serve_channel(channel, config)
    except Exception as error:
        failed = describe(error)
        if failed.exit_code == exit_codes.FAILED and not isinstance(error, RankFailed):
            log.exception("the engine failed")
        channel.send(failed)
        return failed.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(import_torch))

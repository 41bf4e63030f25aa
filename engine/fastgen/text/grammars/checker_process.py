"""The process that rehearses grammars: it forks one process for each, and never touches a grammar itself.

`GrammarChecker` starts it as `python -m fastgen.text.grammars.checker_process` with a Unix socket as standard input.
Over it come the vocabulary, once, and then a descriptor for each grammar, over which the fork reads the grammar and
writes the verdict. If a fork is killed, this process writes why. It ends when the socket is closed, and so when its
parent ends.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars.compiler import InvalidGrammar, vocabulary_tables
from fastgen.text.grammars.limits import MOST_REHEARSAL_SECONDS
from fastgen.text.grammars.rehearsal import limit_process, rehearse

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# A grammar that has taken longer than this yields to the others.
_SHORT_SECONDS = 0.1
_YIELDING = 5
# A grammar's text has at most 64 KiB, and a verdict a line.
MOST_MESSAGE_BYTES = 1 << 17


class TokenTexts(msgspec.Struct):
    """The texts of a vocabulary's tokens in order, and which tokens are special."""

    tokens: list[bytes]
    special: list[int]


class Verdict(msgspec.Struct):
    """The outcome of a rehearsal.

    Attributes:
        fault: why the grammar is rejected; empty if it is accepted.
        signal: the signal that ended the rehearsal, or 0.
        error: a defect of this program; empty if there is none.
    """

    fault: str = ""
    signal: int = 0
    error: str = ""


@dataclass(slots=True)
class _Rehearsal:
    connection: socket.socket
    began: float
    yields: bool = False


class _Process:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: dict[int, _Rehearsal] = {}  # by the descriptor of the process
        self._pids: dict[int, int] = {}
        texts = msgspec.msgpack.decode(_received(control), type=TokenTexts)
        self._end_token = len(texts.tokens)
        self._tables = vocabulary_tables(
            [*texts.tokens, b"<|end of match|>"],
            [*texts.special, self._end_token],
            [self._end_token],
            lambda _: [],
        )

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        while True:
            young = [each for each in self._running.values() if not each.yields]
            for descriptor, _ in poll.poll(1000 * _SHORT_SECONDS if young else None):
                if descriptor == self._control.fileno():
                    _, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not descriptors:
                        return
                    poll.register(self._begin(socket.socket(fileno=descriptors[0])), select.POLLIN)
                elif descriptor in self._running:
                    poll.unregister(descriptor)
                    self._end(descriptor)
            for descriptor, rehearsal in self._running.items():
                if not rehearsal.yields and time.monotonic() - rehearsal.began > _SHORT_SECONDS:
                    rehearsal.yields = True
                    os.setpriority(os.PRIO_PROCESS, self._pids[descriptor], _YIELDING)

    def _begin(self, connection: socket.socket) -> int:
        """Fork for a grammar; return the descriptor that is readable when the fork has ended."""
        parent = os.getpid()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() == parent:
                    self._rehearse(connection)
                    code = 0
            finally:
                os._exit(code)
        descriptor = os.pidfd_open(pid)
        self._running[descriptor], self._pids[descriptor] = _Rehearsal(connection, time.monotonic()), pid
        return descriptor

    def _rehearse(self, connection: socket.socket) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # the library describes its crashes there
        signal.alarm(MOST_REHEARSAL_SECONDS)
        grammar = msgspec.msgpack.decode(connection.recv(MOST_MESSAGE_BYTES), type=Grammar)
        limit_process()
        verdict = Verdict()
        try:
            rehearse(grammar, self._tables, self._end_token)
        except InvalidGrammar as error:
            verdict.fault = error.fault.encode(errors="backslashreplace").decode()  # names may be lone surrogates
        except MemoryError:
            verdict.signal = signal.SIGABRT
        except Exception as error:
            verdict.error = f"{type(error).__name__}: {error}"
        connection.send(msgspec.msgpack.encode(verdict))

    def _end(self, descriptor: int) -> None:
        """Handle the end of a fork; report it if it was killed before it could write a verdict."""
        rehearsal, pid = self._running.pop(descriptor), self._pids.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        if status:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else signal.SIGKILL
            with suppress(OSError):  # the client may have given up
                rehearsal.connection.send(msgspec.msgpack.encode(Verdict(signal=number)))
        rehearsal.connection.close()


def _received(control: socket.socket) -> bytes:
    """Receive one message with a length prefix of 4 bytes, big-endian; exit if the socket was closed.

    What follows is not read: it carries file descriptors.
    """
    length = int.from_bytes(control.recv(4, socket.MSG_WAITALL), "big")
    data = control.recv(length, socket.MSG_WAITALL)
    if len(data) < length or not data:
        sys.exit(0)
    return data


def main() -> None:
    """Serve until the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    _Process(control).run()


if __name__ == "__main__":
    main()

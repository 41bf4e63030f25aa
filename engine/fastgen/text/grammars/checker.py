"""Checks the grammars of requests before an engine compiles them, in child processes, which they may crash."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import msgspec

from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars import checker_process
from fastgen.text.grammars.checker_process import MOST_MESSAGE_BYTES, TokenTexts, Verdict
from fastgen.text.grammars.compiler import InvalidGrammar, check_text
from fastgen.text.grammars.limits import MOST_REHEARSAL_BYTES, MOST_REHEARSAL_CPU_SECONDS, MOST_REHEARSAL_SECONDS
from fastgen.text.tokenizer import Tokenizer

log = logging.getLogger("fastgen.grammar")

# What a signal that ended a rehearsal says about the grammar.
_FAULTS = {
    signal.SIGSEGV: "its rules are nested too deeply; simplify it",
    signal.SIGBUS: "its rules are nested too deeply; simplify it",
    signal.SIGABRT: f"compiling it takes more than {MOST_REHEARSAL_BYTES >> 20} MiB; simplify it",
    signal.SIGXCPU: f"compiling it takes more than {MOST_REHEARSAL_CPU_SECONDS} s of processor time; simplify it",
}
_EXIT_SECONDS = 1.0
# Longest time until the process has read the vocabulary, or answered: it starts and forks late on a busy machine.
_ANSWER_SECONDS = 2.0 * MOST_REHEARSAL_SECONDS
# Grammars that `admit` has rehearsed at the same time: a thread waits for the verdict on each.
_AT_ONCE = 4
_VERDICTS_KEPT = 4096


class CheckerUnavailable(Exception):
    """No grammar can be checked now. The message is one line."""


class GrammarChecker:
    """Has grammars rehearsed by another process, and remembers the verdicts.

    The first grammar starts the process, which ends with this object. A grammar whose rehearsal crashes or is killed
    affects no other one. Methods may be called in any thread.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()  # of the verdicts; the event loop takes it
        self._starting = threading.Lock()
        self._threads = ThreadPoolExecutor(_AT_ONCE, "grammar")
        self._process: _Process | None = None
        self._faults: OrderedDict[bytes, str] = OrderedDict()  # by digest; "" of accepted grammars

    def is_accepted(self, grammar: Grammar) -> bool:
        """Return whether a grammar is known to be accepted; False if it has to be rehearsed.

        A set of tokens is always accepted.

        Raises:
            InvalidGrammar: if it is known to be rejected.
        """
        digest = _digest(grammar)
        with self._lock:
            fault = self._faults.get(digest)
            if fault is not None:
                self._faults.move_to_end(digest)
        if fault:
            raise InvalidGrammar(grammar, fault)
        return fault is not None or grammar.kind == "tokens"

    def check(self, grammar: Grammar) -> None:
        """Rehearse a grammar unless its verdict is known.

        Takes milliseconds, for complex grammars seconds, and on a busy machine up to some minutes.

        Raises:
            InvalidGrammar: if the grammar is invalid or too complex, with the reason.
            CheckerUnavailable: if it could not be rehearsed, or not in time on a busy machine.
        """
        if self.is_accepted(grammar):
            return
        check_text(grammar)
        verdict = self._verdict(grammar)
        fault = verdict.fault
        if verdict.error:
            log.error("a grammar could not be checked: %s", verdict.error)
            raise InvalidGrammar(grammar, "it cannot be checked; simplify it")
        if verdict.signal == signal.SIGALRM:  # which says nothing of the grammar
            raise CheckerUnavailable(
                f"the machine is busy: the grammar was not checked within {MOST_REHEARSAL_SECONDS} s"
            )
        if verdict.signal:
            log.warning("the rehearsal of a grammar was ended by %s", signal.Signals(verdict.signal).name)
            if verdict.signal not in _FAULTS:  # it may not be the grammar's fault
                raise InvalidGrammar(grammar, "checking it takes too long or too much memory; simplify it")
            fault = _FAULTS[signal.Signals(verdict.signal)]
        with self._lock:
            self._faults[_digest(grammar)] = fault
            if len(self._faults) > _VERDICTS_KEPT:
                self._faults.popitem(last=False)
        if fault:
            raise InvalidGrammar(grammar, fault)

    async def admit(self, grammar: Grammar, param: str) -> None:
        """Check a grammar of the field `param`, without blocking the event loop.

        Raises:
            RequestError: if the grammar is invalid, too large or too complex.
            CheckerUnavailable: if grammars cannot be checked now.
        """
        try:
            if not self.is_accepted(grammar):
                await asyncio.get_running_loop().run_in_executor(self._threads, self.check, grammar)
        except ValueError as error:
            raise RequestError(f"{param}: {error}", param) from None

    async def admitted(self, structure: tuple[Grammar, str] | None) -> Grammar | None:
        """Return the grammar of a request after checking it, if it has one; see `admit`.

        Args:
            structure: the grammar and the field that it came from, if any.
        """
        if structure is None:
            return None
        await self.admit(*structure)
        return structure[0]

    def close(self) -> None:
        """End the process, and with it the rehearsals that run. The next grammar starts another one."""
        with self._starting:
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _verdict(self, grammar: Grammar) -> Verdict:
        """Return the verdict of a process, of a second one if the first was killed meanwhile.

        Raises:
            CheckerUnavailable: if no process can be started, both end, or one does not answer.
        """
        for _ in range(2):
            process = self._running()
            try:
                return process.rehearse(grammar)
            except OSError as error:
                log.warning("the process that checks grammars has ended or hangs: %s", error)
                with self._starting:
                    if self._process is process:
                        self._process = None
                process.close()
                if isinstance(error, TimeoutError):
                    raise CheckerUnavailable("the process that checks grammars does not answer") from None
        raise CheckerUnavailable("the process that checks grammars ends again and again")

    def _running(self) -> _Process:
        with self._starting:
            if self._process is None:
                try:
                    self._process = _Process(self._tokenizer)
                except OSError as error:
                    raise CheckerUnavailable(f"the process that checks grammars cannot be started: {error}") from None
            return self._process


def _digest(grammar: Grammar) -> bytes:
    text = f"{grammar.kind}:{grammar.text}".encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=32).digest()


class _Process:
    """A process that rehearses grammars over one vocabulary, several at once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer: Tokenizer | None = tokenizer  # until the process has the vocabulary
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_ANSWER_SECONDS)
        with theirs:
            self._process = subprocess.Popen([sys.executable, "-m", checker_process.__name__], stdin=theirs.fileno())
        self._sending = threading.Lock()
        self._end = weakref.finalize(self, _end, self._control, self._process)

    def rehearse(self, grammar: Grammar) -> Verdict:
        """Return the verdict on a grammar.

        Raises:
            OSError: if the process has ended, TimeoutError if it does not answer.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs, self._sending:
                self._send_vocabulary()
                socket.send_fds(self._control, [b"g"], [theirs.fileno()])
            ours.settimeout(_ANSWER_SECONDS)
            ours.send(msgspec.msgpack.encode(grammar))
            data = ours.recv(MOST_MESSAGE_BYTES)
        if not data:
            raise ConnectionError("it was killed")
        return msgspec.msgpack.decode(data, type=Verdict)

    def _send_vocabulary(self) -> None:
        """Send the vocabulary before the first grammar. The process reads it once it has started."""
        if self._tokenizer is None:
            return
        vocabulary = self._tokenizer.vocabulary
        tokens = [vocabulary.token_bytes(token) for token in range(self._tokenizer.vocab_size)]
        data = msgspec.msgpack.encode(TokenTexts(tokens, sorted(self._tokenizer.special_token_ids)))
        self._control.sendall(len(data).to_bytes(4, "big") + data)
        self._tokenizer = None

    def close(self) -> None:
        """End the process."""
        self._end()


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    try:
        process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

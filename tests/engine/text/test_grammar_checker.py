"""Grammars are tried in a process of their own, which they may end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tokenizers import AddedToken

from engine.text.matching import END, byte_tokenizer
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars import checker as checker_module
from fastgen.text.grammars.checker import CheckerUnavailable, GrammarChecker
from fastgen.text.grammars.checker_process import MOST_MESSAGE_BYTES, Verdict
from fastgen.text.grammars.compiled import CompiledGrammars
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.vocabulary import Vocabulary
from support.waiting import HANG_SECONDS, eventually

TOKENIZER = byte_tokenizer(None)
VALID = Grammar(kind="regex", text="a|b")


def rules(count: int) -> Grammar:
    """Return a grammar of a chain of rules."""
    chain = "".join(f"r{i}: r{i + 1}\n" for i in range(count))
    return Grammar(kind="lark", text=f'start: r0\n{chain}r{count}: "a"\n')


# Its automaton has as many states as there are subsets of places.
HUGE = Grammar(kind="lark", text="start: X\nX: /(.*a.{15})/ & /(.*b.{14})/ & ~/(.*c.{13})/")


@pytest.fixture
def rehearsals() -> Iterator[GrammarChecker]:
    found = GrammarChecker(TOKENIZER)
    yield found
    found.close()


def pid_of(rehearsals: GrammarChecker) -> int:
    assert rehearsals._process is not None
    return rehearsals._process._process.pid


def forks_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_grammar_on_which_the_library_panics_is_refused_at_once(rehearsals: GrammarChecker) -> None:
    """The library then reads its debugging symbols, and waited for ever where memory ran out."""
    rehearsals.check(VALID)
    taken: list[float] = []
    while len(taken) < 10 and (not taken or min(taken) >= 1):
        began = time.monotonic()
        with pytest.raises(RequestError, match="the grammar library fails on it; simplify it"):
            rehearsals.check(Grammar(kind="lark", text=f'start: r::{len(taken)}\nr::_: "a" r::incr(_)'))
        taken.append(time.monotonic() - began)
    assert min(taken) < 1, "seconds"


@pytest.mark.parametrize("length", [1023, 1024, 1025, 40_000])
def test_a_vocabulary_with_very_long_tokens_has_grammars(length: int) -> None:
    """The library's tables have no room for them; other tokens spell their text."""
    backend = byte_tokenizer(None, "<|" + "x" * (length - 2)).backend
    backend.add_tokens([AddedToken("a" * length, special=False, normalized=False)])
    tokenizer = Tokenizer(backend, Vocabulary(backend), None, None, END)
    long_mark, long_text = END + 1, END + 2
    assert [len(tokenizer.vocabulary.token_bytes(token)) for token in (long_mark, long_text)] == [length, length]
    checker = GrammarChecker(tokenizer)
    try:
        for grammar in (
            Grammar(kind="regex", text="a*"),
            Grammar(kind="lark", text=f'start: "b" <[{long_mark}]> "a"'),
            Grammar(kind="regex", text=f"a{{{min(length, 1100)}}}"),  # may be the long token
        ):
            checker.check(grammar)
            constraint = CompiledGrammars(lambda: tokenizer, tokenizer.vocab_size, [END])(grammar)
            texts: list[int] = []
            while END not in texts and len(texts) < 5:
                mask = np.zeros(-(-tokenizer.vocab_size // 32), np.uint32)
                constraint.fill_mask(mask.data)
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                texts.append(int(allowed[0]))
                constraint.accept(texts[-1])
            if grammar.kind == "lark":
                assert texts == [*tokenizer.encode("b", add_special_tokens=False), long_mark,
                                 *tokenizer.encode("a", add_special_tokens=False), END]  # fmt: skip
    finally:
        checker.close()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (rules(3000), "nested too deeply"),
        (HUGE, r"more than \d+ MiB|more than \d+ s|simplify"),
        (Grammar(kind="json_schema", text='{"const": -9223372036854775808}'), "const: -9223372036854775808"),
        (Grammar(kind="json_schema", text='{"type": "integer", "multipleOf": 123456789}'), "multipleOf: 123456789"),
        (Grammar(kind="regex", text="(a{1,1000}){1,1000}b{100000}("), "unclosed group"),
    ],
    ids=["deep", "huge", "const", "multipleOf", "regex"],
)
def test_a_grammar_that_the_library_cannot_take_is_refused_and_ends_only_its_rehearsal(
    grammar: Grammar, message: str, rehearsals: GrammarChecker
) -> None:
    rehearsals.check(VALID)
    pid = pid_of(rehearsals)
    for _ in range(2):
        with pytest.raises(RequestError, match=message):
            rehearsals.check(grammar)
    rehearsals.check(Grammar(kind="regex", text="a|c"))
    assert pid_of(rehearsals) == pid


@pytest.mark.slow
def test_a_slow_grammar_holds_up_no_other_one(rehearsals: GrammarChecker) -> None:
    rehearsals.check(VALID)
    faults: list[str] = []

    def check(number: int) -> None:
        with pytest.raises(RequestError) as raised:
            rehearsals.check(Grammar(kind="lark", text=f"{HUGE.text}\n// {number}"))
        faults.append(str(raised.value))

    slow = [threading.Thread(target=check, args=(number,)) for number in range(2)]
    for thread in slow:
        thread.start()
    eventually(lambda: len(forks_of(pid_of(rehearsals))) == 2, within=20, what="two rehearsals", every=0.01)
    rehearsals.check(Grammar(kind="regex", text="a|c"))
    assert len(faults) < 2, "a small grammar is checked while large ones are"
    for thread in slow:
        thread.join()
    assert len(faults) == 2


def test_a_dead_end_is_found_before_a_generation_reaches_it(rehearsals: GrammarChecker) -> None:
    schema = {
        "allOf": [
            {"patternProperties": {"^[a]$": {"type": "null"}}, "additionalProperties": False},
            {"required": ["a"]},
        ]
    }
    with pytest.raises(RequestError, match=r"could not be continued|takes too long"):  # too long on a busy machine
        rehearsals.check(Grammar(kind="json_schema", text=json.dumps({"type": "object", **schema})))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar(kind="regex", text="((ba){100000}((?:a)|([a-z])+)|(^[ab]$|))"),
        Grammar(
            kind="lark",
            text='start: (%json {"const": "x"} r3 r1 | (" "){0,300})\n'
            'r1: %json {"x-guidance": {}, "$ref": "#"}\nr2: r3 %json {"type": "integer"}\nr3: (r2 | "b") r1',
        ),
    ],
    ids=["beside an empty match", "beside a long one"],
)
def test_what_follows_a_rare_beginning_is_rehearsed(grammar: Grammar, rehearsals: GrammarChecker) -> None:
    with pytest.raises(RequestError, match=r"could not be continued|takes too long"):  # too long on a busy machine
        rehearsals.check(grammar)


def test_a_verdict_is_remembered(rehearsals: GrammarChecker) -> None:
    assert not rehearsals.is_accepted(VALID)
    rehearsals.check(VALID)
    rehearsals.close()
    rehearsals.check(VALID)
    assert rehearsals._process is None, "nothing was started again"
    assert rehearsals.is_accepted(VALID)


def test_another_process_takes_over_from_one_that_was_killed(rehearsals: GrammarChecker) -> None:
    rehearsals.check(VALID)
    killed = pid_of(rehearsals)
    os.kill(killed, signal.SIGKILL)
    rehearsals.check(Grammar(kind="regex", text="a|c"))
    assert pid_of(rehearsals) != killed


def test_a_process_that_cannot_be_started_is_an_error_of_its_own(
    rehearsals: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checker_module.sys, "executable", "/nonexistent")
    with pytest.raises(CheckerUnavailable, match="cannot be started"):
        rehearsals.check(VALID)


def test_only_what_needs_a_verdict_waits_for_a_process_that_starts_late(
    smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The event loop asks whether a verdict is known, while the vocabulary, a large one, waits to be read."""
    rehearsals = GrammarChecker(smollm2)
    executable, start = tmp_path / "late", tmp_path / "start"
    executable.write_text(f'#!/bin/sh\nuntil [ -e {start} ]; do sleep 0.1; done\nexec {sys.executable} "$@"\n')
    executable.chmod(0o755)
    monkeypatch.setattr(checker_module.sys, "executable", str(executable))
    known = Grammar(kind="regex", text="a|d")
    with ThreadPoolExecutor(2) as threads:
        try:
            waiting = [threads.submit(rehearsals.check, grammar) for grammar in (VALID, known)]
            eventually(lambda: rehearsals._process is not None, within=20, what="a start", every=0.01)
            asked = threading.Thread(target=rehearsals.is_accepted, args=(known,))
            asked.start()
            asked.join(HANG_SECONDS)
            assert not asked.is_alive()
            assert not any(each.done() for each in waiting)
        finally:
            start.touch()
        for each in waiting:
            each.result()
    rehearsals.close()


def test_a_rehearsal_that_is_late_on_a_busy_machine_says_nothing_of_its_grammar(
    rehearsals: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = rehearsals._running()
    process._send_vocabulary()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:  # its fork waits for a grammar
        socket.send_fds(process._control, [b"g"], [theirs.fileno()])
        (fork,) = eventually(lambda: forks_of(pid_of(rehearsals)), within=20, what="a rehearsal", every=0.01)
        os.kill(fork, signal.SIGALRM)
        late = msgspec.msgpack.decode(ours.recv(MOST_MESSAGE_BYTES), type=Verdict)
    other = Grammar(kind="regex", text="a|c")
    with monkeypatch.context() as patch:
        patch.setattr(process, "rehearse", lambda _: late)
        with pytest.raises(CheckerUnavailable, match="the machine is busy"):
            rehearsals.check(other)
    rehearsals.check(other)


def test_a_name_that_is_no_text_is_shown_in_the_message(rehearsals: GrammarChecker) -> None:
    schema = {"type": "object", "properties": {"\ud800": {"type": "array", "uniqueItems": True}}}
    with pytest.raises(RequestError, match=r"properties\.\\ud800\.uniqueItems"):
        rehearsals.check(Grammar(kind="json_schema", text=json.dumps(schema)))


def test_a_process_that_does_not_answer_is_replaced(
    rehearsals: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsals.check(VALID)
    stopped = pid_of(rehearsals)
    os.kill(stopped, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(checker_module, "_ANSWER_SECONDS", 0.1)
        with pytest.raises(CheckerUnavailable, match="does not answer"):
            rehearsals.check(Grammar(kind="regex", text="a|c"))
    rehearsals.check(Grammar(kind="regex", text="a|c"))
    assert pid_of(rehearsals) != stopped


def test_the_process_and_its_rehearsals_end_with_their_owner() -> None:
    rehearsals = GrammarChecker(TOKENIZER)
    rehearsals.check(VALID)
    pid = pid_of(rehearsals)
    thread = threading.Thread(target=lambda: _swallow(rehearsals, HUGE))
    thread.start()
    forks = eventually(lambda: forks_of(pid), within=20, what="a rehearsal", every=0.01)
    rehearsals.close()
    processes = [Path(f"/proc/{each}") for each in (pid, *forks)]
    eventually(lambda: not any(each.exists() for each in processes), within=20, what="all ended")
    thread.join()
    rehearsals.close()


def _swallow(rehearsals: GrammarChecker, grammar: Grammar) -> None:
    with pytest.raises((RequestError, CheckerUnavailable)):
        rehearsals.check(grammar)


def test_the_process_inherits_no_socket_of_the_server(rehearsals: GrammarChecker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        rehearsals.check(VALID)
        inode = os.fstat(listener.fileno()).st_ino
        opened = []
        for each in Path(f"/proc/{pid_of(rehearsals)}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since: it ends the last rehearsal
                opened.append(os.readlink(each))
        assert opened
        assert f"socket:[{inode}]" not in opened


def test_what_passes_on_a_small_stack_is_compiled_and_followed_on_a_large_one(rehearsals: GrammarChecker) -> None:
    deep = rules(1000)
    rehearsals.check(deep)
    # Three times as deep still leaves the engine room; a usual stack would overflow.
    factory = CompiledGrammars(lambda: TOKENIZER, TOKENIZER.vocab_size, [END])
    for grammar in (deep, rules(3500)):
        constraint = factory(grammar)
        masks = np.zeros(-(-TOKENIZER.vocab_size // 32), np.uint32)
        for token in (*TOKENIZER.encode("a", add_special_tokens=False), END):
            factory.fill_masks([constraint], masks.data)
            assert masks[token // 32] >> token % 32 & 1
            constraint.accept(token)
        assert constraint.end == "stop"


def test_a_rehearsal_is_limited_in_time_memory_and_stack() -> None:
    program = (
        "import resource; from fastgen.text.grammars.rehearsal import limit_process; limit_process(); "
        "print(*(resource.getrlimit(getattr(resource, f'RLIMIT_{name}'))[0] for name in 'CPU AS STACK CORE'.split()))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    seconds, size, stack, core = map(int, shown.split())
    assert (seconds, stack, core) == (2, 4 << 20, 0)
    assert 64 << 20 < size < 4 << 30

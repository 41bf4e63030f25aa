"""Compile a grammar and follow it for a while, in a process that it may crash.

The engine process would take the same steps with the same library. A grammar on which the library crashes, runs out of
memory or time, or reaches a dead end, is found here instead. Dead ends that can be read off the rules are named.
"""

from __future__ import annotations

import os
import random
import re
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import llguidance

from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars.compiler import NO_MATCH, InvalidGrammar, compile_grammar, summary
from fastgen.text.grammars.empty_rules import empty_part
from fastgen.text.grammars.large_stacks import REHEARSAL_STACK_BYTES
from fastgen.text.grammars.limits import (
    MOST_REHEARSAL_BYTES,
    MOST_REHEARSAL_CPU_SECONDS,
    MOST_REHEARSED_MASK_SECONDS,
    rehearsal_limits,
)

# Lengths of random matches to follow: short ones see more beginnings. After these steps, the rehearsal ends once it has
# taken this much processor time.
_WALKS = (6,) * 6 + (96,) * 10
_LEAST_STEPS = 100
_WALKING_SECONDS = 0.015
# Least tokens of a random match that could continue: empty matches would hide what follows rare beginnings.
_SHORTEST_WALK = 4
_SOME_BIT = re.compile(rb"[^\0]")


def limit_process() -> None:
    """Limit this process to what one grammar may take, and let it open no more files.

    Beyond that it is killed, or allocating memory fails.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_REHEARSAL_CPU_SECONDS, MOST_REHEARSAL_CPU_SECONDS + 1))
    _limit(resource.RLIMIT_STACK, REHEARSAL_STACK_BYTES)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _limit(resource.RLIMIT_AS, pages * os.sysconf("SC_PAGE_SIZE") + MOST_REHEARSAL_BYTES)
    with suppress(OSError):  # if memory runs out nevertheless, this process ends first
        Path("/proc/self/oom_score_adj").write_text("1000")
    # The library reads its own debugging symbols when it fails, and waits for a lock for ever if memory runs out then.
    _limit(resource.RLIMIT_NOFILE, 0)


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def rehearse(grammar: Grammar, tables: llguidance.LLTokenizer, end_token: int) -> None:
    """Compile a grammar and follow random matches of it.

    Args:
        grammar: the grammar.
        tables: the vocabulary.
        end_token: the vocabulary's only end token, which is its last token.

    Raises:
        InvalidGrammar: if the grammar is invalid or too complex, or reaches a dead end.
    """
    matcher = compile_grammar(grammar, tables, rehearsal_limits())
    if grammar.kind == "lark" and (fault := empty_part(grammar.text, lambda text: _is_empty(text, tables))):
        raise InvalidGrammar(grammar, fault)
    source = random.Random(0)
    until, num_steps = time.process_time() + _WALKING_SECONDS, 0
    for number, most in enumerate(_WALKS):
        walk = matcher.deep_copy()
        for length in range(most):
            if num_steps > _LEAST_STEPS and time.process_time() > until:
                return
            num_steps += 1
            may_end = length >= _SHORTEST_WALK
            fault, ends = _step(walk, end_token, _CHOICES[number % len(_CHOICES)], source, may_end=may_end)
            if fault:
                raise InvalidGrammar(grammar, fault)
            if ends:
                break


def _is_empty(terminals: str, tables: llguidance.LLTokenizer) -> bool:
    try:
        compile_grammar(Grammar(kind="lark", text=terminals), tables, rehearsal_limits())
    except InvalidGrammar as error:
        return error.fault == NO_MATCH
    return False


# Chooses one of the tokens of a mask, which is not empty.
_Choice = Callable[[bytes, random.Random], int]


def _step(
    matcher: llguidance.LLMatcher, end_token: int, choose: _Choice, source: random.Random, *, may_end: bool
) -> tuple[str, bool]:
    """Generate one token; return what is wrong, if anything, and whether the match ends."""
    began = time.process_time()
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        return f"a generation could not be continued: {summary(matcher.get_error())}; simplify it", True
    if time.process_time() - began > MOST_REHEARSED_MASK_SECONDS:
        return "finding the tokens that may follow takes too long; simplify it", True
    if not any(mask):
        return "a generation could not be continued after some of its beginnings; simplify it", True
    token = choose(mask if may_end else _without(mask, end_token), source)
    if token == end_token:
        return "", True
    if not matcher.consume_token(token):
        return f"a generation could not be continued: {summary(matcher.get_error())}; simplify it", True
    return "", False


def _without(mask: bytes, token: int) -> bytes:
    """Return the mask without a token, unless it is the only one."""
    place, bit = divmod(token, 8)
    rest = mask[:place] + bytes([mask[place] & ~(1 << bit)]) + mask[place + 1 :]
    return rest if any(rest) else mask


def _any_token(mask: bytes, source: random.Random) -> int:
    """Choose around a random place in the mask."""
    start = source.randrange(len(mask))
    found = _SOME_BIT.search(mask, start) or _SOME_BIT.search(mask)
    assert found is not None
    place = found.start()
    return place * 8 + source.choice([bit for bit in range(8) if mask[place] >> bit & 1])


def _first_token(mask: bytes, source: random.Random) -> int:
    """Choose among the first tokens, which are short ones in most vocabularies: they end parts soon."""
    found = _SOME_BIT.search(mask, source.randrange(64))
    if found is None:
        return _any_token(mask, source)
    place = found.start()
    return place * 8 + source.choice([bit for bit in range(8) if mask[place] >> bit & 1])


_CHOICES: Sequence[_Choice] = (_first_token, _any_token)

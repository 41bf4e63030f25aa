"""Try random grammars as requests would bring them: rehearse, compile and follow them as server and engine do.

`PYTHONPATH=tests .venv/bin/python -m engine.text.fuzzing --seconds 3600` runs for an hour and prints what happened.
Each fault is printed with the seed that repeats it: `--seed SEED --seconds 0`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from engine.text.following import DeadEnd, TooComplex, byte_tables, follow
from engine.text.matching import byte_tokenizer
from engine.text.random_grammars import RandomGrammars
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars.checker import CheckerUnavailable, GrammarChecker
from fastgen.text.grammars.compiler import compile_grammar
from fastgen.text.grammars.large_stacks import large_stack_threads
from fastgen.text.grammars.limits import limits

_MATCHES = 4
# Processor time of one grammar: limits end its rehearsal and its matches before. Elapsed time says little on a busy
# machine, and what hangs without processor time makes its rehearsal unavailable, or the fuzzer hang.
_HANG_SECONDS = 20.0


@dataclass
class Outcomes:
    """What happened: counts by outcome, and the faults with their seeds."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, seed: int, outcome: str, fault: str = "") -> None:
        """Count an outcome; a fault is something that must never happen."""
        self.counts[outcome] += 1
        if fault:
            self.faults.append(f"seed {seed}: {outcome}: {fault}"[:600])


class Fuzzer:
    """Tries grammars over a vocabulary of bytes."""

    def __init__(self) -> None:
        self._rehearsals = GrammarChecker(byte_tokenizer(None))
        self._threads = large_stack_threads(1, "fuzzing")
        self.outcomes = Outcomes()

    def try_seed(self, seed: int) -> None:
        """Try the grammar of a seed."""
        grammar = RandomGrammars(seed).grammar()
        began = self._cpu_seconds()
        try:
            self._rehearsals.check(grammar)
        except RequestError as error:
            is_killed = any(text in str(error) for text in ("MiB", "nested too deeply;", "processor time", "too long"))
            self.outcomes.add(seed, f"{grammar.kind} refused{' by a limit' if is_killed else ''}")
            if "cannot be checked" in str(error):
                self.outcomes.add(seed, "defect", grammar.text)
        except CheckerUnavailable as error:
            self.outcomes.add(seed, "unavailable", str(error))
        else:
            self._threads.submit(self._follow, seed, grammar).result()
        if self._cpu_seconds() - began > _HANG_SECONDS:
            self.outcomes.add(seed, "hang", grammar.text)

    def _follow(self, seed: int, grammar: Grammar) -> None:
        """Do what the engine does: after a rehearsal nothing may fail."""
        self.outcomes.add(seed, f"{grammar.kind} accepted")
        try:
            matcher = compile_grammar(grammar, byte_tables(), limits())
            for number in range(_MATCHES):
                match = follow(matcher, random.Random(number))
                self.outcomes.add(seed, f"match{'' if match.is_complete else ' without an end so far'}")
                if match.is_complete and grammar.kind == "json_schema":
                    self._validate(seed, grammar, match.text)
        except RequestError as error:
            self.outcomes.add(seed, "not compiled after its rehearsal", f"{error} {grammar.text}")
        except TooComplex:
            self.outcomes.add(seed, "match that ends with grammar_too_complex")
        except DeadEnd as error:
            self.outcomes.add(seed, "dead end", f"{error} {grammar.text}")

    def _validate(self, seed: int, grammar: Grammar, text: bytes) -> None:
        try:
            jsonschema.Draft202012Validator(_without_draft_4(json.loads(grammar.text))).validate(json.loads(text))
            self.outcomes.add(seed, "valid")
        except jsonschema.ValidationError as error:
            if re.search(r'"multipleOf": \S*[.e]', grammar.text):
                return  # the validator divides floats
            self.outcomes.add(seed, "invalid", f"{text!r} {error.message[:100]} {grammar.text}")
        except Exception:
            self.outcomes.add(seed, "beyond the validator")  # which fails on parts that say nothing

    def _cpu_seconds(self) -> float:
        """Return the processor time of this process and of the rehearsals that have ended."""
        if self._rehearsals._process is None:
            return time.process_time()
        pid = self._rehearsals._process._process.pid
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return time.process_time() + sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")  # cutime and cstime

    def close(self) -> None:
        """End the process that rehearses."""
        self._rehearsals.close()


def _without_draft_4(schema: Any) -> Any:
    """Replace the booleans that draft 4 has beside the bounds of numbers."""
    if isinstance(schema, list):
        return [_without_draft_4(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _without_draft_4(part) for name, part in schema.items()}
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if isinstance(found.get(exclusive), bool) and found.pop(exclusive) and inclusive in found:
            found[exclusive] = found.pop(inclusive)
    return found


def main() -> None:
    """Run the fuzzer for a time, and print the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    fuzzer, began, seed, shown = Fuzzer(), time.monotonic(), arguments.seed, 0
    while seed == arguments.seed or time.monotonic() - began < arguments.seconds:
        fuzzer.try_seed(seed)
        seed += 1
        for fault in fuzzer.outcomes.faults[shown:]:
            print(fault, flush=True)
        shown = len(fuzzer.outcomes.faults)
    fuzzer.close()
    taken = time.monotonic() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"{seed - arguments.seed} grammars in {taken:.0f} s, {shown} faults, {memory} MiB")
    for outcome, count in sorted(fuzzer.outcomes.counts.items()):
        print(f"{count:8} {outcome}")


if __name__ == "__main__":
    main()

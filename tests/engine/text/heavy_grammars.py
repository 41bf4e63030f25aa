"""Follow grammars that take much memory, beside a plain one, and print what came of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from engine.text.matching import END, byte_tokenizer
from fastgen.core.request import FinishReason
from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars import compiled as compiled_module
from fastgen.text.grammars.compiled import CompiledGrammars


def main(mebibytes: int, count: int) -> None:
    """Begin `count` generations of about 11 MiB each, of which all are kept, with `mebibytes` for them together."""
    compiled_module.MOST_BYTES = mebibytes << 20
    tokenizer = byte_tokenizer(None)
    factory = CompiledGrammars(lambda: tokenizer, tokenizer.vocab_size, [END], num_threads=2)
    plain, num_tokens = factory(Grammar(kind="regex", text="a+")), 0
    masks = np.zeros((2, -(-tokenizer.vocab_size // 32)), np.uint32)
    heavy, most, before = [], 0, _resident()
    for number in range(count):
        # The text that must follow is looked for at once, and each of its bytes is a state.
        heavy.append(factory(Grammar(kind="regex", text=f"(b){{24000}}{number}")))
        most = max(most, _resident())
        while 0 in factory.fill_masks([plain, heavy[-1]], masks.reshape(-1).data):
            most = max(most, _resident())
        plain.accept(*tokenizer.encode("a", add_special_tokens=False))
        num_tokens += plain.end is None
        most = max(most, _resident())
    ends = [constraint.end for constraint in heavy]
    result = {
        "growth": (most - before) / (1 << 20),
        "plain": {"end": plain.end, "tokens": num_tokens},
        "unfinished": ends.count(None),
        "too complex": ends.count(FinishReason.GRAMMAR),
    }
    print(json.dumps(result))


def _resident() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

"""Time to compute the grammar masks of a step: `python -m benchmarks.grammars MODEL`.

Sequences generate random JSON objects of one schema, each at another place of it. The masks of every step are computed
one by one and, over copies of the same states, with several threads. The table has the median step of each, and the
median of the ratios of the same step. The whole step is measured as elapsed time, so run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

import numpy as np

from fastgen.core.sampling_params import Grammar
from fastgen.kernels.cpu import environment
from fastgen.model.source import ModelSource
from fastgen.text.grammars.compiled import CompiledGrammars
from fastgen.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 6},
        "score": {"type": "number", "minimum": 0, "maximum": 1},
        "kind": {"enum": ["person", "place", "thing"]},
    },
    "required": ["name", "tags", "score", "kind"],
    "additionalProperties": False,
}


def measure(factory: CompiledGrammars, words: int, sequences: int, steps: int) -> list[tuple[float, float]]:
    """Return for each step the milliseconds of its masks, one by one and at once."""
    grammar, source = Grammar(kind="json_schema", text=json.dumps(SCHEMA)), random.Random(0)
    pairs = [(factory(grammar), factory(grammar)) for _ in range(sequences)]
    together = np.zeros((sequences, words), np.uint32)
    apart = np.zeros((sequences, words), np.uint32)
    taken = []
    for _ in range(steps):
        began = time.perf_counter()
        for (constraint, _), mask in zip(pairs, apart, strict=True):
            constraint.fill_mask(mask.data)
        middle = time.perf_counter()
        factory.fill_masks([copy for _, copy in pairs], together.reshape(-1).data)
        end = time.perf_counter()
        assert np.array_equal(apart, together)
        taken.append(((middle - began) * 1000, (end - middle) * 1000))
        for index, mask in enumerate(apart):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(allowed[source.randrange(len(allowed))])
            for constraint in pairs[index]:
                constraint.accept(token)
            if pairs[index][0].end is not None:
                pairs[index] = (factory(grammar), factory(grammar))
    return taken


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file or a Hugging Face directory")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, default=environment.usable_cpus())
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    source = ModelSource.open(given.model)
    tokenizer, shape = Tokenizer.load(source.tokenizer), source.architecture
    factory = CompiledGrammars(lambda: tokenizer, shape.vocab_size, shape.eos_token_ids, num_threads=given.threads)
    print(
        f"vocabulary {shape.vocab_size}, {given.threads} threads\nsequences  one by one   at once  ratio  (ms, median)"
    )
    for sequences in given.sequences:
        taken = measure(factory, -(-shape.vocab_size // 32), sequences, given.steps)
        apart, together = (statistics.median(column) for column in zip(*taken, strict=True))
        ratio = statistics.median(after / before for before, after in taken)
        print(f"{sequences:9}{apart:12.3f}{together:10.3f}{ratio:7.2f}")


if __name__ == "__main__":
    main()

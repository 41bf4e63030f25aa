"""Time that rank 0 takes to send a step to the other ranks: `python benchmarks/rank_steps.py [--ranks 4]`.

It packs the step's arrays and writes them to the ring in shared memory, from which a process for each other rank reads
them (decision 064). The figures are the processor time of rank 0 for each step, the minimum over all rounds, which
other programs on the machine hardly change.
"""

from __future__ import annotations

import argparse
import os
import time

import numpy as np

from fastgen.model.step_input import StepInput
from fastgen.runner.ranks.messages import pack
from fastgen.runner.ranks.ring import Ring, RingFiles

ROUNDS, STEPS = 100, 50
_NONE = np.zeros(0, np.int32)


def step_of(decodes: int, prompt_tokens: int) -> StepInput:
    """Return a step with decodes, each of which gets a new block, and a chunk of one prompt."""
    sequences, tokens = decodes + (prompt_tokens > 0), decodes + prompt_tokens
    lengths = [1] * decodes + [prompt_tokens] * (prompt_tokens > 0)
    return StepInput(
        swap_out=np.zeros((0, 2), np.int32),
        swap_in=np.zeros((0, 2), np.int32),
        new_rows=(),
        table_updates=np.zeros((3, sequences), np.int32),
        rows=np.arange(sequences, dtype=np.int32),
        query_starts=np.cumsum([0, *lengths], dtype=np.int32),
        seq_lens=np.full(sequences, 1000, np.int32),
        token_ids=np.full(tokens, -1, np.int32),
        slot_mapping=np.arange(tokens, dtype=np.int32),
        sampled=np.arange(sequences, dtype=np.int32),
        masked=_NONE,
        scored_tokens=_NONE,
        scored_targets=_NONE,
        scored_top=_NONE,
        pooled=_NONE,
        pooled_starts=np.zeros(1, np.int32),
        pooled_tokens=_NONE,
        window_updates=np.zeros((3, 0), np.int32),
        window_slots=_NONE,
        state_slots=_NONE,
        state_sources=_NONE,
        state_saves=np.zeros((0, 3), np.int32),
        num_decodes=decodes,
    )


STEPS_BY_NAME = {
    "1 decode": step_of(1, 0),
    "256 decodes": step_of(256, 0),
    "256 decodes, 2,048 prompt tokens": step_of(256, 2048),
    "131,072 prompt tokens": step_of(0, 131072),
}


def read_all(files: RingFiles, reader: int) -> None:
    """Read messages until an empty one."""
    ring = Ring(files)
    while len(ring.receive(reader)):
        pass


def seconds_per_step(ring: Ring, step: StepInput) -> float:
    """Return the least processor time of a step, over rounds in which the readers keep up."""
    steps = min(STEPS, max(1, (1 << 19) // len(pack(step))))
    least = float("inf")
    for _ in range(ROUNDS):
        while (ring._read < ring._written).any():  # the ring is empty at the start of each round
            time.sleep(0.001)
        started = time.thread_time()
        for _ in range(steps):
            ring.publish(pack(step), lambda: None)
        least = min(least, (time.thread_time() - started) / steps)
    return least


def main() -> None:
    """Print a line for each step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    ranks = parser.parse_args().ranks
    files = RingFiles.create(ranks - 1)
    readers = []
    for reader in range(ranks - 1):
        if not (pid := os.fork()):
            read_all(files, reader)
            os._exit(0)
        readers.append(pid)
    ring = Ring(files)
    print(f"{ranks} ranks; processor time of rank 0")
    for name, step in STEPS_BY_NAME.items():
        size = 4 * len(pack(step))
        print(f"{name:>34}  {seconds_per_step(ring, step) * 1e6:7.1f} µs  {size / 1024:7.1f} KiB")
    ring.publish(_NONE, lambda: None)
    for pid in readers:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()

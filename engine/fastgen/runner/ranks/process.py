"""The process of a rank other than the first: `python -m fastgen.runner.ranks.process`.

`RankProcesses` starts it, with an `Assignment` as JSON on standard input.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time

import msgspec

from fastgen import exit_codes, logs
from fastgen.kernels.cpu import environment
from fastgen.runner.failures import GroupBroken, describe
from fastgen.runner.ranks.processes import LEFT_ALONE, Assignment
from fastgen.runner.ranks.ring import Ring, RingFiles

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_BEAT_SECONDS = 0.25

log = logging.getLogger("fastgen.model")


def follow(assignment: Assignment, ring: Ring) -> None:
    """Load this rank's part of the model, and run rank 0's steps until it ends."""
    environment.prepare()
    from fastgen.model.source import ModelSource
    from fastgen.runner.ranks.joining import join_group
    from fastgen.runner.ranks.loading import load_follower

    config = assignment.config
    _beat(ring, assignment.rank)
    group = join_group(assignment.store, assignment.rank, config)
    load_follower(ModelSource.open(config.model), config, group, ring).follow()


def _beat(ring: Ring, rank: int) -> None:
    """Show from now on that this process runs."""

    def beat() -> None:
        while True:
            ring.beats[rank - 1] += 1
            time.sleep(_BEAT_SECONDS)

    threading.Thread(target=beat, name="beat", daemon=True).start()
    while not ring.beats[rank - 1]:
        time.sleep(0.001)


def main() -> int:
    """Run the process and return its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    assignment = msgspec.json.decode(sys.stdin.buffer.read(), type=Assignment)
    if os.getppid() != assignment.parent:  # it ended before the kernel was asked
        return LEFT_ALONE
    logs.configure(assignment.log_format)
    logging.getLogger().setLevel(logging.WARNING)  # rank 0 logs what they have in common
    try:
        follow(assignment, Ring(RingFiles(assignment.memory, assignment.wakes)))
    except GroupBroken:
        return LEFT_ALONE
    except Exception as error:
        failed = describe(error)
        if failed.exit_code == exit_codes.FAILED:
            log.exception("rank %d failed", assignment.rank)
        assignment.failure.write_bytes(msgspec.json.encode(failed))
        return failed.exit_code
    return 0


if __name__ == "__main__":
    # Without the interpreter's end: it would wait for threads.
    code = main()
    logging.shutdown()
    os._exit(code)

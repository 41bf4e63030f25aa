"""The process of a rank, one of which fails in a given step: `FAULT=error:7:2` or `FAULT=memory:7:2` for rank 2."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

from fastgen.kernels.cpu import environment


def main() -> int:
    """Run the process and return its exit code."""
    environment.prepare()
    import torch

    from fastgen.runner.ranks.process import main as run
    from fastgen.runner.ranks.runners import FollowingRunner

    kind, number, rank = os.environ["FAULT"].split(":")
    launch, steps = FollowingRunner.launch, itertools.count()

    def faulty(self: FollowingRunner, step: Any) -> Any:
        if self._group.rank == int(rank) and next(steps) == int(number):
            if kind == "memory":
                torch.empty(1 << 60)
            raise KeyError("a mistake")
        return launch(self, step)

    FollowingRunner.launch = faulty  # type: ignore[method-assign, assignment]
    return run()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)

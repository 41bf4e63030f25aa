"""Collectives of ranks on CPUs, over gloo; the group on GPUs derives from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

from fastgen.model.device_errors import is_device_error
from fastgen.runner.failures import GroupBroken

_Gloo: Any = distributed.ProcessGroupGloo  # torch's stub has few of its methods
# Long enough for the slowest rank to start and load. `RankProcesses` detects ranks that end or hang.
_TIMEOUT = timedelta(hours=1)


class GlooGroup:
    """The ranks of one pod, connected over the loopback address; see `RankGroup`.

    It is no global of torch, so that a process can have several.

    Attributes:
        rank: number of this rank.
        size: number of ranks.

    Args:
        store: path of a file that does not exist, by which the ranks find each other.
        rank: number of this rank.
        size: number of ranks.

    Raises:
        GroupBroken: if another rank ends meanwhile, or does not join.
    """

    def __init__(self, store: Path, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        options = _Gloo._Options()
        options._devices = [_Gloo.create_device(hostname="127.0.0.1")]
        options._timeout = _TIMEOUT
        file = distributed.FileStore(str(store), size)  # type: ignore[attr-defined]  # torch does not declare it public
        file.set_timeout(_TIMEOUT)
        with breaking():
            self._hosts = _Gloo(file, rank, size, options)
        self._store = file
        self._ranks: Any = self._hosts

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' tensors, computed in place."""
        if x.numel():
            _run(self._ranks.allreduce, [x], c10d.AllreduceOptions())
        return x

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Concatenate the columns of all ranks' matrices on rank 0."""
        # All tensors must have one size.
        lacking = max(widths) - x.shape[1]
        padded = torch.nn.functional.pad(x, (0, lacking)) if lacking else x.contiguous()
        found = [[torch.empty_like(padded) for _ in widths]] if self.rank == 0 else []
        options = c10d.GatherOptions()
        options.rootRank = 0
        _run(self._ranks.gather, found, [padded], options)
        if self.rank:
            return x[:, :0]
        return torch.cat([part[:, :width] for part, width in zip(found[0], widths, strict=True)], 1)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor, written to `x` on all other ranks."""
        if x.numel():
            options = c10d.BroadcastOptions()
            options.rootRank = options.rootTensor = 0
            _run(self._ranks.broadcast, [x], options)
        return x

    def agree(self, value: int) -> int:
        """Return the least value of all ranks."""
        options: Any = c10d.AllreduceOptions()
        options.reduceOp = c10d.ReduceOp.MIN
        found = torch.tensor([value])
        _run(self._hosts.allreduce, [found], options)
        return int(found)

    def abort(self) -> None:
        """Do nothing: a rank that waits for an ended one finds its connection closed."""


def _run(operation: Any, *arguments: Any) -> None:
    """Run an operation of a process group, whose last argument are its options.

    On CPUs its result is there on return. On GPUs it is enqueued on the current stream, so that graphs can contain it.
    """
    arguments[-1].asyncOp = False
    with breaking():
        work = operation(*arguments)
        if work is not None:
            work.wait()


@contextmanager
def breaking() -> Iterator[None]:
    """Return a context for operations of a process group.

    Raises:
        GroupBroken: if a connection to another rank is closed. Errors of this rank's own device stay as they are.
    """
    try:
        yield
    except RuntimeError as error:
        if is_device_error(error):
            raise
        raise GroupBroken(str(error)) from None

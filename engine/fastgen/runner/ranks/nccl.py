"""The group of ranks on the GPUs of one pod, over NCCL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from fastgen.runner.ranks.gloo import GlooGroup, breaking

_SETTINGS = {
    # `RankProcesses` finds and names the rank that failed. torch's threads would end this process first.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # The ranks find each other over the loopback address: no port is open to other pods.
    "NCCL_SOCKET_IFNAME": "=lo",
}


class NCCLGroup(GlooGroup):
    """The ranks of one pod, each with a GPU; see `RankGroup`.

    Operations on tensors are enqueued on the current stream, also while a graph is captured, and the host does not
    wait. What ranks agree on goes over gloo.

    Args:
        store: as for `GlooGroup`.
        rank: number of this rank.
        size: number of ranks.
        device: the GPU of this rank.

    Raises:
        GroupBroken: if another rank ends meanwhile, or does not join.
    """

    def __init__(self, store: Path, rank: int, size: int, device: torch.device) -> None:
        super().__init__(store, rank, size)
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        nccl: Any = distributed.ProcessGroupNCCL
        with breaking():
            self._ranks = nccl(distributed.PrefixStore("nccl", self._store), rank, size, nccl.Options())  # type: ignore[attr-defined]
            # Otherwise the first operation would connect, which no graph may contain.
            self._ranks.eager_connect_single_device(device)

    def abort(self) -> None:
        """End the operations that wait for a rank that has ended, on the GPU."""
        self._ranks.abort()

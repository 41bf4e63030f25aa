"""The group over NCCL, with a stand-in for torch's process group: what it is asked for, and how its errors are told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from fastgen.runner.failures import GroupBroken
from fastgen.runner.ranks import nccl
from fastgen.runner.ranks.nccl import NCCLGroup

GPU = torch.device("cuda", 0)
PEER = "NCCL error in: ProcessGroupNCCL.cpp, remote process exited or there was a network error, NCCL version 2.29.7"
OWN = "NCCL error in: ProcessGroupNCCL.cpp, unhandled cuda error, ncclUnhandledCudaError: Call to CUDA function failed."


class Stub:
    """Stands in for torch's `ProcessGroupNCCL`: records its calls, or fails."""

    Options = object

    def __init__(self, _store: Any, rank: int, size: int, _options: Any) -> None:
        self.calls: list[Any] = [(rank, size)]
        self.error: Exception | None = None

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.calls.append(device)

    def abort(self) -> None:
        self.calls.append("abort")

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> None:
        self._run("allreduce", options)
        tensors[0].mul_(2)

    def broadcast(self, _tensors: list[torch.Tensor], options: Any) -> None:
        self._run("broadcast", options)

    def gather(self, found: list[list[torch.Tensor]], parts: list[torch.Tensor], options: Any) -> None:
        self._run("gather", options)
        for number, part in enumerate(found[0]):
            part.copy_(parts[0] + number)

    def _run(self, name: str, options: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append((name, options.asyncOp))


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NCCLGroup:
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", Stub)
    for name in nccl._SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    return NCCLGroup(tmp_path / "store", 0, 1, GPU)


def test_operations_run_on_the_current_stream_which_graphs_capture(group: NCCLGroup) -> None:
    stub: Any = group._ranks
    assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]
    assert group.broadcast(torch.ones(1)).tolist() == [1]
    assert group.gather(torch.zeros(1, 2), [2, 1]).tolist() == [[0, 0, 1]]
    assert stub.calls == [(0, 1), GPU, ("allreduce", False), ("broadcast", False), ("gather", False)]


def test_what_ranks_agree_on_and_empty_tensors_do_not_reach_the_gpu(group: NCCLGroup) -> None:
    stub: Any = group._ranks
    stub.error = AssertionError("it is asked")
    assert group.agree(7) == 7
    assert group.all_reduce(torch.empty(0)).numel() == group.broadcast(torch.empty(0)).numel() == 0


def test_errors_of_another_rank_are_told_from_those_of_this_one(group: NCCLGroup) -> None:
    stub: Any = group._ranks
    stub.error = distributed.DistBackendError(PEER)
    with pytest.raises(GroupBroken, match="remote process exited"):
        group.all_reduce(torch.ones(1))
    for text in (OWN, "CUDA error: an illegal memory access was encountered", "CUDA out of memory"):
        stub.error = distributed.DistBackendError(text)
        with pytest.raises(distributed.DistBackendError):
            group.all_reduce(torch.ones(1))
    group.abort()
    assert stub.calls[-1] == "abort"


@pytest.mark.usefixtures("group")
def test_torchs_threads_do_not_end_the_process_and_settings_of_the_user_stay() -> None:
    found = {name: os.environ[name] for name in nccl._SETTINGS}
    assert found == {**nccl._SETTINGS, "NCCL_SOCKET_IFNAME": "eth0"}

"""Connects a rank with the others."""

from __future__ import annotations

from pathlib import Path

from fastgen.runner.ranks import gloo
from fastgen.settings import EngineConfig


def join_group(store: Path, rank: int, config: EngineConfig) -> gloo.GlooGroup:
    """Return the group of all ranks, over the GPUs' connections or the host's; arguments as for `GlooGroup`.

    Raises:
        ConfigError: if the GPU of this rank is not available.
        GroupBroken: if another rank ends meanwhile, or does not join.
    """
    if config.device == "cpu":
        return gloo.GlooGroup(store, rank, config.tensor_parallel)
    from fastgen.runner.device import choose_device
    from fastgen.runner.ranks.nccl import NCCLGroup

    return NCCLGroup(store, rank, config.tensor_parallel, choose_device(config, rank))

"""Loads a model that is divided among ranks."""

from __future__ import annotations

import weakref
from functools import partial
from typing import TYPE_CHECKING

from fastgen.kernels.cpu import environment
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.forward_input import ForwardInput
from fastgen.model.layers.rank_group import RankGroup
from fastgen.model.partition import check_divisible
from fastgen.model.source import ModelSource
from fastgen.runner.loader import ReportProgress, has_gpu_operators, load_gpu_runner, load_host_runner
from fastgen.runner.ranks.processes import RankProcesses
from fastgen.runner.ranks.ring import Ring
from fastgen.runner.ranks.runners import FollowingRunner, RankedRunner, RankWatch
from fastgen.runner.runner import Model
from fastgen.settings import ConfigError, EngineConfig

if TYPE_CHECKING:
    from fastgen.runner.ranks.gpu_runners import FollowingGPURunner, RankedGPURunner


def load_ranks(source: ModelSource, config: EngineConfig, progress: ReportProgress) -> RankedRunner | RankedGPURunner:
    """Start the processes of the other ranks, load the model with them, and return the runner of rank 0.

    The processes end with the runner.

    Raises:
        ConfigError, ModelError: as `load_runner`, and if the model cannot be divided among so many ranks.
        RankFailed: if a process fails.
    """
    if source.native is None:
        raise ConfigError(
            f"--tensor-parallel {config.tensor_parallel}: not available for models run by transformers: remove it"
        )
    progress("starting", 0.0)
    check_divisible(source.architecture, config.tensor_parallel)
    if config.device == "cuda" and not has_gpu_operators(source.architecture):
        raise ConfigError(
            f"--tensor-parallel {config.tensor_parallel}: not available with --device cuda for "
            f"{source.architecture.name} models of this size or kind, which run on torch operations: remove it"
        )
    environment.prepare()
    ranks = RankProcesses(config)

    def checked(stage: str, fraction: float) -> None:
        ranks.check()
        progress(stage, fraction)

    with ranks.loading():
        runner = load_leader(source, config, checked, ranks.join(), ranks.ring, ranks)
    ranks.count_beats()
    weakref.finalize(runner, ranks.end)
    return runner


def load_leader(
    source: ModelSource, config: EngineConfig, progress: ReportProgress, group: RankGroup, ring: Ring, watch: RankWatch
) -> RankedRunner | RankedGPURunner:
    """Load rank 0's part of the model, while the other ranks load theirs."""
    num_parameters = source.architecture.num_parameters
    if config.device == "cuda":
        from fastgen.runner.ranks.gpu_runners import RankedGPURunner

        on_gpu = partial(RankedGPURunner, num_parameters=num_parameters, ring=ring, watch=watch)
        runner = load_gpu_runner(source, config, progress, group, on_gpu)
        assert isinstance(runner, RankedGPURunner)
        return runner

    def make(model: Model[ForwardInput], cache: KVCache, _config: EngineConfig, max_model_length: int) -> RankedRunner:
        return RankedRunner(
            model,
            cache,
            max_model_length=max_model_length,
            num_parameters=num_parameters,
            group=group,
            ring=ring,
            watch=watch,
        )

    return load_host_runner(source, config, progress, group, make)


def load_follower(
    source: ModelSource, config: EngineConfig, group: RankGroup, ring: Ring
) -> FollowingRunner | FollowingGPURunner:
    """Load the part of another rank."""

    def ignore(_stage: str, _fraction: float) -> None:
        """Report no progress: rank 0 does."""

    if config.device == "cuda":
        from fastgen.runner.ranks.gpu_runners import FollowingGPURunner

        runner = load_gpu_runner(source, config, ignore, group, partial(FollowingGPURunner, config=config, ring=ring))
        assert isinstance(runner, FollowingGPURunner)
        return runner

    def make(
        model: Model[ForwardInput], cache: KVCache, _config: EngineConfig, max_model_length: int
    ) -> FollowingRunner:
        return FollowingRunner(model, cache, max_model_length=max_model_length, group=group, ring=ring)

    return load_host_runner(source, config, ignore, group, make)

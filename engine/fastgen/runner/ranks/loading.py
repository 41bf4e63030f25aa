"""Loads a model that is divided among ranks."""

from __future__ import annotations

import weakref

from fastgen.kernels.cpu import environment
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.forward_input import ForwardInput
from fastgen.model.layers.rank_group import RankGroup
from fastgen.model.partition import check_divisible
from fastgen.model.source import ModelSource
from fastgen.runner.loader import ReportProgress, load_host_runner
from fastgen.runner.ranks.processes import RankProcesses
from fastgen.runner.ranks.ring import Ring
from fastgen.runner.ranks.runners import FollowingRunner, RankedRunner, RankWatch
from fastgen.runner.runner import Model
from fastgen.settings import ConfigError, EngineConfig


def load_ranks(source: ModelSource, config: EngineConfig, progress: ReportProgress) -> RankedRunner:
    """Start the processes of the other ranks, load the model with them, and return the runner of rank 0.

    The processes end with the runner.

    Raises:
        ConfigError, ModelError: as `load_host_runner`, and if the model cannot be divided among so many ranks.
        RankFailed: if a process fails.
    """
    if source.native is None:
        raise ConfigError(
            f"--tensor-parallel {config.tensor_parallel}: not available for models run by transformers: remove it"
        )
    progress("starting", 0.0)
    check_divisible(source.architecture, config.tensor_parallel)
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
) -> RankedRunner:
    """Load rank 0's part of the model, while the other ranks load theirs."""

    def make(model: Model[ForwardInput], cache: KVCache, _config: EngineConfig, max_model_length: int) -> RankedRunner:
        return RankedRunner(
            model,
            cache,
            max_model_length=max_model_length,
            num_parameters=source.architecture.num_parameters,
            group=group,
            ring=ring,
            watch=watch,
        )

    return load_host_runner(source, config, progress, group, make)


def load_follower(source: ModelSource, config: EngineConfig, group: RankGroup, ring: Ring) -> FollowingRunner:
    """Load the part of another rank."""

    def make(
        model: Model[ForwardInput], cache: KVCache, _config: EngineConfig, max_model_length: int
    ) -> FollowingRunner:
        return FollowingRunner(model, cache, max_model_length=max_model_length, group=group, ring=ring)

    return load_host_runner(source, config, lambda _stage, _fraction: None, group, make)

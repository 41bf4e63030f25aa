"""Assembles an engine: model, KV cache, calibration, grammars and step model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fastgen.core.step_model import StepModel
from fastgen.engine.calibration import calibrate
from fastgen.engine.core import Engine
from fastgen.kernels.cpu import environment
from fastgen.link.messages import EngineInfo
from fastgen.model.determinism import check_deterministic
from fastgen.model.processor import arithmetic
from fastgen.model.source import ModelSource
from fastgen.model.stored_weights import StoredWeights
from fastgen.model.weight_storage import with_storage
from fastgen.runner import loader
from fastgen.runner.memory_check import check_host_memory
from fastgen.settings import EngineConfig
from fastgen.text.grammars.compiled import CompiledGrammars
from fastgen.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fastgen.runner.gpu_runner import GPURunner
    from fastgen.runner.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is ready for requests.

    Attributes:
        config: the settings, with `auto` replaced by the token budget that calibration found.
        info: the served model and its limits.
    """

    engine: Engine
    runner: ModelRunner | GPURunner
    config: EngineConfig
    info: EngineInfo


def load_on_ranks(
    source: ModelSource, config: EngineConfig, on_progress: Callable[[str, float], None]
) -> ModelRunner | GPURunner:
    """Load the model on one rank, this process, or on several; see `loader.load_runner` and `load_ranks`."""
    check_deterministic(source, config)
    check_host_memory(source, config)
    if config.tensor_parallel == 1:
        return loader.load_runner(source, config, on_progress)
    from fastgen.runner.ranks.loading import load_ranks

    return load_ranks(source, config, on_progress)


def build_engine(
    source: ModelSource,
    config: EngineConfig,
    load_tokenizer: Callable[[], Tokenizer],
    on_progress: Callable[[str, float], None],
) -> LoadedEngine:
    """Load the model, allocate its KV cache, calibrate the token budget and start prefaulting.

    Args:
        source: the model to load.
        config: the settings to serve it with.
        load_tokenizer: called at most once, in a thread, when grammars are prepared or first used. It must not refer to
            the engine: a reference cycle would keep weights and KV cache alive after the engine is dropped.
        on_progress: called with a stage and its completed fraction, 0 to 1.

    Raises:
        ConfigError: if the model or the settings cannot be served on this machine.
    """
    runner = load_on_ranks(source, config, on_progress)
    config, step_times = calibrate(runner, config, on_progress)
    runner.prepare_for(config, partial(on_progress, "capturing graphs"))
    grammars = CompiledGrammars(
        load_tokenizer, runner.vocab_size, runner.eos_token_ids, num_threads=environment.usable_cpus()
    )
    engine = Engine(runner, config, grammars=grammars, step_model=StepModel.of(step_times))
    quantization, stored = with_storage(config, source).quantization, StoredWeights.of(source)
    info = EngineInfo(
        architecture=runner.architecture.name,
        device=runner.device,
        dtype=runner.dtype,
        quantization=quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        tensor_parallel=config.tensor_parallel,
        deterministic=config.deterministic,
        arithmetic=_arithmetic(source, config, runner.dtype, quantization),
        weight_format=stored.format,
        weight_bytes=stored.num_bytes,
        vocabulary_size=runner.vocab_size,
        hidden_size=runner.architecture.hidden_size,
        num_parameters=runner.num_parameters,
        max_model_length=runner.max_model_length,
        token_budget=config.most_tokens,
        max_sequences=config.sequence_limit,
        block_size=runner.block_size,
        num_blocks=runner.num_blocks,
        num_window_blocks=0 if runner.window_group is None else runner.window_group.num_blocks,
    )
    runner.start_prefault()
    return LoadedEngine(engine, runner, config, info)


def _arithmetic(source: ModelSource, config: EngineConfig, dtype: str, quantization: str) -> str:
    """Return what decides the last bits of the logits, besides the formats; see `EngineInfo`."""
    if config.device == "cuda":
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    runs_kernels = source.native is not None and dtype != "float16"
    return arithmetic(dtype, quantization, deterministic=config.deterministic, runs_kernels=runs_kernels)

"""Load a model and its KV cache into a runner.

torch is imported only when a model is loaded, because OpenMP and numba read their environment once, on import.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from subprocess import Popen
from typing import TYPE_CHECKING, Any, TypeVar

from fastgen.kernels.cpu import build, environment
from fastgen.kv_cache.memory import available_memory, trim_heap
from fastgen.kv_cache.sizing import (
    CacheMemory,
    host_cache_memory,
    plan_host_blocks,
    plan_kv_blocks,
    plan_state_slots,
    plan_window_blocks,
    resolve_max_model_length,
    working_memory_bytes,
)
from fastgen.model.layers.rank_group import ONE_RANK, RankGroup
from fastgen.model.processor import choose_cpu_dtype, describe_processor, int8_choice, linear_choice, this_processor
from fastgen.model.source import ModelSource
from fastgen.model.weight_storage import describe_storage, with_storage
from fastgen.runner.memory_check import check_gpu_memory
from fastgen.settings import ConfigError, EngineConfig

if TYPE_CHECKING:
    from fastgen.kv_cache.sizing import KVShape
    from fastgen.kv_cache.tensors import KVCache
    from fastgen.model.config.architecture import ModelArchitecture
    from fastgen.model.device_input import DeviceInput
    from fastgen.model.forward_input import ForwardInput
    from fastgen.model.layers.cpu_backend import CPUBackend
    from fastgen.model.layers.rope import Rope
    from fastgen.runner.gpu_runner import GPURunner
    from fastgen.runner.runner import Model, ModelRunner

log = logging.getLogger("fastgen.model")

ReportProgress = Callable[[str, float], None]
AnyRunner = TypeVar("AnyRunner", bound="ModelRunner | GPURunner")


def load_runner(source: ModelSource, config: EngineConfig, progress: ReportProgress) -> ModelRunner | GPURunner:
    """Load the model and allocate its KV cache.

    `progress` is called with a stage and its completed fraction, 0 to 1.

    Raises:
        ModelError: if the model cannot be served, or its weights cannot be used.
        ConfigError: if the device is not available, or a setting does not suit the model, the device or the memory.
    """
    if source.native is not None:
        check_recurrent_states(source.architecture, config)
    progress("starting", 0.0)
    environment.prepare()
    if source.native is not None and config.device == "cuda" and has_gpu_operators(source.architecture):
        return load_gpu_runner(source, config, progress)
    return load_host_runner(source, config, progress, ONE_RANK, host_runner)


def load_gpu_runner(
    source: ModelSource,
    config: EngineConfig,
    progress: ReportProgress,
    group: RankGroup = ONE_RANK,
    make: Callable[..., GPURunner] | None = None,
) -> GPURunner:
    """Load the model, or a rank's part of it, for a runner that prepares its input on the GPU.

    Call `environment.prepare` before.

    Args:
        make: as in `gpu_runner`. Memory is measured without it, at the same time on all ranks.
    """
    measured = partial(gpu_runner, progress=progress, group=group)
    model = _load_on_gpu(source, config, progress, group)
    return with_cache(model, config, partial(measured, make=make), progress, group, measured)


def load_host_runner(
    source: ModelSource,
    config: EngineConfig,
    progress: ReportProgress,
    group: RankGroup,
    make_runner: Callable[[Any, KVCache, EngineConfig, int], AnyRunner],
) -> AnyRunner:
    """Load the model, or a rank's part of it, for a runner that prepares its input on the host.

    Call `environment.prepare` before.
    """
    if source.native is not None:
        check_attention_chunks(source.architecture, config.block_size)
    config = with_storage(config, source)
    if source.native is not None and config.device == "cpu" and config.dtype != "float16":
        return with_cache(_load_on_cpu(source, config, progress, group), config, make_runner, progress, group)
    return with_cache(_load_on_torch(source, config, progress, group), config, make_runner, progress, group)


def _load_on_cpu(
    source: ModelSource, config: EngineConfig, progress: ReportProgress, group: RankGroup
) -> Model[ForwardInput]:
    """Load a native model for the CPU kernels, which are compiled and imported meanwhile."""
    choice = choose_cpu_dtype(config)
    deterministic = config.deterministic
    log.info("%s; %s", describe_processor(choice.dtype, config.quantization, deterministic=deterministic), choice)
    if source.gguf is not None:
        stored = describe_storage(source.gguf, config.quantization, choice.dtype)
        if stored is not None:
            log.info("%s", stored)
    modules = _modules(choice.dtype, config.quantization)
    compiling = build.start(modules)
    import torch

    torch.set_num_threads(_num_threads(group))
    from fastgen.model.native import load_on_cpu

    with ThreadPoolExecutor(1, "kernels") as pool:
        importing = pool.submit(_import_backend, compiling, modules)

        def make_backend(
            architecture: ModelArchitecture, ropes: Sequence[Rope], dtype: torch.dtype, pads_rows: bool
        ) -> CPUBackend:
            progress("compiling kernels", 0.0)
            backend = importing.result()(architecture, ropes, dtype, pads_rows, deterministic)
            progress("compiling kernels", 1.0)
            return backend

        model = load_on_cpu(
            source,
            dtype=getattr(torch, choice.dtype),
            quantization=config.quantization,
            linear=linear_choice(choice.dtype, deterministic=deterministic),
            max_model_length=config.max_model_length,
            group=group,
            make_backend=make_backend,
            progress=partial(progress, "loading weights"),
        )
    if group.size > 1:
        import numba

        most: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        numba.set_num_threads(min(_num_threads(group), most))
    return model


def _num_threads(group: RankGroup) -> int:
    """Return OpenMP's number of threads, divided among the ranks.

    torch is told, because a program may have imported it before `environment.prepare` chose the number.
    """
    return max(1, int(os.environ["OMP_NUM_THREADS"].partition(",")[0]) // group.size)


def _modules(dtype: str, quantization: str) -> tuple[str, ...]:
    """Return the modules of the kernels that a model needs."""
    modules = build.BFLOAT16 if dtype == "bfloat16" else build.ALWAYS
    linear = build.LINEAR_BFLOAT16 if dtype == "bfloat16" else ()
    int8 = build.VNNI if int8_choice().product == "vnni" else build.INT8
    # What is stored may be of any form.
    further = {"none": (), "int8": int8, "stored": (*build.PACKED, *int8)}
    return (*modules, *linear, *further[quantization])


def _import_backend(compiling: Iterable[Popen[bytes]], modules: Iterable[str]) -> type[CPUBackend]:
    """Import the backend and its kernels after they are compiled: importing them earlier would compile them twice.

    Nothing is left for the first step to import.
    """
    for process in compiling:
        process.wait()
    for module in modules:  # compiles the kernels that the processes did not
        importlib.import_module(f"fastgen.kernels.cpu.{module}")
    from fastgen.model.layers.cpu_backend import CPUBackend

    return CPUBackend


def _load_on_gpu(
    source: ModelSource, config: EngineConfig, progress: ReportProgress, group: RankGroup
) -> Model[DeviceInput]:
    """Load a native model for the GPU's operators."""
    import torch

    from fastgen.model.native import load_on_gpu
    from fastgen.model.partition import Partition
    from fastgen.runner.device import choose_cache_dtype, choose_device, choose_dtype
    from fastgen.runner.kernel_compilation import KernelCompilation, first_launches

    device, dtype = choose_device(config, group.rank), choose_dtype(config)
    log.info("GPU %s; Triton kernels, enqueued one step ahead of the host", torch.cuda.get_device_name(device))
    cache_dtype = choose_cache_dtype(config, dtype, torch.cuda.get_device_capability(device))
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    check_gpu_memory(
        source,
        config,
        element_bytes=dtype.itemsize,
        kv_bytes=cache_dtype.itemsize,
        free_bytes=free_bytes,
        total_bytes=total_bytes,
    )
    # The other ranks find what the first has compiled in Triton's cache: their kernels are the same.
    own = Partition(group.rank, group.size)
    launches = partial(first_launches, source.architecture, device, dtype, cache_dtype, config, own)
    compilation = KernelCompilation(launches) if group.rank == 0 else None
    model = load_on_gpu(
        source,
        device,
        dtype,
        cache_dtype=cache_dtype,
        max_model_length=config.max_model_length,
        progress=partial(progress, "loading weights"),
        group=group,
    )
    if compilation is not None:
        compilation.wait(partial(progress, "compiling kernels"))
    return model


def _load_on_torch(
    source: ModelSource, config: EngineConfig, progress: ReportProgress, group: RankGroup
) -> Model[ForwardInput]:
    """Load a model for torch operations: native models by our code, others by transformers' code."""
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: not available for this model, which runs on torch operations: "
            "remove it"
        )
    import torch

    torch.set_num_threads(_num_threads(group))
    from fastgen.runner.device import choose_device, choose_dtype

    device, dtype = choose_device(config), choose_dtype(config)
    reason = choose_cpu_dtype(config) if config.device == "cpu" else f"dtype {dtype}"
    name = f"processor {this_processor()}" if config.device == "cpu" else f"GPU {torch.cuda.get_device_name(device)}"
    log.info("%s; products by torch; %s", name, reason)

    on_weights = partial(progress, "loading weights")
    if source.native is not None:
        from fastgen.model.native import load_on_torch

        return load_on_torch(
            source, device, dtype, max_model_length=config.max_model_length, progress=on_weights, group=group
        )
    if config.quantization != "none":
        raise ConfigError(
            f"--quantization {config.quantization} is not available for models run by transformers: remove it"
        )
    from fastgen.model.transformers_backend.load import load_transformers_model

    return load_transformers_model(source.path, device=device, dtype=dtype, progress=on_weights)


def has_gpu_operators(architecture: ModelArchitecture) -> bool:
    """Return whether the GPU's operators take the model's sizes of heads and hidden states, its experts and attention.

    torch operations run larger models.
    """
    from fastgen.kernels.gpu.attention import MAX_HEAD_DIM
    from fastgen.kernels.gpu.elementwise import MAX_HIDDEN
    from fastgen.kernels.gpu.experts import MAX_EXPERTS, MAX_TOP_K

    experts = [layer.experts for layer in architecture.layers if layer.experts is not None]
    return (
        architecture.delta is None
        and not architecture.gated_attention
        and not architecture.value_norm
        and all(layer.chunk is None for layer in architecture.layers)
        and not any(each.scales_inputs for each in experts)
        and architecture.head_dim <= MAX_HEAD_DIM
        and max(architecture.hidden_size, architecture.widest_norm) <= MAX_HIDDEN
        and all(each.count <= MAX_EXPERTS and each.top_k <= MAX_TOP_K for each in experts)
    )


def check_recurrent_states(architecture: ModelArchitecture, config: EngineConfig) -> None:
    """Check the settings of a model with recurrent states.

    Raises:
        ConfigError: naming the setting that is not available with them.
    """
    if architecture.delta is None:
        return
    name = f"{architecture.name} models, whose linear attention has recurrent states"
    if config.device != "cpu":
        raise ConfigError(f"--device {config.device}: not available for {name}: use --device cpu")
    if config.swap_space:
        raise ConfigError(
            f"--swap-space: not available for {name}: remove it; preempted requests continue from a snapshot or are "
            "recomputed"
        )


def check_attention_chunks(architecture: ModelArchitecture, block_size: int) -> None:
    """Check that chunks of attention are whole KV blocks.

    Raises:
        ConfigError: if they are not.
    """
    for size in sorted({layer.chunk for layer in architecture.layers if layer.chunk is not None}):
        if size % block_size:
            raise ConfigError(
                f"--block-size {block_size}: {architecture.name} models attend in chunks of {size} tokens, which must "
                f"be whole blocks: use {size & -size} or less"
            )


def host_runner(
    model: Model[ForwardInput], cache: KVCache, _config: EngineConfig, max_model_length: int
) -> ModelRunner:
    """Return a runner that prepares its input on the host."""
    from fastgen.runner.runner import ModelRunner

    return ModelRunner(model, cache, max_model_length=max_model_length)


def _ignore(_stage: str, _fraction: float) -> None:
    """Report no progress."""


def gpu_runner(
    model: Model[DeviceInput],
    cache: KVCache,
    config: EngineConfig,
    max_model_length: int,
    progress: ReportProgress = _ignore,
    group: RankGroup = ONE_RANK,
    make: Callable[..., GPURunner] | None = None,
) -> GPURunner:
    """Return a runner that keeps the state of its rows on the device, with its first CUDA graphs.

    `make` is called instead of `GPURunner`, if it is given.
    """
    from fastgen.runner.gpu_runner import GPURunner
    from fastgen.runner.graphs import CUDAGraphCapture, first_token_counts

    runner = (make or GPURunner)(
        model, cache, max_model_length=max_model_length, max_sequences=config.sequence_limit, group=group
    )
    counts = first_token_counts(config)
    if counts:
        runner.capture_graphs(counts, CUDAGraphCapture(model.device), partial(progress, "capturing graphs"))
    return runner


def with_cache(
    model: Any,
    config: EngineConfig,
    make_runner: Callable[[Any, KVCache, EngineConfig, int], AnyRunner],
    progress: ReportProgress = _ignore,
    group: RankGroup = ONE_RANK,
    make_measured: Callable[[Any, KVCache, EngineConfig, int], AnyRunner] | None = None,
) -> AnyRunner:
    """Allocate the KV cache of a loaded model in the remaining memory, and return a runner over both.

    Sizes are planned for the caches of all ranks together. All ranks allocate what fits on each of them.

    Args:
        make_measured: makes the runner that measures the memory of steps on a GPU; by default `make_runner`.

    Raises:
        ConfigError: if a limit does not fit the model or the memory, the memory has no room for a block, or the driver
            does not pin the host buffer.
    """
    from fastgen.kv_cache.tensors import KVCache

    shape, kv = model.architecture, model.kv_shape.of_ranks(group.size)
    trim_heap()
    group.agree(0)  # all ranks have loaded their weights, which the memory left depends on
    memory = available_memory()
    if model.device.type == "cpu":
        free = max(0, memory.num_bytes - group.size * working_memory_bytes(config, shape, model.kv_shape))
        num_host_blocks = group.agree(plan_host_blocks(config, kv, free))
        free -= num_host_blocks * kv.block_bytes(config.block_size)
        cache_memory = host_cache_memory(config, free, limited=memory.limited)
    else:
        from fastgen.runner.device import measure_gpu_cache_memory

        num_host_blocks = group.agree(plan_host_blocks(config, kv, memory.num_bytes))
        measured = partial(progress, "measuring memory")
        own = measure_gpu_cache_memory(model, config, make_measured or make_runner, measured)
        cache_memory = CacheMemory(own.default * group.size, own.limit * group.size)
    num_state_slots = group.agree(plan_state_slots(config, kv, cache_memory))
    own_kv, num_window_blocks = model.kv_shape, 0
    grouped = _grouped_shape(model, config)
    if grouped is not None:
        planned = plan_window_blocks(config, shape, grouped.of_ranks(group.size), cache_memory)
        num_window_blocks = group.agree(planned)
        if num_window_blocks:
            own_kv, kv = grouped, grouped.of_ranks(group.size)
    num_blocks = group.agree(plan_kv_blocks(config, shape, kv, cache_memory, num_state_slots, num_window_blocks))
    max_model_length = resolve_max_model_length(config, shape, kv, num_blocks)
    if num_window_blocks and not group.rank:
        log.info("layers with a sliding window have %d KV cache blocks of their own", num_window_blocks)
    cache = KVCache(
        own_kv,
        num_blocks,
        config.block_size,
        num_host_blocks=num_host_blocks,
        num_state_slots=num_state_slots,
        num_window_blocks=num_window_blocks,
        device=model.device,
        dtype=model.cache_dtype,
    )
    runner = make_runner(model, cache, config, max_model_length)
    if runner.graphs is not None:
        log.info("%s", runner.graphs)
    return runner


def _grouped_shape(model: Any, config: EngineConfig) -> KVShape | None:
    """Return the shape of the cache with layers with a sliding window apart; None if that is not available.

    It is not on GPUs, whose kernels read one block table, with --swap-space, and for models run by transformers.
    """
    from fastgen.model.cache_shape import grouped_cache_shape
    from fastgen.model.config.architecture import ModelArchitecture

    if model.device.type != "cpu" or config.swap_space or not isinstance(model.architecture, ModelArchitecture):
        return None
    return grouped_cache_shape(model.architecture, model.cache_dtype.itemsize)

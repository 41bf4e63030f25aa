"""Device and dtype of a model, and GPU memory for its KV cache."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fastgen.core.request import Request
from fastgen.core.sampling_params import MOST_LOGPROBS, SamplingParams
from fastgen.core.sequence import Sequence
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.kv_cache.sizing import CacheMemory, ModelShape, gpu_cache_memory
from fastgen.kv_cache.tensors import KVCache
from fastgen.model import first_line
from fastgen.model.layers.torch_attention import MAX_SCRATCH_ELEMENTS
from fastgen.model.processor import choose_cpu_dtype
from fastgen.model.step_input import StepInput, StepInputBuilder
from fastgen.runner.gpu_runner import SPARE_ROWS, GPURunner
from fastgen.runner.runner import Model, ModelRunner
from fastgen.settings import ConfigError, EngineConfig

# Makes a runner from a model, its cache, the settings and the length of the longest sequence.
MakeRunner = Callable[[Any, KVCache, EngineConfig, int], ModelRunner | GPURunner]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Needed for bfloat16 and the kernels' memory instructions.
_LEAST_CAPABILITY = (8, 0)
# Needed for conversion to float8_e4m3fn.
_FLOAT8_CAPABILITY = (8, 9)
# The first branch of the NVIDIA driver by the major version of CUDA (CUDA compatibility guide).
LEAST_DRIVERS = {12: 525, 13: 580}
# Bytes for cuBLAS workspaces and the allocator's rounding, besides a step's own memory.
_SLACK = 256 << 20


def choose_device(config: EngineConfig, rank: int = 0) -> torch.device:
    """Return the configured device. There is no fallback to another device.

    Each rank of a divided model has a GPU of its own, which becomes the current one of this thread.

    Raises:
        ConfigError: if it is not available, does not work or cannot run the kernels.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the errors below say the same
        if not torch.cuda.is_available():
            raise ConfigError(f"--device cuda: {_why_no_gpu()}, or use --device cpu")
    if config.tensor_parallel == 1:
        device = torch.device("cuda", torch.cuda.current_device())
    else:
        found = torch.cuda.device_count()
        if found < config.tensor_parallel:
            raise ConfigError(
                f"--tensor-parallel {config.tensor_parallel}: torch finds {found} GPUs: lower it, or give the engine "
                "more, in Kubernetes with spec.resources.gpu.count"
            )
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    _check_gpu(device)
    return device


def _why_no_gpu() -> str:
    """Return the reason why torch finds no GPU, and the remedy."""
    if torch.version.cuda is None:
        return "this torch is built without CUDA: install a CUDA build of torch"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        text = ""
    except Exception as error:
        text = first_line(error)
    if "driver" in text and "too old" in text:
        found = re.search(r"found version (\d+)", text)
        version = f", which supports CUDA {int(found[1]) // 1000}.{int(found[1]) % 1000 // 10} at most" if found else ""
        least = LEAST_DRIVERS.get(int(torch.version.cuda.partition(".")[0]))
        branch = f" to {least} or newer" if least else ""
        needed = f"torch needs CUDA {torch.version.cuda}"
        return f"the NVIDIA driver is too old{version}, but {needed}: update the driver{branch}"
    if "no NVIDIA driver" in text:
        return (
            "no NVIDIA driver is visible: run on a machine with a GPU and its driver, in Kubernetes with "
            "spec.resources.gpu.count of at least 1"
        )
    return f"torch finds no GPU ({text or 'none is visible'}): check nvidia-smi and CUDA_VISIBLE_DEVICES"


def _check_gpu(device: torch.device) -> None:
    """Raise ConfigError if the GPU cannot run the kernels, or does not work."""
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        raise ConfigError(
            f"--device cuda: {name} has compute capability {_dotted(capability)}: use a GPU with "
            f"{_dotted(_LEAST_CAPABILITY)} or higher (Ampere or later), or use --device cpu"
        )
    try:
        torch.ones(1, device=device).add_(1).item()
    except Exception as error:
        raise ConfigError(
            f"--device cuda: {name} does not work: {first_line(error)}: check nvidia-smi, and that this torch supports "
            f"compute capability {_dotted(capability)}, or use --device cpu"
        ) from None


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def choose_dtype(config: EngineConfig) -> torch.dtype:
    """Return the configured dtype; auto is bfloat16 on GPUs and as `choose_cpu_dtype` on CPUs.

    Raises:
        ConfigError: as `choose_cpu_dtype`.
    """
    if config.device == "cpu":
        return _DTYPES[choose_cpu_dtype(config).dtype]
    return _DTYPES.get(config.dtype, torch.bfloat16)


def choose_cache_dtype(config: EngineConfig, dtype: torch.dtype, capability: tuple[int, int]) -> torch.dtype:
    """Return the dtype of the KV cache; auto is `dtype`, that of the computation.

    Args:
        capability: compute capability of the GPU.

    Raises:
        ConfigError: if the GPU has no float8.
    """
    if config.kv_cache_dtype == "auto":
        return dtype
    if capability < _FLOAT8_CAPABILITY:
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype}: the GPU has compute capability {_dotted(capability)}: use one "
            f"with {_dotted(_FLOAT8_CAPABILITY)} or higher (Ada or later), or remove it"
        )
    return torch.float8_e4m3fn


def measure_gpu_cache_memory(
    model: Model[Any],
    config: EngineConfig,
    make_runner: MakeRunner,
    progress: Callable[[float], None] = lambda _fraction: None,
) -> CacheMemory:
    """Return the GPU memory that a loaded model and its steps leave for the KV cache.

    It is measured by running steps over a cache of one block, which is overwritten: their results are meaningless. CUDA
    graphs are captured over this cache to learn their size, and again over the real cache.
    """
    torch.cuda.synchronize(model.device)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    further_bytes = run_first_steps(model, config, make_runner, progress)
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    step_bytes = peak + further_bytes + _SLACK
    return gpu_cache_memory(config, total_bytes=total, free_bytes=free, step_bytes=step_bytes)


def run_first_steps(
    model: Model[Any],
    config: EngineConfig,
    make_runner: MakeRunner,
    progress: Callable[[float], None] = lambda _fraction: None,
) -> int:
    """Run `first_steps` over a cache of one block.

    Returns:
        Bytes that the runner takes besides these steps' memory: its CUDA graphs, or scratch for the longest context.
    """
    longest = longest_allowed(model.architecture, config)
    cache = KVCache(model.kv_shape, 1, config.block_size, device=model.device, dtype=model.cache_dtype)
    runner = make_runner(model, cache, config, longest)
    # Calibration has not found the token budget yet: graphs of the largest one take most.
    runner.prepare_for(config, lambda _fraction: None)
    steps, mask = first_steps(model.architecture, config), all_allowed(model.architecture)
    for number, step in enumerate(steps):
        progress(number / len(steps))
        ticket = runner.launch(step)
        ticket.sample([mask] * len(step.masked))
        ticket.result()
    progress(1.0)
    if isinstance(runner, ModelRunner):
        return _longest_context_bytes(model, config)
    return 0 if runner.graphs is None else runner.graphs.num_bytes


def longest_allowed(architecture: ModelShape, config: EngineConfig) -> int:
    """Return the length of the longest sequence in the first steps: the setting, at most the model's default."""
    return min(config.max_model_length or architecture.default_length, architecture.default_length)


def all_allowed(architecture: ModelShape) -> npt.NDArray[np.uint32]:
    """Return a mask that allows every token."""
    return np.full(-(-architecture.vocab_size // 32), ~np.uint32(0))


def first_steps(architecture: ModelShape, config: EngineConfig) -> list[StepInput]:
    """Return the largest step, with filters, a penalty, logprobs and masks, and then smaller greedy ones.

    The largest one has the whole token budget, or less if that takes more prompts of the longest length than the runner
    has rows for. As many sequences as may run sample in it. Whatever a request asks for, its kernels are compiled for
    these steps, and not while others wait for their tokens.
    """
    longest = longest_allowed(architecture, config)
    lengths = [1] * (config.sequence_limit - 1)
    left = config.most_tokens - len(lengths)
    while left and len(lengths) < config.sequence_limit + SPARE_ROWS:
        lengths.append(min(left, longest))
        left -= lengths[-1]
    sampling = SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0, logprobs=MOST_LOGPROBS, seed=0)
    peak = _step(lengths, config.sequence_limit, sampling, config.block_size)
    peak = replace(peak, masked=np.arange(len(peak.sampled), dtype=np.int32))
    sizes = [1 << power for power in range(min(longest, config.most_tokens).bit_length())]
    return [peak, *(_step([size], 1, SamplingParams(temperature=0), config.block_size) for size in sizes)]


def _step(lengths: list[int], num_sampled: int, sampling: SamplingParams, block_size: int) -> StepInput:
    """Return a step of prompts of these lengths over one block; the first `num_sampled` sample a token."""
    chunks = []
    for number, length in enumerate(lengths):
        # The others have one more token, which this step does not compute, so they do not sample.
        tokens = [0] * (length + (number >= num_sampled))
        request = Request(id="", prompt_token_ids=tokens, sampling=sampling)
        sequence = Sequence(request, ordinal=number, arrival=0.0, seed=0)
        sequence.block_table = [0] * -(-length // block_size)
        chunks.append(Chunk(sequence, 0, length))
    plan = StepPlan(tuple(sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)))
    return StepInputBuilder(block_size).build(plan)


def _longest_context_bytes(model: Model[Any], config: EngineConfig) -> int:
    """Return the scratch memory of torch's attention over the longest context.

    It holds two copies of the context's KV, and scores.
    """
    longest = config.max_model_length or model.architecture.default_length
    return 2 * longest * model.kv_shape.layer_bytes + 5 * MAX_SCRATCH_ELEMENTS

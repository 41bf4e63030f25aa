"""Where a model runs and in what numbers, and the memory that is there for its KV cache."""

from __future__ import annotations

import torch

from fastgen.config import ConfigError, EngineConfig
from fastgen.core.request import Request, SamplingParams
from fastgen.core.scheduler import Chunk, StepPlan
from fastgen.core.sequence import Sequence
from fastgen.kv_cache.sizing import CacheRoom, device_room
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.layers.torch_attention import MOST_AT_ONCE
from fastgen.model.step_input import StepInput
from fastgen.runner.runner import Model
from fastgen.sampling.sampler import Draw, sample

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# What cuBLAS and the allocator's rounding take beside what a pass asks for.
_SLACK = 256 << 20


def choose_device(config: EngineConfig) -> torch.device:
    """The device that is asked for, never another one.

    Raises:
        ConfigError: when it cannot be used.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU"
        raise ConfigError(
            f"--device {config.device}: {reason}: run where there is one, with a torch for it, or give --device cpu"
        )
    return torch.device("cuda", torch.cuda.current_device())


def choose_dtype(config: EngineConfig) -> torch.dtype:
    """The numbers that are asked for; auto is float32 on CPUs and bfloat16 on GPUs.

    Raises:
        ConfigError: when int8 weights are asked for in others than float32.
    """
    dtype = {"cpu": torch.float32, "cuda": torch.bfloat16}[config.device]
    dtype = _DTYPES.get(config.dtype, dtype)
    if config.quantization != "none" and dtype != torch.float32:
        raise ConfigError(
            f"--quantization {config.quantization}: computes in float32: leave --dtype {config.dtype} out"
        )
    return dtype


def gpu_room(model: Model, config: EngineConfig) -> CacheRoom:
    """The room that a GPU has for the KV cache of a model on it: what the fullest pass leaves, by running one.

    The pass is computed over a cache of a single block, which is overwritten: what comes out means nothing.
    """
    torch.cuda.synchronize(model.device)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    run_fullest_step(model, config)
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(model.device)
    pass_bytes = peak + _longest_context_bytes(model, config) + _SLACK
    return device_room(config, total_bytes=total, free_bytes=free, pass_bytes=pass_bytes)


@torch.inference_mode()
def run_fullest_step(model: Model, config: EngineConfig) -> None:
    """A pass of as many tokens as passes may have, then as many tokens sampled as sequences may run."""
    shape = model.architecture
    num_tokens = min(config.most_tokens, config.max_model_length or shape.default_length, shape.default_length)
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=0)
    request = Request(id="", prompt_token_ids=[0] * num_tokens, sampling=sampling)
    sequence = Sequence(request, ordinal=0, arrival=0.0, seed=0)
    sequence.block_table = [0] * -(-num_tokens // config.block_size)
    chunk = Chunk(sequence, 0, num_tokens)
    cache = KVCache(model.kv_shape, 1, config.block_size, device=model.device, dtype=model.dtype)
    hidden = model.forward(StepInput.from_plan(StepPlan((chunk,)), block_size=config.block_size), cache)
    rows = config.sequence_limit
    sample(model.head(hidden.expand(rows, -1).contiguous()), [Draw.of(chunk, shape.eos_token_ids)] * rows)


def _longest_context_bytes(model: Model, config: EngineConfig) -> int:
    """What attention gathers beside it for the longest context: its keys and values twice over, and masked scores."""
    longest = config.max_model_length or model.architecture.default_length
    one_layer = model.kv_shape.block_bytes(1) // model.kv_shape.num_layers
    return 2 * longest * one_layer + 5 * MOST_AT_ONCE

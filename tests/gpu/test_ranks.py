"""A model on two ranks that share a device gives the tokens of one.

NCCL wants a GPU for each rank, so gloo connects them, over copies on the host. The test runs on CPUs, too.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu import standins

standins.install()

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from fastgen.core.request import Request  # noqa: E402
from fastgen.core.sampling_params import SamplingParams  # noqa: E402
from fastgen.engine.core import Engine  # noqa: E402
from fastgen.kv_cache.tensors import KVCache  # noqa: E402
from fastgen.model.layers.rank_group import ONE_RANK  # noqa: E402
from fastgen.model.native import load_on_gpu  # noqa: E402
from fastgen.model.source import ModelSource  # noqa: E402
from fastgen.runner.device import choose_device  # noqa: E402
from fastgen.runner.gpu_runner import GPURunner  # noqa: E402
from fastgen.runner.ranks.gloo import GlooGroup  # noqa: E402
from fastgen.runner.ranks.gpu_runners import FollowingGPURunner, RankedGPURunner  # noqa: E402
from fastgen.runner.ranks.ring import Ring, RingFiles  # noqa: E402
from fastgen.settings import EngineConfig  # noqa: E402

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a torch that is built for it"),
]
BLOCK_SIZE = 16
SIZES: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 160},
    "mixtral": {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}
CONFIG = EngineConfig(model="", token_budget=32, max_sequences=8, preemption="swap", swap_space=1)


class OverTheHost(GlooGroup):
    """A group of ranks over gloo: each operation copies its tensors to the host."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(super().all_reduce(x.cpu()))

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        return super().gather(x.cpu(), widths).to(x.device)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(super().broadcast(x.cpu()))


class Unwatched:
    """The watch of rank 0 over threads."""

    def check(self) -> None:
        """Find nothing."""

    def guard(self) -> AbstractContextManager[None]:
        return nullcontext()


def runner_on(folder: Path, device: torch.device, make: Any, group: Any = ONE_RANK, **more: Any) -> Any:
    model = load_on_gpu(
        ModelSource.open(str(folder)),
        device,
        torch.float32,
        max_model_length=160,
        progress=lambda _fraction: None,
        group=group,
    )
    num_blocks = 64 if group.size == 1 else 11
    cache = KVCache(model.kv_shape, num_blocks, BLOCK_SIZE, num_host_blocks=16, device=device, dtype=model.cache_dtype)
    return make(model, cache, max_model_length=160, max_sequences=8, group=group, **more)


def generate(runner: Any) -> tuple[list[list[int]], int]:
    """Return the tokens of six requests, and how many sequences were swapped out."""
    rng, engine, swapped = random.Random(3), Engine(runner, CONFIG), 0
    found: list[list[int]] = [[] for _ in range(6)]
    for number in range(6):
        sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        engine.add(Request(id=str(number), prompt_token_ids=rng.choices(range(3, 331), k=47), sampling=sampling))
    while engine.has_work:
        report = engine.step()
        swapped += report.step.swapped_out
        for output in report.outputs:
            found[int(output.request_id)] += output.token_ids
    return found, swapped


@pytest.mark.parametrize("on", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
@pytest.mark.parametrize("kind", MODELS)
def test_two_ranks_on_one_device_give_the_tokens_of_one(kind: str, on: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    folder, device = tmp_path / "model", choose_device(EngineConfig(model="", device=on))
    AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES | MODELS[kind])).save_pretrained(folder)
    expected, _ = generate(runner_on(folder, device, GPURunner))
    files, store = RingFiles.create(1), tmp_path / "store"

    def follow() -> None:
        group = OverTheHost(store, 1, 2)
        runner_on(folder, device, FollowingGPURunner, group, config=CONFIG, ring=Ring(files)).follow()

    other = threading.Thread(target=follow, daemon=True)
    other.start()
    given: dict[str, Any] = {"num_parameters": 1, "ring": Ring(files), "watch": Unwatched()}
    runner = runner_on(folder, device, RankedGPURunner, OverTheHost(store, 0, 2), **given)
    found, swapped = generate(runner)
    runner.end()
    other.join(60)
    assert not other.is_alive(), "the other rank does not end"
    files.close()
    assert found == expected
    assert swapped > 0

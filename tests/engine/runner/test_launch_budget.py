"""Launches of a step on the code path of a GPU, counted as dispatched operations; an operator of ours is one launch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from fastgen.core.request import Request, SamplingParams
from fastgen.core.scheduler import Chunk, StepPlan
from fastgen.core.sequence import Sequence
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.native import load_on_gpu
from fastgen.model.source import ModelSource
from fastgen.model.step_input import StepInputBuilder
from fastgen.runner.gpu_runner import GPURunner

MOST_PER_LAYER = 9
MOST_OUTSIDE = 20
# They allocate without writing.
ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided"}
# They wait for the device, because their result is a Python number or has a size that depends on data.
WAITS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "equal", "is_nonzero"}


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.waits[name] += 1
        elif name not in ALLOCATIONS and not is_view(func, result, args):
            self.launches[name] += 1
        return result


def is_view(func: Any, result: Any, args: Any) -> bool:
    """Return whether an operation only returned its input's memory in another shape."""
    outputs, inputs = (
        {part.untyped_storage().data_ptr() for part in tree_leaves(values) if isinstance(part, torch.Tensor)}
        for values in (result, args)
    )
    return not func._schema.is_mutable and bool(outputs) and outputs <= inputs


def saved(folder: Path, num_layers: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=2, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder


def count(folder: Path, sampling: SamplingParams) -> Counting:
    """Count one step with two decodes and a chunk, after the step that admits them."""
    model = load_on_gpu(
        ModelSource.open(str(folder)),
        torch.device("cpu"),
        torch.float32,
        max_model_length=None,
        progress=lambda _fraction: None,
    )
    runner = GPURunner(model, KVCache(model.kv_shape, 12, 16), max_model_length=128, max_sequences=4)
    builder, sequences = StepInputBuilder(16), []
    for number in range(3):
        request = Request(id=str(number), prompt_token_ids=[3 + number] * 40, sampling=sampling)
        sequences.append(Sequence(request, ordinal=number, arrival=0.0, seed=number))
        sequences[-1].block_table = list(range(4 * number, 4 * number + 3))
    steps = [[39, 39, 10], [1, 1, 30]]
    counting = Counting()
    for sizes in steps:
        chunks = [Chunk(s, s.num_computed_tokens, n) for s, n in zip(sequences, sizes, strict=True)]
        step = builder.build(StepPlan(tuple(chunks)))
        counting = Counting()
        with counting:
            ticket = runner.launch(step)
            ticket.sample([])
        ticket.result()
        for sequence, size in zip(sequences, sizes, strict=True):
            sequence.num_computed_tokens += size
    return counting


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.1, seed=1),
    ],
    ids=["greedy", "filtered"],
)
def test_a_mixed_step_stays_within_its_launches_and_waits_for_nothing(sampling: SamplingParams, tmp_path: Path) -> None:
    few, many = (count(saved(tmp_path / str(layers), layers), sampling) for layers in (2, 4))
    per_layer = (many.launches.total() - few.launches.total()) / 2
    outside = few.launches.total() - 2 * per_layer
    assert per_layer <= MOST_PER_LAYER, many.launches - few.launches
    assert outside <= MOST_OUTSIDE, few.launches
    assert not many.waits

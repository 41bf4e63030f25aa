"""What a GPU's backend computes once: rotary tables for all steps, and queries, keys and values in one product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.gpu.models import Ours
from benchmarks.gpu.sizes import TINY
from benchmarks.gpu.steps import Steps
from torch.utils._python_dispatch import TorchDispatchMode

from fastgen.core.sampling_params import SamplingParams
from fastgen.model.layers.gpu_backend import GPUBackend
from fastgen.model.layers.rope import Rope
from support.recording_gpu import RecordingGPU

GREEDY = SamplingParams(temperature=0)


class Operands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operands of products and of rotations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[tuple[int, ...]] = []  # shapes of the weights
        self.tables: list[tuple[int, int]] = []  # addresses of cosines and sines

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        match func.overloadpacket.__name__:
            case "linear":
                self.products.append(tuple(args[1].shape))
            case "mm" | "addmm" | "matmul" | "bmm" as name:
                raise AssertionError(f"{name}: count it as a product")
            case "rotary_cache":
                cosines, sines = args[3:5]
                self.tables.append((cosines.data_ptr(), sines.data_ptr()))
        return func(*args, **kwargs or {})


@pytest.fixture(scope="module")
def ours() -> Ours:
    return Ours.make(TINY.small, TINY.block_size, 4, torch.device("cpu"), torch.float32)


def record(ours: Ours) -> Operands:
    step = Steps(ours, [(1, 30), (20, 30)], GREEDY).step
    operands = Operands()
    with torch.inference_mode(), operands:
        ours.runner.launch(step).sample([])
    return operands


def test_every_layer_of_every_step_reads_the_rotary_tables_that_were_made_at_the_start(
    ours: Ours, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_arguments: object) -> None:
        raise AssertionError("rotary tables are made again")

    monkeypatch.setattr(Rope, "__call__", make)
    backend: Any = ours.model._backend
    ((cosines, sines),) = backend.rotations
    layers = ours.model.architecture.num_layers
    for _ in range(2):
        assert record(ours).tables == [(cosines.data_ptr(), sines.data_ptr())] * layers


def test_rotary_tables_are_on_the_device_from_the_start() -> None:
    architecture = TINY.small.architecture
    ropes = [Rope(rope, longest=64) for rope in architecture.rope_configs]
    with RecordingGPU().installed() as device:
        (tables,) = GPUBackend(architecture, ropes, 64, device).rotations
        assert [(table.device.type, len(table)) for table in tables] == [("cuda", 64)] * 2


def test_queries_keys_and_values_are_one_product(ours: Ours) -> None:
    a = ours.model.architecture
    width = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    of_a_layer = [
        (width, a.hidden_size),
        (a.hidden_size, a.num_heads * a.head_dim),
        (2 * a.mlp_size, a.hidden_size),
        (a.hidden_size, a.mlp_size),
    ]
    assert record(ours).products == of_a_layer * a.num_layers + [(a.vocab_size, a.hidden_size)]

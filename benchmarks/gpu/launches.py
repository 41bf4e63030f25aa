"""Launches of a step on the code path of a GPU, counted as dispatched operations.

An operator of ours counts as the kernels that its launch function in `fastgen.kernels.triton` launches, and its twin
computes the result. An operator that calls a library counts as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Self
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from benchmarks.gpu.models import Ours
from benchmarks.gpu.sizes import TINY, ModelSize
from benchmarks.gpu.steps import Steps
from fastgen.core.sampling_params import SamplingParams
from fastgen.kernels.gpu.operators import has_kernels, launch_function
from fastgen.model.layers.rank_group import ONE_RANK, RankGroup

# They allocate without writing.
_ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided"}
# They wait for the device, because their result is a Python number or has a size that depends on data.
_WAITS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "equal", "is_nonzero"}
# They wait as well, but are no operations where the tensor is on the host already.
_READS = {"tolist", "numpy", "cpu"}

SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "filters": SamplingParams(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=1),
    "filters and a penalty": SamplingParams(temperature=0.8, top_p=0.9, top_k=20, repetition_penalty=1.1, seed=1),
}


@dataclass(frozen=True, slots=True)
class Launches:
    """Launches of a step.

    Attributes:
        per_layer, outside: of one layer, and outside the layers, if they are launched one by one.
        replayed: of a step replayed from a CUDA graph, which is one of them.
        waits: operations that wait for the device, in both kinds of steps.
    """

    per_layer: float
    outside: float
    replayed: int
    waits: int


class _CountedGraph:
    """Stands in for a CUDA graph, and computes nothing."""

    replays = 0

    def replay(self) -> None:
        self.replays += 1


class _CountedCapture:
    """Implements `GraphCapture` with one graph for all, which nothing is computed for."""

    def __init__(self) -> None:
        self.graph = _CountedGraph()

    def capture(self, _run: Callable[[], None]) -> _CountedGraph:
        return self.graph

    def used_bytes(self) -> int:
        return 0


class _Reads(TorchFunctionMode):
    """Counts calls that copy a tensor to the host, but not those within an operator's twin."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self._waits.update([name] if name in _READS else [])
        return func(*args, **kwargs or {})


class Counting(TorchDispatchMode):
    """Counts launches and waits by the names of operations and of Triton kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self._reads = _Reads(self.waits)

    def __enter__(self) -> Self:
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        name = func.overloadpacket.__name__
        if func.namespace == "fastgen" and has_kernels(name):
            within = Counting()
            with _kernels_counted(within.launches), within:
                launch_function(name)(*args, **kwargs or {})
            self.launches += within.launches
            self.waits += within.waits
        elif name in _WAITS:
            self.waits[name] += 1
        elif name not in _ALLOCATIONS and not _is_view(func, result, args):
            self.launches[name] += 1
        return result


@contextmanager
def _kernels_counted(launches: Counter[str]) -> Iterator[None]:
    """Count the launches of Triton kernels by their names, instead of launching them."""

    def launch(kernel: Any, _grid: Any) -> Callable[..., None]:
        return lambda *_args, **_kwargs: launches.update([kernel.__name__])

    with mock.patch.object(KernelInterface, "__getitem__", launch):
        yield


def _is_view(func: Any, result: Any, args: Any) -> bool:
    """Return whether an operation only returned its input's memory in another shape."""
    outputs, inputs = (
        {part.untyped_storage().data_ptr() for part in tree_leaves(values) if isinstance(part, torch.Tensor)}
        for values in (result, args)
    )
    return not func._schema.is_mutable and bool(outputs) and outputs <= inputs


def count_launches(
    sampling: SamplingParams, size: ModelSize = TINY.small, chunk: int = 20, group: RankGroup = ONE_RANK
) -> Launches:
    """Count a step of two decodes and a chunk of some tokens, by the twins of a model with two and with four layers."""
    counts = [_count(size, layers, sampling, chunk, group) for layers in (2, 4)]
    few, many = (count.launches.total() for count in counts)
    per_layer = (many - few) / 2
    capture = _CountedCapture()
    replayed = _count(size, 4, sampling, chunk, group, capture)
    return Launches(
        per_layer=per_layer,
        outside=few - 2 * per_layer,
        replayed=replayed.launches.total() + capture.graph.replays,
        waits=sum(count.waits.total() for count in (*counts, replayed)),
    )


def _count(
    size: ModelSize,
    num_layers: int,
    sampling: SamplingParams,
    chunk: int,
    group: RankGroup,
    capture: _CountedCapture | None = None,
) -> Counting:
    size = replace(size, config={**size.config, "num_hidden_layers": num_layers})
    ours = Ours.make(size, TINY.block_size, 4, torch.device("cpu"), torch.bfloat16, group)
    step = Steps(ours, [(1, 30), (1, 40), (chunk, chunk + 10)], sampling).step
    if capture is not None:
        ours.runner.capture_graphs([chunk + 2], capture)
    counting = Counting()
    with counting:
        ours.runner.launch(step).sample([])
    return counting

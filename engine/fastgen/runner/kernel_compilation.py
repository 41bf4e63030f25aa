"""Compiles the Triton kernels of a model's first steps in threads, while its weights are read.

The steps run on the GPU's code path over torch's fake tensors, which have a type, a shape and a place in their storage,
but no memory. Nothing is computed: an operator's launch function only tells which variants of its kernels it needs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import AsyncCompileMode
from triton.runtime.jit import KernelInterface, MockTensor

from fastgen.kernels.cpu.environment import usable_cpus
from fastgen.kernels.gpu.operators import has_kernels, launch_function
from fastgen.kv_cache.tensors import KVCache
from fastgen.model import first_line
from fastgen.model.checkpoint.checkpoint import Checkpoint, EmbeddingTable, Part, Readable
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.device_input import DeviceInput
from fastgen.model.layers.decoder import Decoder
from fastgen.model.layers.gpu_backend import GPUBackend, GPUFormat
from fastgen.model.layers.rope import Rope
from fastgen.model.layers.weight_reader import WeightReader
from fastgen.model.layers.weights import DecoderWeights
from fastgen.model.partition import UNDIVIDED, Partition
from fastgen.runner.device import all_allowed, first_steps, longest_allowed
from fastgen.runner.gpu_runner import GPURunner
from fastgen.settings import EngineConfig

log = logging.getLogger("fastgen.model")

_WAIT_SECONDS = 0.2
# Launches are recorded by replacing a method of Triton's, which only one thread may do at a time.
_recording = threading.Lock()


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A launch of a kernel, with stand-ins for its tensors."""

    kernel: Any
    arguments: Sequence[Any]
    options: Mapping[str, Any]


class KernelCompilation:
    """Compiles the kernels of a model's first steps in threads.

    It only saves time: a kernel that it misses, or cannot compile, is compiled when a step needs it.
    """

    def __init__(self, launches: Callable[[], Sequence[KernelLaunch]]) -> None:
        self._launches = launches
        self._mode: AsyncCompileMode | None = None
        self._thread = threading.Thread(target=self._run, name="compile", daemon=True)
        self._thread.start()

    def wait(self, progress: Callable[[float], None]) -> None:
        """Wait for the kernels; `progress` is called with the fraction compiled, 0 to 1."""
        while self._thread.is_alive():
            compiled = [] if self._mode is None else list(self._mode.raw_futures)
            progress(sum(each.done() for each in compiled) / max(1, len(compiled)))
            self._thread.join(_WAIT_SECONDS)
        progress(1.0)

    def _run(self) -> None:
        try:
            launches = self._launches()
            with (
                ThreadPoolExecutor(usable_cpus(), "compile") as pool,
                AsyncCompileMode(pool, ignore_errors=True) as mode,
            ):
                self._mode = mode
                for launch in launches:
                    _submit(launch)
        except Exception as error:
            log.warning("kernels are compiled one by one, when steps need them: %s", first_line(error))


def _submit(launch: KernelLaunch) -> None:
    """Let Triton compile a kernel in the pool.

    It parses the source here while the pool's threads parse others, for which CPython 3.11 has one counter of the depth
    ("AST constructor recursion depth mismatch", https://github.com/python/cpython/issues/106905): so try it again.
    """
    for is_last in (False, True):
        try:
            launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.options)
        except Exception as error:
            if is_last:
                log.warning("a kernel is compiled when a step needs it: %s", first_line(error))
        else:
            return


def first_launches(
    architecture: ModelArchitecture,
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    config: EngineConfig,
    partition: Partition = UNDIVIDED,
) -> list[KernelLaunch]:
    """Return the launches of a rank's first steps; arguments as `load_on_gpu` takes them."""
    # Imported here, in the thread: it takes a second, and the weights do not wait for it.
    from torch._subclasses.fake_tensor import FakeTensorMode

    # One layer of each kind, and again: the last layer of a model computes fewer rows.
    architecture = partition.architecture(architecture)
    kinds = tuple(dict.fromkeys(architecture.layers))
    architecture = replace(architecture, layers=(*kinds, *kinds))
    longest = longest_allowed(architecture, config)
    with _recording, torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True), _Recording() as recording:
        model = _without_weights(architecture, device, dtype, cache_dtype, longest, partition)
        cache = KVCache(model.kv_shape, 1, config.block_size, device=device, dtype=cache_dtype)
        runner = GPURunner(model, cache, max_model_length=longest, max_sequences=config.sequence_limit)
        for step in first_steps(architecture, config):
            runner.launch(step).sample([all_allowed(architecture)] * len(step.masked))
    launches: list[KernelLaunch] = recording.launches
    return launches


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects the kernel launches of operators in `launches`; the operators compute nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: list[KernelLaunch] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, options = func.overloadpacket.__name__, dict(kwargs or {})
        if func.namespace == "fastgen" and has_kernels(name):
            with _launching(self.launches):
                return launch_function(name)(*args, **options)
        if name == "is_pinned":
            return False
        if name in ("pin_memory", "_pin_memory"):
            return args[0]
        options.pop("pin_memory", None)  # fake tensors are in no memory
        return func(*args, **options)


@contextmanager
def _launching(launches: list[KernelLaunch]) -> Iterator[None]:
    """Add the launches of this thread to a list instead of running them."""
    original, recorder = KernelInterface.__getitem__, threading.get_ident()

    def launcher(kernel: Any, grid: Any) -> Any:
        if threading.get_ident() != recorder:
            return original(kernel, grid)

        def launch(*arguments: Any, **options: Any) -> None:
            stand_ins = {name: _stand_in(value) for name, value in options.items()}
            launches.append(KernelLaunch(kernel, [_stand_in(value) for value in arguments], stand_ins))

        return launch

    KernelInterface.__getitem__ = launcher
    try:
        yield
    finally:
        KernelInterface.__getitem__ = original


class _Address(MockTensor):  # type: ignore[misc]
    """A tensor of which Triton sees the type and the address, for which it specialises."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.dtype, list(tensor.shape))
        self._offset = int(tensor.storage_offset()) * tensor.itemsize

    def data_ptr(self) -> int:
        """Return the address in the storage, which begins at a multiple of more than 16 bytes."""
        return self._offset


def _stand_in(value: Any) -> Any:
    return _Address(value) if isinstance(value, torch.Tensor) else value


def _without_weights(
    architecture: ModelArchitecture,
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    longest: int,
    partition: Partition,
) -> Decoder[DeviceInput]:
    """Return the model over fake tensors."""
    shapes = architecture.tensor_shapes()
    checkpoint = Checkpoint(lambda name: _Unread(shapes[name]), architecture.head)
    weight_format = GPUFormat(device, dtype, _NoReader(device))
    weights = DecoderWeights.load(architecture, checkpoint, weight_format, lambda _fraction: None, partition)
    ropes = [Rope(rope, longest=longest) for rope in architecture.rope_configs]
    backend = GPUBackend(architecture, ropes, longest, device)
    return Decoder(weights, backend, device=device, dtype=dtype, cache_dtype=cache_dtype)


class _NoReader(WeightReader):
    """Reads nothing: the matrices are fake."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, _no_copier)

    def read(self, parts: Sequence[Readable], dtype: torch.dtype) -> torch.Tensor:
        """Return a fake matrix."""
        rows = sum(part.shape[0] for part in parts)
        return torch.empty(rows, *parts[0].shape[1:], dtype=dtype, device=self._device)


def _no_copier() -> Any:
    raise AssertionError


@dataclass(frozen=True, slots=True)
class _Unread:
    """Implements `StoredTensor` with fake tensors."""

    shape: tuple[int, ...]

    @property
    def block(self) -> int:
        return 1

    def part(self, part: Part) -> _Unread:
        return _Unread(part.shape(self.shape))

    def values(self) -> torch.Tensor:
        return self.float32()

    def float32(self) -> torch.Tensor:
        return torch.empty(self.shape)

    def int8(self) -> Int8Blocks:
        raise NotImplementedError

    def blocks(self) -> None:
        return None

    def table(self) -> EmbeddingTable:
        raise NotImplementedError

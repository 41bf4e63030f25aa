"""The paged KV cache's tensors, and the host buffer that preempted sequences are swapped to."""

from __future__ import annotations

import math
import mmap
import time
import weakref
from collections import abc
from typing import TypeVar

import numpy as np
import torch

from fastgen.core.blocks.window_pool import WindowGroup
from fastgen.kv_cache.prefault import Prefaulter
from fastgen.kv_cache.sizing import KVShape, StateShape
from fastgen.settings import ConfigError

_BLOCKS_TIMED = 4
_PORTABLE = 1  # cudaHostRegisterPortable: the memory is pinned for all CUDA contexts of the process

BlockPair = tuple[int, int]
Input = TypeVar("Input")


class RecurrentStates:
    """Slots for the recurrent states of sequences. What a slot holds before it is written is arbitrary.

    Attributes:
        inputs: [layers, slots, tokens, width] float32; the dimensions are those of `StateShape`.
        matrices: [layers, slots, heads, key_dim, value_dim] float32.
    """

    def __init__(self, shape: StateShape, num_slots: int, device: torch.device) -> None:
        self.inputs = _zeros((shape.num_layers, num_slots, *shape.inputs), device, torch.float32)
        self.matrices = _zeros((shape.num_layers, num_slots, *shape.matrices), device, torch.float32)


class KVCache:
    """Keys and values of all layers with attention, the host buffer for swapped blocks, and recurrent states.

    Zeroed, so that slots never written hold no NaN.

    Attributes:
        keys, values: [layers, blocks, kv heads, block size, head_dim], on the model's device; the head dimensions of
            the two may differ.
        host_keys, host_values: [host blocks, layers, kv heads, block size, head_dim], in host memory, pinned for a GPU:
            a block of all layers is contiguous, and so one copy.
        states: recurrent states of layers with linear attention; None if there are none.
        others: keys and values of the layers with other heads, in the same blocks; None if there are none.
        windowed: keys and values of the layers with a sliding window, in blocks of their own; None if there are none.
        window_group: of the blocks of `windowed`; None if there are none.
        prefaulter: prefaults the memory of all keys and values but those of `windowed`, which has its own; None on a
            GPU, where memory is allocated up front.
    """

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        num_state_slots: int = 0,
        num_window_blocks: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        def size(blocks: int, head_dim: int) -> tuple[int, ...]:
            return (shape.num_layers, blocks, shape.num_kv_heads, block_size, head_dim)

        on = torch.device(device)
        self.keys = _zeros(size(num_blocks, shape.key_dim), on, dtype)
        self.values = _zeros(size(num_blocks, shape.value_dim), on, dtype)
        self.others = (
            None
            if shape.others is None
            else KVCache(
                shape.others, num_blocks, block_size, num_host_blocks=num_host_blocks, device=device, dtype=dtype
            )
        )
        self.windowed = (
            None
            if shape.windowed is None
            else KVCache(shape.windowed, num_window_blocks, block_size, device=device, dtype=dtype)
        )
        self.window_group = (
            None
            if shape.windowed is None or shape.windowed.window is None
            else WindowGroup(shape.windowed.window, num_window_blocks)
        )
        tensors = [tensor for part in self.by_heads for tensor in (part.keys, part.values)]
        self.prefaulter = Prefaulter(tensors) if on.type == "cpu" else None
        self.host_keys, self.host_values = (
            _host_zeros((num_host_blocks, shape.num_layers, shape.num_kv_heads, block_size, dim), on, dtype)
            for dim in (shape.key_dim, shape.value_dim)
        )

        self.num_state_slots = 0 if shape.states is None else num_state_slots
        self.states = None if shape.states is None else RecurrentStates(shape.states, num_state_slots, on)

    @property
    def by_heads(self) -> tuple[KVCache, ...]:
        """The cache of the layers that have the model's heads, and of the others."""
        return (self,) if self.others is None else (self, self.others)

    def of_windows(self, whole: Input, windowed: Input | None) -> tuple[Input, KVCache]:
        """Return the input and the cache of layers with a sliding window.

        Args:
            whole: the input of all other layers.
            windowed: that of these layers, if they have blocks of their own.
        """
        if self.windowed is None:
            return whole, self
        assert windowed is not None, "the step has no block tables of layers with a window"
        return windowed, self.windowed

    @property
    def num_blocks(self) -> int:
        """Blocks on the device."""
        return self.keys.shape[1]

    @property
    def num_host_blocks(self) -> int:
        """Blocks in the host buffer."""
        return len(self.host_keys)

    @property
    def block_size(self) -> int:
        """Token slots in a block."""
        return self.keys.shape[3]

    def swap(self, out: abc.Sequence[BlockPair], back: abc.Sequence[BlockPair]) -> None:
        """Copy whole blocks `out` to the host buffer, then `back` from it; pairs are (block, host block).

        On a GPU the copies are enqueued on the current stream and not waited for.
        """
        pairs = [
            pair for part in self.by_heads for pair in ((part.keys, part.host_keys), (part.values, part.host_values))
        ]
        for block, host_block in out:
            for tensor, host in pairs:
                host[host_block].copy_(tensor[:, block], non_blocking=True)
        for block, host_block in back:
            for tensor, host in pairs:
                tensor[:, block].copy_(host[host_block], non_blocking=True)

    def seconds_per_block(self) -> float:
        """Measure the seconds to copy one block one way. Overwrites blocks: call it on an unused cache."""
        count = min(_BLOCKS_TIMED, self.num_blocks, self.num_host_blocks)
        pairs = [(block, block) for block in range(count)]
        least = math.inf
        for _ in range(3):  # the first copy also faults in pages
            started = time.perf_counter()
            self.swap(pairs, pairs)
            if self.keys.is_cuda:
                torch.cuda.synchronize(self.keys.device)
            least = min(least, time.perf_counter() - started)
        return least / (2 * count)


def _zeros(size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size, device=device, dtype=dtype)
    # numpy.zeros leaves zeroing to the kernel, which allocates a page on first write; torch.zeros would write all pages
    # now. NumPy has no bfloat16 or float8, so use integers of the same width: their zero has the same bits.
    bits = {1: np.int8, 2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(size, bits)).view(dtype)


def _host_zeros(size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return a buffer in host memory for copies to and from `device`."""
    if device.type == "cuda" and size[0]:
        return pinned(size, dtype, "--swap-space")
    return _zeros(size, torch.device("cpu"), dtype)


def pinned(size: tuple[int, ...], dtype: torch.dtype, needed_by: str) -> torch.Tensor:
    """Return zeroed, page-locked host memory, which a GPU copies to and from while the host continues.

    It takes no more than its size. torch's own pinned memory takes the next power of two.

    Args:
        size: of the tensor.
        dtype: of the tensor.
        needed_by: what it is for, in the error message: a setting that can be lowered, or other words.

    Raises:
        ConfigError: if the driver does not pin it.
    """
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize)
    address, runtime = np.frombuffer(memory, np.uint8).ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if error := int(runtime.cudaHostRegister(address, len(memory), _PORTABLE)):
        lower_it = "lower it or " if needed_by.startswith("--") else ""
        raise ConfigError(
            f"{needed_by}: the driver does not pin {len(memory) >> 20} MiB of host memory (CUDA error {error}): "
            f"{lower_it}give the container or machine more memory"
        )
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(size)

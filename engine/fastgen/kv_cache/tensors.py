"""The paged KV cache's tensors, and the host buffer that preempted sequences are swapped to."""

from __future__ import annotations

import math
import time
from collections import abc
from collections.abc import Iterator
from itertools import islice

import numpy as np
import torch

from fastgen.kv_cache.prefault import PagesAhead
from fastgen.kv_cache.sizing import KVShape

# Blocks copied at once: what is gathered on the way stays small beside the cache.
_BLOCKS_AT_ONCE = 32
_BLOCKS_TIMED = 4

BlockPair = tuple[int, int]


class KVCache:
    """Keys and values of all layers, each [layers, blocks, kv heads, block size, head_dim], and their host buffer.

    Zeroed, so that slots nobody has written hold no NaN.

    Attributes:
        keys, values: on the model's device; the head sizes of the two may differ.
        host_keys, host_values: the same with the host buffer's blocks, in host memory.
        pages: takes the memory of keys and values ahead of use; None where a device has taken it.
    """

    def __init__(
        self,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        def size(blocks: int, head_dim: int) -> tuple[int, ...]:
            return (shape.num_layers, blocks, shape.num_kv_heads, block_size, head_dim)

        on = torch.device(device)
        self.keys = _zeros(size(num_blocks, shape.key_dim), on, dtype)
        self.values = _zeros(size(num_blocks, shape.value_dim), on, dtype)
        self.pages = PagesAhead((self.keys, self.values)) if on.type == "cpu" else None
        # Pages that a GPU reads and writes must not move: pinned. They are zeroed by the first swap that fills them.
        pin = on.type == "cuda" and num_host_blocks > 0
        host = torch.device("cpu")
        self.host_keys, self.host_values = (
            torch.empty(size(num_host_blocks, dim), dtype=dtype, pin_memory=True)
            if pin
            else _zeros(size(num_host_blocks, dim), host, dtype)
            for dim in (shape.key_dim, shape.value_dim)
        )

    @property
    def num_blocks(self) -> int:
        """Blocks on the device."""
        return self.keys.shape[1]

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host buffer."""
        return self.host_keys.shape[1]

    @property
    def block_size(self) -> int:
        """Token slots of a block."""
        return self.keys.shape[3]

    def swap(self, out: abc.Sequence[BlockPair], back: abc.Sequence[BlockPair]) -> None:
        """Copies whole blocks: `out` to the host buffer, then `back` from it; pairs are (block, host block)."""
        for blocks, host_blocks in _batches(out):
            _copy(self.keys, blocks, self.host_keys, host_blocks)
            _copy(self.values, blocks, self.host_values, host_blocks)
        for blocks, host_blocks in _batches(back):
            _copy(self.host_keys, host_blocks, self.keys, blocks)
            _copy(self.host_values, host_blocks, self.values, blocks)

    def seconds_per_block(self) -> float:
        """What copying a block one way takes, measured over a few of them. For a cache that nobody uses yet."""
        count = min(_BLOCKS_TIMED, self.num_blocks, self.num_host_blocks)
        pairs = [(block, block) for block in range(count)]
        least = math.inf
        for _ in range(3):  # the first time, memory is taken from the system too
            started = time.perf_counter()
            self.swap(pairs, pairs)
            if self.keys.is_cuda:
                torch.cuda.synchronize(self.keys.device)
            least = min(least, time.perf_counter() - started)
        return least / (2 * count)


def _zeros(size: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(size, device=device, dtype=dtype)
    # By NumPy, which leaves zeroing to the kernel: a page of memory is taken when it is first written, while torch
    # would write all of them now. NumPy has no bfloat16: integers of the same width are zero in the same bits.
    bits = {2: np.int16, 4: np.int32}[dtype.itemsize]
    return torch.from_numpy(np.zeros(size, bits)).view(dtype)


def _batches(pairs: abc.Sequence[BlockPair]) -> Iterator[tuple[list[int], list[int]]]:
    rest = iter(pairs)
    while batch := list(islice(rest, _BLOCKS_AT_ONCE)):
        yield [block for block, _ in batch], [host_block for _, host_block in batch]


def _copy(source: torch.Tensor, source_blocks: list[int], target: torch.Tensor, target_blocks: list[int]) -> None:
    """All layers' blocks at once, over devices."""
    moved = source.index_select(1, torch.tensor(source_blocks, device=source.device)).to(target.device)
    target.index_copy_(1, torch.tensor(target_blocks, device=target.device), moved)

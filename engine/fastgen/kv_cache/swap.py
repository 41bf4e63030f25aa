"""Copies blocks of swapped sequences to the host buffer and back, on a stream of their own on a GPU."""

from __future__ import annotations

from collections import abc
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt
import torch

from fastgen.kv_cache.tensors import BlockPair, KVCache


class CUDAStreams:
    """The current stream of a GPU, for forward passes, and one for copies. The host waits for neither."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copying(self) -> AbstractContextManager[object]:
        """Return a context in which work is enqueued on the stream of copies."""
        return torch.cuda.stream(self._copies)

    def copies_wait(self) -> None:
        """Make later copies wait for the forward passes enqueued so far."""
        self._copies.wait_stream(torch.cuda.current_stream(self._device))

    def forward_waits(self) -> None:
        """Make later forward passes wait for the copies enqueued so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._copies)


class Swapper:
    """Orders the copies of blocks and the forward passes that use them, without waiting for the device.

    A swap-out reads blocks that earlier forward passes wrote, so it waits for them. A forward pass that does not write
    these blocks runs beside it. A swap-in writes blocks that no step in flight uses, because the scheduler frees blocks
    only when no step in flight reads or writes them: it may run beside earlier forward passes, and the next one waits
    for it.
    All copies run on one stream, in the order of their steps.

    Args:
        cache: the cache and its host buffer.
        streams: the device's streams; None to copy at once.
    """

    def __init__(self, cache: KVCache, streams: CUDAStreams | None) -> None:
        self._cache = cache
        self._streams = streams
        # Blocks that copies may still read, although they are free.
        self._leaving: set[int] = set()

    def enqueue(
        self, out: abc.Sequence[BlockPair], back: abc.Sequence[BlockPair], slot_mapping: npt.NDArray[np.int32]
    ) -> None:
        """Enqueue the copies of a step, before its forward pass, which may then use all its blocks.

        Args:
            out: (block, host block) pairs to copy to the host buffer.
            back: pairs to copy back after that.
            slot_mapping: the slots that the step writes.
        """
        streams = self._streams
        if streams is None:
            self._cache.swap(out, back)
            return
        if out:
            streams.copies_wait()
        if out or back:
            with streams.copying():
                self._cache.swap(out, back)
            self._leaving.update(block for block, _ in out)
        if back or (self._leaving and not self._leaving.isdisjoint((slot_mapping // self._cache.block_size).tolist())):
            streams.forward_waits()
            self._leaving.clear()

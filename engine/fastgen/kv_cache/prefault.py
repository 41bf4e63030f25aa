"""Prefault KV cache memory before a step needs it. See docs/decisions/012-prefault-kv-cache-memory.md.

The kernel allocates a page of the cache when it is first written, in the middle of a step. As the cache fills up, all
layers fault in new pages at the same time. Where that is slow, as in a virtual machine whose host overcommits memory,
steps of 0.2 s took 0.3 s.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

import torch

log = logging.getLogger("fastgen.model")

AHEAD_BYTES = 256 << 20
# The thread rests this many times as long as a call took, so that it does not take a core from the steps.
_REST = 9
_LONGEST_REST_SECONDS = 0.1  # the process waits for the thread when it exits
_BYTES_PER_CALL = 2 << 20  # one huge page: a longer call blocks other threads from changing the memory map
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14
_PAGE = os.sysconf("SC_PAGE_SIZE")

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Prefaulter:
    """Faults in cache pages in block order, up to `AHEAD_BYTES` beyond the highest block in use.

    `start` faults in the first blocks. As blocks are used, a thread continues, which rests most of the time. The
    thread's priority is not lowered: it holds the lock of the memory map in each call, and a step that needs the lock
    would wait until the thread gets a core again. If the kernel lacks MADV_POPULATE_WRITE, pages are faulted in as they
    are written.

    The thread ends with the main thread. It is not a daemon thread: Python unwinds the stack of those at exit, which
    aborts the process if the stack has C++ frames of torch.

    Args:
        tensors: each [layers, blocks, ...], all with as many blocks, contiguous, in host memory; some may have no
            layers. They are not kept alive.
        ahead_bytes: how far to stay ahead.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], ahead_bytes: int = AHEAD_BYTES) -> None:
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._layers = [(number, layer) for number, tensor in enumerate(tensors) for layer in range(len(tensor))]
        self._num_blocks = tensors[0].shape[1]
        block_bytes = [tensor.stride(1) * tensor.itemsize for tensor in tensors]
        all_layers = sum(size * tensor.shape[0] for size, tensor in zip(block_bytes, tensors, strict=True))
        self._ahead = max(1, ahead_bytes // max(1, all_layers))
        self._step = max(1, _BYTES_PER_CALL // max(1, *block_bytes))
        self._end = 0  # blocks before this one are prefaulted, or being prefaulted
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Prefault the first blocks and wait for that. Call it once, before `ensure_ahead_of`."""
        assert self._end == 0
        self._end = min(self._num_blocks, 1 + self._ahead)
        for _ in self._populate(0, self._end):
            pass

    def ensure_ahead_of(self, block: int) -> None:
        """Prefault beyond `block`, which is in use or soon will be. Returns at once."""
        if self._end == self._num_blocks or self._end - block > self._ahead // 2:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        first, self._end = self._end, min(self._num_blocks, block + 1 + self._ahead)
        self._thread = threading.Thread(target=self._run, args=(first, self._end), name="prefault")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the prefaulting started so far has finished."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, first: int, end: int) -> None:
        for seconds in self._populate(first, end):
            if not threading.main_thread().is_alive():
                return
            time.sleep(min(_REST * seconds, _LONGEST_REST_SECONDS))

    def _populate(self, first: int, end: int) -> Iterator[float]:
        """Prefault blocks `first` to `end - 1`; yield the seconds of each call.

        Ends early if the cache has been freed, or the kernel refuses.
        """
        for block in range(first, end, self._step):
            for number, layer in self._layers:
                tensor = self._tensors[number]()
                if tensor is None:
                    return
                began = time.monotonic()
                if not _populate(tensor[layer], block, min(end, block + self._step)):
                    log.info("KV cache memory is not prefaulted: madvise: %s", os.strerror(ctypes.get_errno()))
                    self._end = self._num_blocks
                    return
                del tensor  # not kept alive while this thread waits for a core
                yield time.monotonic() - began


def _populate(layer: torch.Tensor, first: int, end: int) -> bool:
    """Fault in the pages of blocks `first` to `end - 1` of a layer [blocks, ...].

    Return False if the kernel refuses.
    """
    block_bytes = layer.stride(0) * layer.itemsize
    address = layer.data_ptr() + first * block_bytes
    start = address // _PAGE * _PAGE
    return not _madvise(start, address + (end - first) * block_bytes - start, _POPULATE_WRITE)

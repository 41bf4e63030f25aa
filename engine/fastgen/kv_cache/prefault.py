"""Prefault KV cache memory before a step needs it. See docs/decisions/012-prefault-kv-cache-memory.md.

The kernel allocates a page of the cache when it is first written, in the middle of a step. As the cache fills up, all
layers fault in new pages at the same time. Where that is slow, as in a virtual machine whose host overcommits memory,
steps of 0.2 s took 0.3 s.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import weakref
from collections.abc import Sequence

import torch

log = logging.getLogger("fastgen.model")

AHEAD_BYTES = 1 << 30
# Lowest ordinary priority, but not SCHED_IDLE: the thread briefly holds locks that a step may wait for.
_NICENESS = 19
_BYTES_PER_CALL = 2 << 20  # one huge page: a longer call blocks other threads from changing the memory map
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14
_PAGE = os.sysconf("SC_PAGE_SIZE")

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Prefaulter:
    """Faults in cache pages in block order, up to `AHEAD_BYTES` beyond the highest block in use.

    Runs in a low-priority thread. If the kernel lacks MADV_POPULATE_WRITE, pages are faulted in as they are written.
    The thread ends with the main thread. It is no daemon: when Python exits, it unwinds the stack of a daemon thread,
    which aborts the process if the stack has C++ frames of torch.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], ahead_bytes: int = AHEAD_BYTES) -> None:
        """Take `tensors`, each [layers, blocks, ...], contiguous, in host memory. They are not kept alive."""
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._num_blocks = tensors[0].shape[1]
        block_bytes = [tensor.stride(1) * tensor.itemsize for tensor in tensors]
        all_layers = sum(size * tensor.shape[0] for size, tensor in zip(block_bytes, tensors, strict=True))
        self._ahead = max(1, ahead_bytes // all_layers)
        self._step = max(1, _BYTES_PER_CALL // max(block_bytes))
        self._end = 0  # blocks before this one are prefaulted, or being prefaulted
        self._thread: threading.Thread | None = None

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
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        for block in range(first, end, self._step):
            if not threading.main_thread().is_alive():
                return
            for reference in self._tensors:
                tensor = reference()
                if tensor is None:
                    return
                if not _populate(tensor, block, min(end, block + self._step)):
                    log.info("KV cache memory is not prefaulted: madvise: %s", os.strerror(ctypes.get_errno()))
                    self._end = self._num_blocks
                    return
                del tensor  # not kept alive while this thread waits for a core


def _populate(tensor: torch.Tensor, first: int, end: int) -> bool:
    """Fault in the pages of blocks `first` to `end` in every layer; return False if the kernel refuses."""
    layer_bytes, block_bytes = (tensor.stride(dim) * tensor.itemsize for dim in (0, 1))
    for layer in range(tensor.shape[0]):
        address = tensor.data_ptr() + layer * layer_bytes + first * block_bytes
        start = address // _PAGE * _PAGE
        if _madvise(start, address + (end - first) * block_bytes - start, _POPULATE_WRITE):
            return False
    return True

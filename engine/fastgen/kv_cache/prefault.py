"""Takes memory from the system before it is needed. See docs/decisions/012.

A page of the KV cache is the system's to give when it is first written, which is in the middle of a pass. As a cache
fills up, all its layers need new pages at the same time; where the system has to find them first, as in a virtual
machine whose host lends it memory, passes of 0.2 s were seen to take 0.3.
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
# It gives way, but not as an idle task does: it holds locks for a moment that passes may wait for.
_NICENESS = 19
_AT_ONCE = 2 << 20  # a huge page: a call that takes several keeps others from changing the memory map
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14
_PAGE = os.sysconf("SC_PAGE_SIZE")

_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class PagesAhead:
    """Takes the pages of a cache's blocks, in order, until `AHEAD_BYTES` of them lie beyond the highest block in use.

    A thread does it that gives way to passes. Where the system knows no such way, pages come as they are written.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], ahead_bytes: int = AHEAD_BYTES) -> None:
        """`tensors`: [layers, blocks, ...] each, contiguous, in host memory. They are not kept alive."""
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        self._num_blocks = tensors[0].shape[1]
        block_bytes = [tensor.stride(1) * tensor.itemsize for tensor in tensors]
        all_layers = sum(size * tensor.shape[0] for size, tensor in zip(block_bytes, tensors, strict=True))
        self._ahead = max(1, ahead_bytes // all_layers)
        self._step = max(1, _AT_ONCE // max(block_bytes))
        self._end = 0  # blocks whose pages were taken, or are being taken
        self._thread: threading.Thread | None = None

    def reach(self, block: int) -> None:
        """Takes note that a block is in use, or is soon. Returns at once."""
        if self._end == self._num_blocks or self._end - block > self._ahead // 2:
            return
        if self._thread is not None and self._thread.is_alive():
            return
        first, self._end = self._end, min(self._num_blocks, block + 1 + self._ahead)
        self._thread = threading.Thread(target=self._take, args=(first, self._end), name="pages", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the pages asked for so far are there."""
        if self._thread is not None:
            self._thread.join()

    def _take(self, first: int, end: int) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        for block in range(first, end, self._step):
            for reference in self._tensors:
                tensor = reference()
                if tensor is None:
                    return
                if not _populate(tensor, block, min(end, block + self._step)):
                    log.info("the KV cache's memory is not taken ahead: %s", os.strerror(ctypes.get_errno()))
                    self._end = self._num_blocks
                    return
                del tensor  # not kept alive while this thread waits for a core


def _populate(tensor: torch.Tensor, first: int, end: int) -> bool:
    """Takes the pages of blocks `first` to `end` of every layer; False where the system refuses."""
    layer_bytes, block_bytes = (tensor.stride(dim) * tensor.itemsize for dim in (0, 1))
    for layer in range(tensor.shape[0]):
        address = tensor.data_ptr() + layer * layer_bytes + first * block_bytes
        start = address // _PAGE * _PAGE
        if _madvise(start, address + (end - first) * block_bytes - start, _POPULATE_WRITE):
            return False
    return True

"""Reads matrices in several threads and copies them to a device, while the caller goes on.

A thread that reads a mapped file waits for the disk page by page, and a copy of pageable memory waits for the GPU. So
each thread reads a piece into one of two pinned buffers while the GPU copies the other on the thread's own stream. The
device converts stored types, so the host never has a copy of the weights.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

from fastgen.kernels.cpu.environment import usable_cpus
from fastgen.kv_cache.tensors import pinned
from fastgen.model.checkpoint.checkpoint import Readable

PIECE_BYTES = 16 << 20
_MOST_THREADS = 4


class Copier(Protocol):
    """Copies tensors to a device. Only one thread uses it."""

    def copy(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Start to copy a tensor to one of the same shape and maybe another type; `values` can be dropped then."""

    def wait(self) -> None:
        """Wait for all copies."""


class PinnedCopier:
    """Copies to a GPU through two pinned buffers, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        buffers = [pinned((PIECE_BYTES,), torch.uint8, needed_by="the weights") for _ in range(2)]
        self._turns = deque((buffer, torch.cuda.Event(blocking=True)) for buffer in buffers)  # type: ignore[no-untyped-call]

    def copy(self, values: torch.Tensor, target: torch.Tensor) -> None:
        """Start to copy a tensor, piece by piece; the last pieces may be on their way afterwards."""
        if values.device.type != "cpu":
            target.copy_(values)
            return
        # The target's memory may have been freed by work that the GPU has not finished.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        source, goal = values.reshape(-1), target.view(-1)
        size = PIECE_BYTES // values.element_size()
        pieces = zip(source.split(size), goal.split(size), strict=True)  # type: ignore[no-untyped-call]
        for piece, part in pieces:
            buffer, copied = self._turns[0]
            self._turns.rotate(1)
            copied.synchronize()
            staged = buffer[: piece.nbytes].view(piece.dtype)
            read_into(staged, piece)
            with torch.cuda.stream(self._stream):
                # A copy between types would convert on the host.
                sent = staged.to(self._device, non_blocking=True) if part.dtype != piece.dtype else staged
                part.copy_(sent, non_blocking=True)
                copied.record()

    def wait(self) -> None:
        """Wait for all copies."""
        self._stream.synchronize()


def read_into(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values of one type on the host in this thread alone: torch would start threads of its own for it."""
    np.copyto(buffer.view(torch.uint8).numpy(), values.view(torch.uint8).numpy())


class WeightReader(AbstractContextManager["WeightReader"]):
    """Reads matrices in threads.

    Leaving the context waits for the matrices, unless its body failed, and ends the threads.

    Args:
        device: of the matrices.
        make_copier: called in each thread.
        num_threads: each has at most one tensor in memory, if the checkpoint has to unpack it.
    """

    def __init__(self, device: torch.device, make_copier: Callable[[], Copier], num_threads: int | None = None) -> None:
        self._device = device
        self._make_copier = make_copier
        num_threads = num_threads or min(_MOST_THREADS, usable_cpus())
        self._pool = ThreadPoolExecutor(num_threads, "weights")
        # Tensors that wait for a thread: few, so that the caller's progress is that of the threads.
        self._places = threading.BoundedSemaphore(2 * num_threads)
        self._own = threading.local()
        self._copiers: list[Copier] = []
        self._reads: deque[Future[None]] = deque()

    def read(self, parts: Sequence[Readable], dtype: torch.dtype) -> torch.Tensor:
        """Return the rows of matrices [rows, in] on the device; they are complete after `wait`.

        Raises:
            ConfigError: as `pinned`, if `make_copier` makes a `PinnedCopier`.
            ModelError: if an earlier matrix cannot be read.
        """
        rows = [part.shape[0] for part in parts]
        matrix = torch.empty(sum(rows), *parts[0].shape[1:], dtype=dtype, device=self._device)
        targets = matrix.split(rows)  # type: ignore[no-untyped-call]
        for part, target in zip(parts, targets, strict=True):
            self._places.acquire()
            self._reads.append(self._pool.submit(self._read, part, target))
        while self._reads and self._reads[0].done():
            self._reads.popleft().result()
        return matrix

    def wait(self) -> None:
        """Wait until all matrices are complete.

        Raises:
            ConfigError: as `read`.
            ModelError: if one cannot be read.
        """
        while self._reads:
            self._reads.popleft().result()
        for copier in self._copiers:
            copier.wait()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait until all matrices are complete, unless reading has failed; end the threads."""
        try:
            if kind is None:
                self.wait()
        finally:
            self._pool.shutdown(cancel_futures=True)

    def _read(self, part: Readable, target: torch.Tensor) -> None:
        try:
            if (copier := getattr(self._own, "copier", None)) is None:
                copier = self._own.copier = self._make_copier()
                self._copiers.append(copier)
            copier.copy(part.values(), target)
        finally:
            self._places.release()

"""A ring in shared memory, through which rank 0 sends messages to all other ranks.

One writer, and a reader in each of the other ranks, which reads every message. A message may be longer than the ring:
it is written piece by piece as the readers make room.
"""

from __future__ import annotations

import mmap
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

_CAPACITY = 1 << 20  # elements: the largest usual step, with a prompt of the whole token budget, takes a tenth
_POLL_SECONDS = 50e-6  # while the writer waits for room, which is rare
_CHECK_SECONDS = 0.25  # between two checks of a reader


@dataclass(frozen=True, slots=True)
class RingFiles:
    """File descriptors of a ring: processes that inherit them can open it.

    Attributes:
        memory: a memfd: it needs no name and no room in /dev/shm, and the kernel frees it with its last process.
        wakes: an eventfd for each reader, which waits for it without polling.
    """

    memory: int
    wakes: tuple[int, ...]

    @classmethod
    def create(cls, num_readers: int, capacity: int = _CAPACITY) -> RingFiles:
        """Create a ring for messages of int32 elements."""
        memory = os.memfd_create("fastgen-steps")
        os.ftruncate(memory, _header_bytes(num_readers) + 4 * capacity)
        return cls(memory, tuple(os.eventfd(0) for _ in range(num_readers)))

    @property
    def numbers(self) -> Sequence[int]:
        """All descriptors."""
        return self.memory, *self.wakes

    def close(self) -> None:
        """Close the descriptors of this process."""
        for number in self.numbers:
            os.close(number)


class Ring:
    """The ring as one process sees it.

    Counters are of elements since the start. Each has one writer and 8 aligned bytes, and waking a reader is a system
    call after the data is written, so a reader that sees a count sees the data before it.

    Attributes:
        beats: [readers], a number that each reader's process increases while it runs.
    """

    def __init__(self, files: RingFiles) -> None:
        self._wakes = files.wakes
        memory = mmap.mmap(files.memory, os.fstat(files.memory).st_size)
        header, num_readers = _header_bytes(len(files.wakes)), len(files.wakes)
        counters = np.frombuffer(memory, np.int64, header // 8)
        self._written, self._read = counters[:1], counters[1 : 1 + num_readers]
        self.beats = counters[1 + num_readers :]
        self._data = np.frombuffer(memory, np.int32, offset=header)

    def publish(self, message: IntArray, check: Callable[[], None]) -> None:
        """Send a message to all readers.

        Args:
            message: [n].
            check: called while there is no room; may raise an error to give up.
        """
        self._put(np.array([len(message)], np.int32), check)
        self._put(message, check)
        self._wake()

    def receive(self, reader: int, check: Callable[[], None] | None = None) -> IntArray:
        """Wait for the next message of a reader, and return it.

        Args:
            reader: its number.
            check: called now and then while there is none; may raise an error to give up.
        """
        (length,) = self._take(reader, 1, check)
        return self._take(reader, int(length), check)

    def _put(self, values: IntArray, check: Callable[[], None]) -> None:
        written, capacity = int(self._written[0]), len(self._data)
        while len(values):
            room = capacity - (written - int(self._read.min()))
            if not room:
                self._wake()
                check()
                time.sleep(_POLL_SECONDS)
                continue
            start = written % capacity
            piece = values[: min(room, capacity - start)]
            self._data[start : start + len(piece)] = piece
            values, written = values[len(piece) :], written + len(piece)
            self._written[0] = written

    def _take(self, reader: int, count: int, check: Callable[[], None] | None) -> IntArray:
        found, done = np.empty(count, np.int32), 0
        read, capacity = int(self._read[reader]), len(self._data)
        while done < count:
            available = int(self._written[0]) - read
            if not available:
                self._wait(self._wakes[reader], check)
                continue
            start = read % capacity
            size = min(available, capacity - start, count - done)
            found[done : done + size] = self._data[start : start + size]
            done, read = done + size, read + size
            self._read[reader] = read
        return found

    def _wait(self, wake: int, check: Callable[[], None] | None) -> None:
        while check is not None and not select.select([wake], [], [], _CHECK_SECONDS)[0]:
            check()
        os.eventfd_read(wake)

    def _wake(self) -> None:
        for wake in self._wakes:
            os.eventfd_write(wake, 1)


def _header_bytes(num_readers: int) -> int:
    return 8 * (1 + 2 * num_readers)

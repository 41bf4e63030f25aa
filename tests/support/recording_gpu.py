"""A stand-in for a GPU that computes nothing: it records the copies, waits and streams that the code asks of torch.

Tensors on the device `cuda` are torch's fake tensors, which have shapes but no memory. The streams and events of
`torch.cuda` only have names. So a test can tell how bytes would travel between host and device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from mmap import mmap
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

MAIN = "main"
# Operations that may copy to another device, and those whose result the host waits for.
_CONVERSIONS = {"_to_copy", "to"}
_WAITS = {"_local_scalar_dense", "item", "nonzero"}


@dataclass(frozen=True)
class Copy:
    """A copy between host and device.

    Attributes:
        to: `cuda` or `cpu`.
        stream: on which it was enqueued.
        pinned: whether the side on the host is pinned memory: a copy of other memory waits for the device.
        non_blocking: whether the host asked not to wait.
        shape: of what is copied.
    """

    to: str
    stream: str
    pinned: bool
    non_blocking: bool
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    """`who`, the host or a stream, waits for a stream, an event of that stream, or the device."""

    who: str
    of: str


@dataclass(eq=False)
class Stream:
    """Stands in for `torch.cuda.Stream`."""

    gpu: RecordingGPU
    name: str

    def wait_stream(self, other: Stream) -> None:
        self.gpu.record.append(Wait(self.name, other.name))

    def synchronize(self) -> None:
        self.gpu.record.append(Wait("host", self.name))


@dataclass
class Event:
    """Stands in for `torch.cuda.Event`; if it is not `blocking`, the host spins while it waits."""

    gpu: RecordingGPU
    blocking: bool = False
    of: str = "nothing"

    def record(self) -> None:
        self.of = f"event {len(self.gpu.record)} of {self.gpu.stream.name}"
        self.gpu.record.append(self)

    def synchronize(self) -> None:
        self.gpu.record.append(Wait("host", self.of))


@dataclass
class Runtime:
    """Stands in for CUDA's runtime, as `torch.cuda.cudart` returns it: bytes of registered host memory by address."""

    registered: dict[int, int] = field(default_factory=dict)
    most_bytes: int = 1 << 40

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:
        if sum(self.registered.values()) + size > self.most_bytes:
            return 2  # cudaErrorMemoryAllocation
        assert address not in self.registered
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@dataclass
class RecordingGPU:
    """The stand-in; `record` has copies, waits and events in the order in which they were enqueued."""

    record: list[Copy | Wait | Event] = field(default_factory=list)
    num_streams: int = 0

    def __post_init__(self) -> None:
        self.stream = Stream(self, MAIN)
        self.runtime = Runtime()
        self.pinned: set[int] = set()
        self.kept: list[object] = []  # so that no storage is used twice

    @property
    def copies(self) -> list[Copy]:
        return [entry for entry in self.record if isinstance(entry, Copy)]

    @property
    def waits(self) -> list[Wait]:
        return [entry for entry in self.record if isinstance(entry, Wait)]

    @contextmanager
    def installed(self) -> Iterator[torch.device]:
        """Replace torch's GPU inside, and return the device."""
        with ExitStack() as stack:
            for name, stand_in in (
                ("Stream", self._new_stream),
                ("Event", lambda **options: Event(self, **options)),
                ("stream", self._on),
                ("current_stream", lambda *_args: self.stream),
                ("synchronize", lambda *_args: self.record.append(Wait("host", "device"))),
                ("cudart", lambda: self.runtime),
                ("get_device_capability", lambda *_args: (9, 0)),
                ("get_device_properties", lambda *_args: SimpleNamespace(multi_processor_count=132)),
            ):
                stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
            stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda tensor: self._pin(tensor)))
            stack.enter_context(mock.patch.object(torch, "frombuffer", self._over))
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            stack.enter_context(_Recording(self))
            yield torch.device("cuda", 0)

    def _new_stream(self, *_args: object, **_options: object) -> Stream:
        self.num_streams += 1
        return Stream(self, f"stream {self.num_streams}")

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.mark_pinned(torch.empty_like(tensor))

    def _over(self, buffer: mmap, dtype: torch.dtype) -> torch.Tensor:
        self.kept.append(buffer)
        tensor = torch.empty(len(buffer) // dtype.itemsize, dtype=dtype)
        return (
            self.mark_pinned(tensor)
            if np.frombuffer(buffer, np.uint8).ctypes.data in self.runtime.registered
            else tensor
        )

    def mark_pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        self.kept.append(tensor)
        self.pinned.add(_storage(tensor))
        return tensor

    def note_copy(self, source: torch.Tensor, target: torch.Tensor, *, non_blocking: bool) -> None:
        devices = {source.device.type, target.device.type}
        if devices == {"cpu", "cuda"}:
            host = source if source.device.type == "cpu" else target
            is_pinned = _storage(host) in self.pinned
            shape = tuple(target.shape)
            self.record.append(Copy(target.device.type, self.stream.name, is_pinned, non_blocking, shape))


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, gpu: RecordingGPU) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        is_pinned = options.pop("pin_memory", None)
        result = func(*args, **options)
        name = func.overloadpacket.__name__
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | options
        if is_pinned:
            self._gpu.mark_pinned(result)
        if name == "copy_":
            self._gpu.note_copy(given["src"], given["self"], non_blocking=given.get("non_blocking", False))
        elif name in _CONVERSIONS:
            self._gpu.note_copy(given["self"], result, non_blocking=given.get("non_blocking", False))
        elif name in _WAITS:
            self._gpu.record.append(Wait("host", "device"))
        return result


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)

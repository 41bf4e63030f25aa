"""Matrices are read in threads, through pinned buffers, without a copy of the weights on the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fastgen.model import ModelError
from fastgen.model.checkpoint.checkpoint import EmbeddingTable, StoredTensor
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.checkpoint.quantized.awq import AWQWeight
from fastgen.model.checkpoint.quantized.weight import QuantizedTensor
from fastgen.model.checkpoint.safetensors import FloatTensor
from fastgen.model.checkpoint.tensor_files import TensorFiles
from fastgen.model.config.quantization import AWQ
from fastgen.model.layers import weight_reader
from fastgen.model.layers.gpu_backend import GPUFormat
from fastgen.model.layers.weight_reader import PinnedCopier, WeightReader
from fastgen.model.layers.weights import DecoderWeights
from fastgen.model.native import open_checkpoint
from fastgen.model.source import ModelSource
from support.recording_gpu import MAIN, Copy, Event, RecordingGPU, Wait
from support.tiny_models import saved
from support.waiting import HANG_SECONDS, eventually

CPU = torch.device("cpu")


@dataclass
class Stored:
    """A stored matrix; `read` is called before its values are returned."""

    matrix: torch.Tensor
    read: Callable[[], object] = lambda: None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.matrix.shape)

    def values(self) -> torch.Tensor:
        self.read()
        return self.matrix

    def float32(self) -> torch.Tensor:
        raise AssertionError("six times as slow as the stored type")

    def int8(self) -> Int8Blocks:
        raise NotImplementedError

    def table(self) -> EmbeddingTable:
        raise NotImplementedError


@dataclass
class DelayedCopier:
    """Stands in for a GPU's copier: it copies when it is waited for, as late as a stream may."""

    enqueued: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def copy(self, values: torch.Tensor, target: torch.Tensor) -> None:
        self.enqueued.append((values.clone(), target))

    def wait(self) -> None:
        while self.enqueued:
            values, target = self.enqueued.pop()
            target.copy_(values)


def matrices(count: int) -> list[torch.Tensor]:
    return [torch.randn(2 + number, 6).bfloat16() for number in range(count)]


@pytest.mark.parametrize("num_threads", [1, 3])
def test_matrices_are_complete_after_the_wait_and_not_before(num_threads: int) -> None:
    stored = matrices(40)
    with WeightReader(CPU, DelayedCopier, num_threads) as reader:
        read = [reader.read([Stored(one), Stored(one)], torch.float32) for one in stored]
    for matrix, one in zip(read, stored, strict=True):
        assert torch.equal(matrix, torch.cat([one, one]).float())


def test_several_threads_read_while_the_caller_goes_on() -> None:
    both = threading.Barrier(3)
    with WeightReader(CPU, DelayedCopier, 2) as reader:
        for one in matrices(2):
            reader.read([Stored(one, lambda: both.wait(HANG_SECONDS))], torch.float32)
        both.wait(HANG_SECONDS)  # the caller is here while both threads read


def test_the_caller_waits_while_many_matrices_are_not_read() -> None:
    """Otherwise the progress would be 100 % before anything is read."""
    gate, begun = threading.Event(), []
    reader = WeightReader(CPU, DelayedCopier, 2)

    def submit() -> None:
        for number, one in enumerate(matrices(10)):
            reader.read([Stored(one, lambda: gate.wait(HANG_SECONDS))], torch.float32)
            begun.append(number)

    caller = threading.Thread(target=submit)
    caller.start()
    eventually(lambda: len(begun) == 4, within=60, what="four matrices", every=0.01)
    caller.join(0.3)
    assert len(begun) == 4
    gate.set()
    caller.join(HANG_SECONDS)
    assert len(begun) == 10
    with reader:
        reader.wait()


def fail() -> None:
    raise ModelError("tensor x cannot be read")


def test_a_matrix_that_cannot_be_read_ends_the_load() -> None:
    submitted = threading.Event()

    def fail_later() -> None:
        assert submitted.wait(HANG_SECONDS)
        fail()

    def load() -> None:
        with WeightReader(CPU, DelayedCopier, 2) as reader:
            reader.read([Stored(matrices(1)[0], fail_later)], torch.float32)
            submitted.set()

    with pytest.raises(ModelError, match="tensor x cannot be read"):
        load()


def test_after_a_failure_the_rest_is_not_read() -> None:
    num_read: list[None] = []

    def load() -> None:
        with WeightReader(CPU, DelayedCopier, 1) as reader:
            for number in range(100):
                read = fail if number == 3 else lambda: num_read.append(None)
                reader.read([Stored(matrices(1)[0], read)], torch.float32)

    with pytest.raises(ModelError, match="tensor x"):
        load()
    assert len(num_read) < 10


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe"])
def test_a_model_read_in_threads_has_the_weights_of_one_read_without(family: str, tmp_path: Path) -> None:
    source = ModelSource.open(str(saved(family, tmp_path)))

    def load(reader: WeightReader | None) -> DecoderWeights:
        weight_format = GPUFormat(CPU, torch.float16, reader)
        return DecoderWeights.load(source.architecture, open_checkpoint(source), weight_format, lambda _fraction: None)

    before = threading.active_count()
    ours, reference = load(WeightReader(CPU, DelayedCopier, 3)), load(None)
    assert threading.active_count() == before
    for one, other in zip(tensors(ours), tensors(reference), strict=True):
        assert torch.equal(one, other)
    assert source.architecture.tie_word_embeddings == (ours.embedding.matrix is ours.head.weight)  # type: ignore[attr-defined]


def tensors(value: Any) -> list[torch.Tensor]:
    """Return all tensors of a model's weights, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for each in value for tensor in tensors(each)]
    names = getattr(type(value), "__slots__", getattr(value, "__dict__", ()))
    return [tensor for name in names if name != "architecture" for tensor in tensors(getattr(value, name))]


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Storage and bytes of each buffer that was filled. The recording GPU has no memory to read into."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(weight_reader, "read_into", lambda buffer, _: found.append((id(buffer), buffer.nbytes)))
    monkeypatch.setattr(weight_reader, "PIECE_BYTES", 64)
    return found


def test_pieces_travel_through_two_pinned_buffers_on_a_stream_of_their_own(pieces: list[tuple[int, int]]) -> None:
    gpu = RecordingGPU()
    with gpu.installed() as device:
        copier = PinnedCopier(device)
        target = torch.empty(5, 20, dtype=torch.bfloat16, device=device)
        gpu.record.clear()
        copier.copy(torch.zeros(5, 20, dtype=torch.bfloat16), target)
        copier.wait()
    assert [size for _, size in pieces] == [64, 64, 64, 8]
    assert gpu.copies == [Copy("cuda", "stream 1", True, True, (count,)) for count in (32, 32, 32, 4)]
    assert sum(gpu.runtime.registered.values()) == 2 * 64
    # Memory of the target that the main stream has freed is not overwritten before that is done.
    assert gpu.record[0] == Wait("stream 1", MAIN)
    # A buffer is filled again only when its copy is done: each third piece waits for the event of the first.
    events = [f"event {index} of stream 1" for index, entry in enumerate(gpu.record) if isinstance(entry, Event)]
    waited = [wait.of for wait in gpu.waits if wait.who == "host"]
    assert waited == ["nothing", "nothing", *events[:2], "stream 1"]


def test_the_device_converts_stored_types(pieces: list[tuple[int, int]]) -> None:
    gpu = RecordingGPU()
    with gpu.installed() as device:
        target = torch.empty(5, 20, dtype=torch.float16, device=device)
        PinnedCopier(device).copy(torch.zeros(5, 20, dtype=torch.bfloat16), target)
    assert [size for _, size in pieces] == [64, 64, 64, 8], "of the stored type"
    assert [(copy.pinned, copy.non_blocking) for copy in gpu.copies] == [(True, True)] * 4


def test_buffers_are_filled_with_the_bytes_of_the_values() -> None:
    buffer, values = torch.zeros(6, dtype=torch.bfloat16), torch.randn(6).bfloat16()
    weight_reader.read_into(buffer, values)
    assert torch.equal(buffer, values)


class DeviceWithoutMemory:
    """torch's `meta` as the device, whose streams do nothing; files are read for real.

    Attributes:
        most: memory of this process that no file backs, at most while a buffer was filled.
    """

    device = torch.device("meta")
    most = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stream = Mock()
        for name, stand_in in (("Stream", stream), ("Event", stream), ("current_stream", stream)):
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
        monkeypatch.setattr(weight_reader, "pinned", lambda size, dtype, **_: torch.zeros(size, dtype=dtype))
        monkeypatch.setattr(weight_reader, "PIECE_BYTES", 1 << 20)
        read_into = weight_reader.read_into

        def measured(buffer: torch.Tensor, values: torch.Tensor) -> None:
            read_into(buffer, values)
            assert buffer[0] != 0
            self.most = max(self.most, anonymous_bytes())

        monkeypatch.setattr(weight_reader, "read_into", measured)

    def read(self, tensors: list[StoredTensor]) -> None:
        with WeightReader(self.device, lambda: PinnedCopier(self.device), 2) as reader:
            for tensor in tensors:
                reader.read([tensor], torch.float32)


def test_the_host_has_no_copy_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names, shape = [str(number) for number in range(32)], (1024, 2048)
    save_file({name: torch.ones(shape, dtype=torch.bfloat16) for name in names}, tmp_path / "weights.safetensors")
    file: Any = safe_open(tmp_path / "weights.safetensors", "pt")
    (device := DeviceWithoutMemory()).install(monkeypatch)
    before = anonymous_bytes()
    device.read([FloatTensor(partial(file.get_tensor, name), shape) for name in names])
    assert 0 < device.most - before < 32 << 20, "of 128 MiB of weights, and 256 MiB in float32"


def test_the_host_dequantises_one_matrix_for_each_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns, count = 1024, 2048, 16
    parts = {
        "qweight": torch.full((columns, rows // 8), 0x22222222, dtype=torch.int32),
        "qzeros": torch.full((columns // 64, rows // 8), 0x11111111, dtype=torch.int32),
        "scales": torch.ones(columns // 64, rows, dtype=torch.float16),
    }
    tensors = {f"{number}.{part}": value.clone() for number in range(count) for part, value in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    weights = [AWQWeight(files, str(number), AWQ(64)) for number in range(count)]
    (device := DeviceWithoutMemory()).install(monkeypatch)
    before = anonymous_bytes()
    device.read([QuantizedTensor(weight, 0, (rows, columns)) for weight in weights])
    assert 0 < device.most - before < 64 << 20, "of 128 MiB of weights in float32"


def anonymous_bytes() -> int:
    """Return the memory of this process that no file backs."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10

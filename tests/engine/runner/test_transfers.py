"""How bytes travel between host and GPU, as the code asks torch for it; see `support.recording_gpu`.

Swapped blocks take pinned buffers on a stream of their own. Arrays of a step and its sampled ids take pinned memory on
the main stream. The host waits for the ids alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.kernels.gpu.transfers import download, upload, upload_into
from fastgen.kv_cache.sizing import KVShape
from fastgen.kv_cache.swap import CUDAStreams, Swapper
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.step_input import StepInput, StepInputBuilder
from fastgen.runner.gpu_runner import GPURunner
from support.driving import sequence
from support.recording_gpu import MAIN, Copy, Event, RecordingGPU, Wait

BLOCK_SIZE, HIDDEN, VOCABULARY = 16, 8, 64
SHAPE = KVShape(2, 2, key_dim=8, value_dim=8, element_bytes=2)
BLOCK = (SHAPE.num_layers, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.key_dim)
COPIES = "stream 1"


def cache_on(device: torch.device) -> KVCache:
    return KVCache(SHAPE, 8, BLOCK_SIZE, num_host_blocks=4, device=device, dtype=torch.bfloat16)


def test_swapped_blocks_are_copied_through_pinned_buffers_on_a_stream_of_their_own() -> None:
    gpu = RecordingGPU()
    with gpu.installed() as device:
        swapper = Swapper(cache_on(device), CUDAStreams(device))
        gpu.record.clear()
        swapper.enqueue([(3, 0), (5, 1)], [(6, 2)], np.array([0], np.int32))
    out, back = (Copy(to, COPIES, pinned=True, non_blocking=True, shape=BLOCK) for to in ("cpu", "cuda"))
    keys_and_values = 2
    assert gpu.copies == [out] * 2 * keys_and_values + [back] * keys_and_values
    assert gpu.waits == [Wait(COPIES, MAIN), Wait(MAIN, COPIES)], "the host waits for nothing"


def test_arrays_are_uploaded_from_pinned_memory_without_waiting() -> None:
    gpu = RecordingGPU()
    with gpu.installed() as device:
        upload(np.zeros(5, np.int32), device)
        upload_into(np.zeros(5, np.int32), torch.empty(5, dtype=torch.int32, device=device))
    assert gpu.record == [Copy("cuda", MAIN, pinned=True, non_blocking=True, shape=(5,))] * 2


def test_a_download_is_a_pinned_copy_whose_event_alone_is_waited_for() -> None:
    gpu = RecordingGPU()
    with gpu.installed() as device:
        copy = download(torch.empty(7, dtype=torch.int32, device=device))
        assert not gpu.waits
        copy.wait()
    there, event, waited = gpu.record
    assert there == Copy("cpu", MAIN, pinned=True, non_blocking=True, shape=(7,))
    assert isinstance(event, Event)
    assert event.blocking, "the host spins while it waits"
    assert waited == Wait("host", event.of)


def step(builder: StepInputBuilder, *, swaps: bool) -> StepInput:
    decoding, prompt = sequence([5, 6, 7], [1]), sequence(list(range(3, 23)), [2, 3])
    decoding.num_computed_tokens = 2
    blocks = ((6, 0),) if swaps else ()
    return builder.build(StepPlan((Chunk(decoding, 2, 1), Chunk(prompt, 0, 20)), swap_out=blocks))


def test_a_step_returns_its_sampled_ids_by_one_pinned_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = RecordingGPU()
    with gpu.installed() as device:
        runner = runner_on(device, monkeypatch)
        gpu.record.clear()
        ticket = runner.launch(step(StepInputBuilder(BLOCK_SIZE), swaps=True))
        ticket.sample([])
        assert not [wait for wait in gpu.waits if wait.who == "host"], "launching and sampling wait for nothing"
        back = [copy for copy in gpu.copies if copy.to == "cpu" and copy.stream == MAIN]
        assert back == [Copy("cpu", MAIN, pinned=True, non_blocking=True, shape=(2,))]
        assert ticket._results is not None
        assert ticket._results.ids is not None
        ticket._results.ids.wait()
    assert all(copy.pinned and copy.non_blocking for copy in gpu.copies), gpu.copies
    assert any(copy.to == "cuda" and copy.stream == MAIN for copy in gpu.copies), "the input of the step"
    assert {copy.stream for copy in gpu.copies if copy.shape == BLOCK} == {COPIES}
    (event,) = (entry for entry in gpu.record if isinstance(entry, Event))
    assert [wait for wait in gpu.waits if wait.who == "host"] == [Wait("host", event.of)]


def runner_on(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> GPURunner:
    """Return a runner whose model and sampler compute nothing."""
    shape = SimpleNamespace(
        vocab_size=VOCABULARY, eos_token_ids=frozenset({0}), num_parameters=0, hidden_size=HIDDEN, num_layers=2
    )

    def rows_on_device(rows: int, *columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(rows, *columns, dtype=dtype, device=device)

    model: Any = SimpleNamespace(
        architecture=shape,
        device=device,
        dtype=torch.bfloat16,
        forward=lambda forward_input, _cache: rows_on_device(len(forward_input.logit_rows), HIDDEN),
        head=lambda hidden: rows_on_device(len(hidden), VOCABULARY),
    )
    runner = GPURunner(model, cache_on(device), max_model_length=64, max_sequences=4)
    monkeypatch.setattr(
        runner._sampler, "sample", lambda logits, *_rows: rows_on_device(len(logits), dtype=torch.int32)
    )
    return runner

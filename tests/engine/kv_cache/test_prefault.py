"""Prefaulting of KV cache memory."""

from __future__ import annotations

import gc
import logging
import mmap
import subprocess
import sys
import time
import weakref
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from fastgen.core.sampling_params import SamplingParams
from fastgen.kv_cache import prefault
from fastgen.kv_cache.prefault import Prefaulter
from fastgen.llm.llm import LLM
from support.demo_weights import demo_model
from support.waiting import PATIENCE, eventually

LAYERS, BLOCKS = 3, 512
BLOCK_BYTES = 1 << 16
PAGE = mmap.PAGESIZE


def untouched() -> torch.Tensor:
    """Return [layers, blocks, numbers]: 96 MiB without a single page faulted in."""
    memory = mmap.mmap(-1, LAYERS * BLOCKS * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.from_numpy(np.frombuffer(memory, np.float32)).view(LAYERS, BLOCKS, -1)


def present(tensor: torch.Tensor) -> torch.Tensor:
    """Return [layers, blocks]: whether all pages of a block are resident."""
    first, count = tensor.data_ptr() // PAGE, tensor.nbytes // PAGE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(first * 8)
        entries = np.frombuffer(file.read(count * 8), np.uint64)
    there = (entries >> np.uint64(63)).astype(bool)
    return torch.from_numpy(there).view(tensor.shape[0], tensor.shape[1], -1).all(-1)


def test_pages_of_every_layer_are_prefaulted_up_to_the_limit() -> None:
    tensor = untouched()
    assert not present(tensor).any()
    prefaulter = Prefaulter([tensor], 100 * LAYERS * BLOCK_BYTES)
    prefaulter.ensure_ahead_of(0)
    prefaulter.wait()
    resident = present(tensor)
    assert resident[:, :101].all()
    # With transparent huge pages the kernel may fault in a few more.
    assert not resident[:, 101 + 32 :].any()
    assert not tensor.any(), "prefaulted memory is zero"


def test_tensors_with_other_numbers_of_layers_are_prefaulted_too() -> None:
    tensors = untouched(), untouched()[:2]
    prefaulter = Prefaulter(tensors, 50 * 2 * LAYERS * BLOCK_BYTES)
    prefaulter.ensure_ahead_of(0)
    prefaulter.wait()
    assert all(present(tensor)[:, :50].all() for tensor in tensors)


def test_the_first_blocks_are_present_at_once() -> None:
    tensor = untouched()
    prefaulter = Prefaulter([tensor], 100 * LAYERS * BLOCK_BYTES)
    prefaulter.start()
    assert present(tensor)[:, :101].all()
    prefaulter.ensure_ahead_of(50)
    prefaulter.wait()
    assert not present(tensor)[:, 101 + 32 :].any(), "half of it is still ahead"
    prefaulter.ensure_ahead_of(51)
    prefaulter.wait()
    assert present(tensor)[:, :152].all()


def test_the_thread_rests_most_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(_layer: torch.Tensor, *_blocks: int) -> bool:
        began = time.monotonic()
        time.sleep(0.01)
        calls.append((began, time.monotonic()))
        return True

    calls: list[tuple[float, float]] = []
    monkeypatch.setattr(prefault, "_populate", slow)
    tensor = untouched()
    prefaulter = Prefaulter([tensor])
    prefaulter.ensure_ahead_of(0)
    eventually(lambda: len(calls) > 4, within=60, what="calls", every=0.01)
    del tensor
    prefaulter.wait()
    for (began, ended), (later, _) in pairwise(calls):
        assert later - ended >= min(9 * (ended - began), 0.1), "nine tenths are rest"


def test_prefaulting_continues_once_half_of_the_lead_is_used() -> None:
    tensor = untouched()
    prefaulter = Prefaulter([tensor], 100 * LAYERS * BLOCK_BYTES)
    prefaulter.ensure_ahead_of(0)
    prefaulter.wait()
    tensor[:, :51] = 7.0
    prefaulter.ensure_ahead_of(50)
    prefaulter.wait()
    assert not present(tensor)[:, 140:].any(), "half of it is still ahead"
    prefaulter.ensure_ahead_of(51)
    prefaulter.wait()
    assert present(tensor)[:, :152].all()
    assert (tensor[:, :51] == 7).all()
    assert not tensor[:, 51:].any()
    prefaulter.ensure_ahead_of(BLOCKS - 1)
    prefaulter.wait()
    assert present(tensor).all()


def test_the_prefaulter_does_not_keep_the_cache_alive() -> None:
    tensor = untouched()
    prefaulter = Prefaulter([tensor])
    gone = weakref.ref(tensor)
    prefaulter.ensure_ahead_of(0)
    del tensor
    prefaulter.wait()
    gc.collect()
    assert gone() is None
    prefaulter.ensure_ahead_of(BLOCKS - 1)
    prefaulter.wait()


def test_a_kernel_that_rejects_prefaulting_is_called_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def refuse(*arguments: int) -> int:
        calls.append(arguments)
        return -1

    monkeypatch.setattr(prefault, "_madvise", refuse)
    tensor = untouched()
    prefaulter = Prefaulter([tensor])
    with caplog.at_level(logging.INFO):
        for block in range(BLOCKS):
            prefaulter.ensure_ahead_of(block)
            prefaulter.wait()
    assert len(calls) == 1
    assert "not prefaulted" in caplog.text


@pytest.mark.slow
def test_a_loaded_model_has_prefaulted_its_cache() -> None:
    llm = LLM(str(demo_model()), kv_cache_memory="64MiB")
    keys = llm._runner._cache.keys
    assert present(keys.flatten(2)).all()
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0))[0].token_ids


def test_prefaulting_ends_with_the_program() -> None:
    """Python unwinds a daemon thread when it exits, which aborts the program in the C++ frames of torch."""
    program = """
import torch
from fastgen.kv_cache import prefault
ones = torch.ones(1 << 22)
prefault._populate = lambda layer, first, end: bool(ones.sum() > 0)
cache = torch.empty(1, 1 << 20, 2 << 10)
prefaulter = prefault.Prefaulter([cache], 1 << 60)
prefaulter.ensure_ahead_of(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120 * PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")

"""Memory that is taken before it is needed."""

from __future__ import annotations

import gc
import logging
import mmap
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from fastgen.core.request import SamplingParams
from fastgen.kv_cache import prefault
from fastgen.kv_cache.prefault import PagesAhead
from fastgen.llm.llm import LLM
from support.demo_weights import demo_model

LAYERS, BLOCKS = 3, 512
BLOCK_BYTES = 1 << 16
PAGE = mmap.PAGESIZE


def untouched() -> torch.Tensor:
    """[layers, blocks, numbers], 96 MiB of which the system has given nothing yet."""
    memory = mmap.mmap(-1, LAYERS * BLOCKS * BLOCK_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.from_numpy(np.frombuffer(memory, np.float32)).view(LAYERS, BLOCKS, -1)


def present(tensor: torch.Tensor) -> torch.Tensor:
    """[layers, blocks]: is all of the block's memory there?"""
    first, count = tensor.data_ptr() // PAGE, tensor.nbytes // PAGE
    with Path("/proc/self/pagemap").open("rb", buffering=0) as file:
        file.seek(first * 8)
        entries = np.frombuffer(file.read(count * 8), np.uint64)
    there = (entries >> np.uint64(63)).astype(bool)
    return torch.from_numpy(there).view(tensor.shape[0], tensor.shape[1], -1).all(-1)


def test_pages_of_every_layer_are_taken_ahead_and_no_more() -> None:
    tensor = untouched()
    assert not present(tensor).any()
    ahead = PagesAhead([tensor], 100 * LAYERS * BLOCK_BYTES)
    ahead.reach(0)
    ahead.wait()
    there = present(tensor)
    assert there[:, :101].all()
    # A system that makes huge pages of itself may give a few more.
    assert not there[:, 101 + 32 :].any()
    assert not tensor.any(), "what was taken is zero"


def test_more_is_taken_when_half_of_it_is_used() -> None:
    tensor = untouched()
    ahead = PagesAhead([tensor], 100 * LAYERS * BLOCK_BYTES)
    ahead.reach(0)
    ahead.wait()
    tensor[:, :51] = 7.0
    ahead.reach(50)
    ahead.wait()
    assert not present(tensor)[:, 140:].any(), "half of it is still ahead"
    ahead.reach(51)
    ahead.wait()
    assert present(tensor)[:, :152].all()
    assert (tensor[:, :51] == 7).all()
    assert not tensor[:, 51:].any()
    ahead.reach(BLOCKS - 1)
    ahead.wait()
    assert present(tensor).all()


def test_a_cache_that_is_let_go_is_not_kept() -> None:
    tensor = untouched()
    ahead = PagesAhead([tensor])
    gone = weakref.ref(tensor)
    ahead.reach(0)
    del tensor
    ahead.wait()
    gc.collect()
    assert gone() is None
    ahead.reach(BLOCKS - 1)
    ahead.wait()


def test_a_system_that_cannot_is_asked_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    asked = []

    def refuse(*arguments: int) -> int:
        asked.append(arguments)
        return -1

    monkeypatch.setattr(prefault, "_madvise", refuse)
    tensor = untouched()
    ahead = PagesAhead([tensor])
    with caplog.at_level(logging.INFO):
        for block in range(BLOCKS):
            ahead.reach(block)
            ahead.wait()
    assert len(asked) == 1
    assert "not taken ahead" in caplog.text


def test_a_model_that_serves_has_taken_memory_for_its_next_passes() -> None:
    llm = LLM(str(demo_model()), kv_cache_memory="64MiB")
    llm.wait_for_prefault()
    keys = llm._runner._cache.keys
    assert present(keys.flatten(2)).all()
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0))[0].token_ids

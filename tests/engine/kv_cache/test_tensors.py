"""Tensors of the KV cache and the host buffer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fastgen.kv_cache.sizing import KVShape
from fastgen.kv_cache.tensors import KVCache, pinned
from fastgen.settings import ConfigError
from support.recording_gpu import RecordingGPU, Runtime

SHAPE = KVShape(num_layers=3, num_kv_heads=2, key_dim=8, value_dim=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_cache_is_zeroed_and_has_the_configured_shape(dtype: torch.dtype) -> None:
    shape = KVShape(3, 2, 8, 4, dtype.itemsize)
    cache = KVCache(shape, 5, 16, num_host_blocks=7, dtype=dtype)
    assert (cache.num_blocks, cache.num_host_blocks, cache.block_size) == (5, 7, 16)
    assert cache.keys.dtype == cache.host_values.dtype == dtype
    assert not cache.keys.any()
    assert cache.keys.nbytes + cache.values.nbytes == 5 * shape.block_bytes(16)
    assert cache.host_keys.nbytes + cache.host_values.nbytes == 7 * shape.block_bytes(16)


def test_blocks_are_swapped_out_and_in_to_other_blocks() -> None:
    cache = KVCache(SHAPE, 90, 16, num_host_blocks=80)
    cache.keys.normal_()
    cache.values.normal_()
    keys, values = cache.keys.clone(), cache.values.clone()
    out = [(block, 79 - block) for block in range(70)]
    cache.swap(out, [])
    cache.keys[:, :70] = 0
    cache.values[:, :70] = 0
    cache.swap([], [(block + 5, host) for block, host in out[:40]])
    assert torch.equal(cache.keys[:, 5:45], keys[:, :40])
    assert torch.equal(cache.values[:, 5:45], values[:, :40])
    assert torch.equal(cache.values[:, 70:], values[:, 70:])
    assert not cache.keys[:, :5].any()
    assert not cache.keys[:, 45:70].any()


OTHERS = replace(SHAPE, others=KVShape(num_layers=2, num_kv_heads=1, key_dim=24, value_dim=24))


def test_layers_with_other_heads_take_no_more_than_their_own_keys_and_values() -> None:
    cache = KVCache(OTHERS, 5, 16, num_host_blocks=7)
    assert cache.others is not None
    assert cache.others.keys.shape == (2, 5, 1, 16, 24)
    assert OTHERS.layer_bytes == 48 * 4
    assert OTHERS.block_bytes(16) == 16 * 4 * (3 * 2 * (8 + 4) + 2 * 48)
    assert OTHERS.of_ranks(2).block_bytes(16) == 2 * OTHERS.block_bytes(16)
    device = [tensor for part in cache.by_heads for tensor in (part.keys, part.values)]
    host = [tensor for part in cache.by_heads for tensor in (part.host_keys, part.host_values)]
    assert sum(tensor.nbytes for tensor in device) == 5 * OTHERS.block_bytes(16)
    assert sum(tensor.nbytes for tensor in host) == 7 * OTHERS.block_bytes(16)


def test_a_block_is_swapped_with_the_layers_of_all_heads() -> None:
    cache = KVCache(OTHERS, 4, 16, num_host_blocks=2)
    tensors = [tensor for part in cache.by_heads for tensor in (part.keys, part.values)]
    for tensor in tensors:
        tensor.normal_()
    kept = [tensor[:, 3].clone() for tensor in tensors]
    cache.swap([(3, 1)], [])
    cache.swap([], [(0, 1)])
    assert all(torch.equal(tensor[:, 0], before) for tensor, before in zip(tensors, kept, strict=True))


def test_a_block_can_be_swapped_out_and_refilled_in_one_step() -> None:
    cache = KVCache(SHAPE, 2, 16, num_host_blocks=2)
    cache.keys[:, 0], cache.host_keys[1] = 1.0, 2.0
    cache.swap([(0, 0)], [(0, 1)])
    assert (cache.keys[:, 0] == 2).all()
    assert (cache.host_keys[0] == 1).all()


def test_the_host_buffer_of_a_gpu_pins_no_more_than_its_blocks() -> None:
    """torch's pinned memory would take the next power of two."""
    gpu = RecordingGPU()
    with gpu.installed() as device:
        KVCache(SHAPE, 5, 16, num_host_blocks=7, device=device)
    assert sum(gpu.runtime.registered.values()) == 7 * SHAPE.block_bytes(16)


def test_pinned_memory_is_zeroed_and_unregistered_before_it_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = pinned((3, 5), torch.bfloat16, "the weights")
    assert (memory.dtype, memory.shape, memory.any().item()) == (torch.bfloat16, (3, 5), False)
    assert runtime.registered == {memory.data_ptr(): 30}
    last = memory[2]
    del memory
    assert runtime.registered, "it is still used"
    del last
    assert not runtime.registered


def test_memory_that_the_driver_does_not_pin_is_an_error_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(most_bytes=1 << 20))
    with pytest.raises(ConfigError, match=r"^--swap-space: the driver does not pin 2 MiB.*: lower it or give"):
        pinned((2 << 20,), torch.int8, "--swap-space")
    with pytest.raises(ConfigError, match=r"^the weights: the driver does not pin 2 MiB.*: give the container"):
        pinned((2 << 20,), torch.int8, "the weights")

"""A model that cannot fit into the memory is rejected before its weights are read, and no other."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from benchmarks.sizing import MODELS, cpu_table, gpu_table

from fastgen.engine.build import load_on_ranks
from fastgen.kv_cache.memory import AvailableMemory
from fastgen.kv_cache.sizing import (
    gpu_cache_memory,
    host_cache_memory,
    plan_host_blocks,
    plan_kv_blocks,
    resolve_max_model_length,
    working_memory_bytes,
)
from fastgen.model.cache_shape import cache_shape
from fastgen.model.config.architecture import LayerEmbeddings, ModelArchitecture
from fastgen.model.source import ModelSource
from fastgen.runner import loader, memory_check
from fastgen.runner.memory_check import check_gpu_memory, check_host_memory
from fastgen.settings import ConfigError, EngineConfig

ROOT = Path(__file__).parents[3]
GIB = 1 << 30
NOWHERE = Path("model")


def source_of(architecture: ModelArchitecture | None, **fields: Any) -> ModelSource:
    return ModelSource(NOWHERE, architecture, NOWHERE, None, **fields)


def limit(monkeypatch: pytest.MonkeyPatch, num_bytes: int, *, limited: bool = True) -> None:
    monkeypatch.setattr(memory_check, "available_memory", lambda **_given: AvailableMemory(num_bytes, limited=limited))


def rejects(source: ModelSource, config: EngineConfig) -> bool:
    try:
        check_host_memory(source, config)
    except ConfigError:
        return True
    return False


def settings(**fields: Any) -> EngineConfig:
    return EngineConfig(model="m", **{"dtype": "float32", **fields})


def test_the_message_has_what_is_needed_and_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 24 * GIB)
    with pytest.raises(ConfigError) as error:
        check_host_memory(source_of(MODELS["Llama-3.1-8B"]), settings(max_model_length=8192))
    assert str(error.value) == (
        "the model needs 30.8 GiB of memory (weights 28.0, a step 0.6, KV cache and swap space 2.2), the container has "
        "24.0 left: raise its memory limit, lower --token-budget or --max-model-length, or use --quantization int8"
    )


def test_embeddings_for_each_layer_stay_as_they_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["Llama-3.1-8B"]
    embedded = replace(model, layer_embeddings=LayerEmbeddings(model.vocab_size, 256))
    added = embedded.num_parameters - model.num_parameters
    assert added > model.vocab_size * 256 * model.num_layers
    limit(monkeypatch, 32 * GIB)
    for each in (model, embedded):
        assert not rejects(source_of(each), settings(max_model_length=8192))
    limit(monkeypatch, 30 * GIB)
    assert rejects(source_of(embedded), settings(max_model_length=8192))


@pytest.mark.parametrize("seed", range(8))
def test_no_model_that_would_serve_is_rejected(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """As planned once the weights are loaded."""
    rng = random.Random(seed)
    served = 0
    for model in MODELS.values():
        dtype = rng.choice(["float32", "bfloat16"])
        config = settings(
            dtype=dtype,
            token_budget=rng.choice([64, 512]),
            max_sequences=16,
            max_model_length=rng.choice([None, 1024, 8192]),
            swap_space=rng.choice([0, GIB]),
            memory_percent=rng.choice([10, 90]),
        )
        element_bytes = 4 if dtype == "float32" else 2
        kv, weights = cache_shape(model, element_bytes), element_bytes * model.num_parameters
        needed = weights + working_memory_bytes(config, model, kv)
        memory = int(needed * rng.uniform(0.9, 1.3))
        limit(monkeypatch, memory)
        is_rejected = rejects(source_of(model), config)
        try:
            free = max(0, memory - needed)
            free -= plan_host_blocks(config, kv, free) * kv.block_bytes(config.block_size)
            blocks = plan_kv_blocks(config, model, kv, host_cache_memory(config, free, limited=True))
            resolve_max_model_length(config, model, kv, blocks)
        except ConfigError:
            continue
        served += 1
        assert not is_rejected
    assert served > 2


@pytest.mark.parametrize(
    ("fields", "gib", "is_rejected"),
    [
        ({}, 20, True),
        ({}, 40, False),
        ({"quantization": "int8"}, 20, False),
        ({"quantization": "int8"}, 6, True),
        ({"dtype": "float16"}, 1, False),  # torch may use the file's pages
        ({"kv_cache_memory": 30 * GIB}, 40, True),
        ({"swap_space": 30 * GIB}, 40, True),
    ],
)
def test_settings_decide_what_a_model_needs(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], gib: int, *, is_rejected: bool
) -> None:
    limit(monkeypatch, gib * GIB)
    assert rejects(source_of(MODELS["Llama-3.1-8B"]), settings(**fields)) == is_rejected


def test_what_is_not_known_is_not_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 8 * GIB)
    four_bits = cast(Any, object())  # its matrices may stay as they are stored
    assert not rejects(source_of(MODELS["Llama-3.1-8B"], quantization=four_bits), settings())
    assert not rejects(source_of(None), settings())  # transformers' code
    limit(monkeypatch, GIB, limited=False)  # other programs may free memory
    assert not rejects(source_of(MODELS["Llama-3.1-8B"]), settings())


@pytest.mark.parametrize("gib", [16, 22, 39])
def test_a_gpu_needs_room_for_the_weights_and_the_longest_request(gib: int) -> None:
    config, source = settings(device="cuda", max_model_length=8192), source_of(MODELS["Qwen3-14B"])

    def check(config: EngineConfig) -> None:
        check_gpu_memory(source, config, element_bytes=2, kv_bytes=2, free_bytes=gib * GIB, total_bytes=gib * GIB)

    if gib == 39:
        check(config)
        return
    with pytest.raises(
        ConfigError, match=rf"needs 28\.8 GiB of memory .*, the GPU has {gib * 0.9:.1f} left: use a GPU"
    ):
        check(config)


def test_the_gpus_of_all_ranks_together_need_room() -> None:
    source, sizes = source_of(MODELS["Qwen3-14B"]), {"free_bytes": 16 * GIB, "total_bytes": 16 * GIB}
    check_gpu_memory(source, settings(device="cuda", tensor_parallel=4), element_bytes=2, kv_bytes=2, **sizes)
    config = settings(device="cuda", max_model_length=40960, memory_percent=80, tensor_parallel=2)
    with pytest.raises(
        ConfigError, match=r"needs 33\.\d GiB of memory .*, the group of 2 GPUs has 25\.6 left: use a GPU"
    ):
        check_gpu_memory(source, config, element_bytes=2, kv_bytes=2, **sizes)


@pytest.mark.parametrize("seed", range(8))
def test_no_model_that_would_serve_on_a_gpu_is_rejected(seed: int) -> None:
    """As planned once the weights are loaded and the memory of a step is measured."""
    rng = random.Random(seed)
    served = 0
    for model in MODELS.values():
        config = settings(
            device="cuda",
            dtype="bfloat16",
            max_sequences=16,
            max_model_length=rng.choice([1024, 8192, model.max_position_embeddings]),
            memory_percent=rng.choice([50, 90]),
        )
        kv, weights = cache_shape(model, 2), 2 * model.num_parameters
        longest = -(-(config.max_model_length or 0) // config.block_size) * kv.block_bytes(config.block_size)
        total = int((weights + longest) / config.memory_percent * 100 * rng.uniform(0.95, 1.2))
        source, free = source_of(model), int(total * 0.99)
        try:
            check_gpu_memory(source, config, element_bytes=2, kv_bytes=2, free_bytes=free, total_bytes=total)
            is_rejected = False
        except ConfigError:
            is_rejected = True
        try:
            planned = gpu_cache_memory(config, total_bytes=total, free_bytes=max(0, free - weights), step_bytes=0)
            blocks = plan_kv_blocks(config, model, kv, planned)
            resolve_max_model_length(config, model, kv, blocks)
        except ConfigError:
            continue
        served += 1
        assert not is_rejected
    assert served > 2


def test_a_request_longer_than_the_models_positions_is_named_later(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["Llama-3.1-8B"]
    limit(monkeypatch, 80 * GIB)
    assert not rejects(source_of(model), settings(dtype="bfloat16", max_model_length=model.max_position_embeddings))
    assert not rejects(source_of(model), settings(dtype="bfloat16", max_model_length=1 << 24))


def test_nothing_is_loaded_of_a_model_that_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load_runner", lambda *_given: pytest.fail("it is loaded"))
    limit(monkeypatch, GIB)
    for size in (1, 2):
        with pytest.raises(ConfigError, match=r"the model needs .* GiB of memory"):
            load_on_ranks(source_of(MODELS["Llama-3.1-8B"]), settings(tensor_parallel=size), lambda _stage, _part: None)


def test_a_gpus_plan_leaves_no_more_than_the_check_expects() -> None:
    """The same share stays free."""
    config = settings(device="cuda")
    planned = gpu_cache_memory(config, total_bytes=24 * GIB, free_bytes=20 * GIB, step_bytes=0).default
    assert planned == 20 * GIB - 24 * GIB * 10 // 100


def test_the_page_has_the_tables_of_the_same_arithmetic() -> None:
    page = (ROOT / "docs/sizing.md").read_text()
    assert gpu_table() in page
    assert cpu_table() in page

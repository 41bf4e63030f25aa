"""Size of the KV cache and available memory."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from fastgen.core.blocks.window_pool import most_held
from fastgen.kv_cache.memory import AvailableMemory, available_memory
from fastgen.kv_cache.sizing import (
    CacheMemory,
    KVShape,
    StateShape,
    gpu_cache_memory,
    host_cache_memory,
    least_memory,
    plan_host_blocks,
    plan_kv_blocks,
    plan_state_slots,
    plan_window_blocks,
    resolve_max_model_length,
    working_memory_bytes,
)
from fastgen.model.cache_shape import cache_shape, grouped_cache_shape
from fastgen.model.config.architecture import LayerKind, ModelArchitecture
from fastgen.model.config.rope import RopeConfig
from fastgen.settings import ConfigError, EngineConfig

SMOLLM2 = ModelArchitecture(
    name="llama",
    vocab_size=49152,
    hidden_size=576,
    mlp_size=1536,
    layers=(LayerKind(),) * 30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_configs=(RopeConfig(1e5, 64),),
    attention_scale=64**-0.5,
    tie_word_embeddings=True,
    eos_token_ids=frozenset({2}),
)
KV = KVShape(num_layers=30, num_kv_heads=3, key_dim=64, value_dim=64)
BLOCK = 2 * 30 * 3 * 64 * 64 * 4
GIB = 1 << 30


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert KV.block_bytes(64) == BLOCK
    assert dataclasses.replace(KV, element_bytes=2, value_dim=32).block_bytes(64) == BLOCK // 2 * 3 // 4


@pytest.mark.parametrize(
    ("settings", "available", "limited", "blocks"),
    [
        ({"kv_cache_memory": 10 * BLOCK + 5}, GIB, False, 10),
        ({}, 100 * BLOCK, True, 90),
        ({"memory_percent": 50}, 100 * BLOCK, True, 50),
        ({}, 100 * GIB, False, 4 * GIB // BLOCK),
        ({}, 100 * GIB, True, 90 * GIB // BLOCK),
        ({"max_sequences": 2}, 100 * GIB, True, 2 * 128),  # two sequences of 8192 tokens use no more
        (
            {"max_sequences": 2, "kv_cache_memory": GIB},
            100 * GIB,
            True,
            GIB // BLOCK,
        ),  # for the prefix cache
        ({"max_sequences": 2, "kv_cache_memory": 2 * GIB, "prefix_caching": False}, 100 * GIB, True, 2 * 128),
    ],
)
def test_the_number_of_blocks_follows_from_settings_and_available_memory(
    settings: dict[str, int], available: int, limited: bool, blocks: int
) -> None:
    config = EngineConfig(model="", **settings)
    assert plan_kv_blocks(config, SMOLLM2, KV, host_cache_memory(config, available, limited=limited)) == blocks


def test_working_memory_covers_the_largest_step_and_sampling_of_every_row() -> None:
    def kept(**settings: int) -> int:
        return working_memory_bytes(EngineConfig(model="", **settings), SMOLLM2, KV)

    logits = 49152 * 4
    assert kept(token_budget=64, max_sequences=64) > 64 * logits
    assert kept(token_budget=64, max_sequences=64) < 512 << 20
    assert kept(max_sequences=128) - kept(max_sequences=64) == 64 * logits
    assert kept(token_budget=512) > kept(token_budget=256)
    assert kept(max_model_length=2048) < kept(max_model_length=8192) == kept()


@pytest.mark.parametrize(
    ("settings", "available", "words"),
    [
        ({"kv_cache_memory": 1000}, GIB, f"raise it to {BLOCK}"),
        ({"kv_cache_memory": 2 * GIB}, GIB, "only 1024MiB of memory are left"),
        # The size in the message must be one that works.
        ({"kv_cache_memory": 2 * GIB}, GIB + 1, "only 1024MiB of memory are left"),
        ({}, 1000, "not one KV cache block"),
    ],
)
def test_an_impossible_cache_is_rejected_with_the_remedy(settings: dict[str, int], available: int, words: str) -> None:
    config = EngineConfig(model="", **settings)
    with pytest.raises(ConfigError, match=words):
        plan_kv_blocks(config, SMOLLM2, KV, host_cache_memory(config, available, limited=True))


@pytest.mark.parametrize(
    ("requested", "num_blocks", "length"), [(None, 40, 2560), (None, 1000, 8192), (2560, 40, 2560), (1, 40, 1)]
)
def test_the_longest_request_fits_the_model_and_the_cache(requested: int | None, num_blocks: int, length: int) -> None:
    config = EngineConfig(model="", max_model_length=requested)
    assert resolve_max_model_length(config, SMOLLM2, KV, num_blocks) == length


def test_a_length_larger_than_the_cache_is_rejected_with_values_that_work() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_max_model_length(EngineConfig(model="", max_model_length=8192), SMOLLM2, KV, 40)
    assert str(caught.value) == (
        "--max-model-length 8192 needs 128 blocks of 64 tokens, the KV cache has 40: "
        "lower it to 2560 or raise --kv-cache-memory to 360MiB"
    )
    enough = plan_kv_blocks(EngineConfig(model="", kv_cache_memory=360 << 20), SMOLLM2, KV, CacheMemory(GIB, GIB))
    assert enough == 128


def test_a_length_beyond_the_models_positions_is_rejected() -> None:
    with pytest.raises(ConfigError, match="the model has 8192 positions: lower it to 8192"):
        resolve_max_model_length(EngineConfig(model="", max_model_length=8193), SMOLLM2, KV, 4000)


def test_memory_percent_on_a_gpu_covers_weights_cache_and_steps() -> None:
    config = EngineConfig(model="", device="cuda", memory_percent=90)
    assert gpu_cache_memory(config, total_bytes=1000, free_bytes=700, step_bytes=150) == CacheMemory(450, 550)
    assert gpu_cache_memory(config, total_bytes=1000, free_bytes=100, step_bytes=150) == CacheMemory(0, 0)
    with pytest.raises(ConfigError, match="use a GPU with more memory"):
        plan_kv_blocks(config, SMOLLM2, KV, CacheMemory(0, 0))


def test_the_swap_space_becomes_host_blocks() -> None:
    def blocks(swap_space: int) -> int:
        return plan_host_blocks(EngineConfig(model="", swap_space=swap_space), KV, GIB)

    assert (blocks(0), blocks(BLOCK), blocks(5 * BLOCK + 1)) == (0, 1, 5)
    with pytest.raises(ConfigError, match=f"raise it to {BLOCK} or more"):
        blocks(BLOCK - 1)
    with pytest.raises(ConfigError, match="only 1024MiB of host memory are left"):
        blocks(GIB + 1)
    with pytest.raises(ConfigError, match="--swap-space 1025MiB: only 1024MiB of host memory are left"):
        plan_host_blocks(EngineConfig(model="", swap_space=GIB + 2), KV, GIB + 1)


@pytest.fixture
def meminfo(tmp_path: Path) -> Path:
    path = tmp_path / "meminfo"
    path.write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    return path


def test_memory_without_a_container_limit_is_that_of_the_machine(tmp_path: Path, meminfo: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory(tmp_path, meminfo) == AvailableMemory(8000 * 1024, limited=False)
    assert available_memory(tmp_path / "none", meminfo) == AvailableMemory(8000 * 1024, limited=False)


def test_memory_under_a_cgroup_v2_limit_is_the_limit_minus_usage(tmp_path: Path, meminfo: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 450000\ninactive_file 100000\nactive_file 50000\n")
    assert available_memory(tmp_path, meminfo) == AvailableMemory(500000, limited=True)
    assert available_memory(tmp_path, meminfo, drops_active=True) == AvailableMemory(550000, limited=True)


@pytest.mark.parametrize(("limit", "left"), [("1000000", 500000), ("9223372036854771712", None)])
def test_memory_under_cgroup_v1(tmp_path: Path, meminfo: Path, limit: str, left: int | None) -> None:
    folder = tmp_path / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(limit + "\n")
    (folder / "memory.usage_in_bytes").write_text("600000\n")
    (folder / "memory.stat").write_text("total_inactive_file 100000\n")
    expected = AvailableMemory(8000 * 1024, False) if left is None else AvailableMemory(left, True)
    assert available_memory(tmp_path, meminfo) == expected


STATES = dataclasses.replace(KV, states=StateShape(24, inputs=(3, 8192), matrices=(32, 128, 128)))  # slots of 50 MiB


@pytest.mark.parametrize(
    ("sequences", "default", "slots"),
    [(8, 4 * GIB, 16), (256, 4 * GIB, 40), (1, 4 * GIB, 3), (256, GIB, 10)],
)
def test_recurrent_states_have_two_slots_for_each_sequence_in_half_of_the_cache(
    sequences: int, default: int, slots: int
) -> None:
    config, memory = EngineConfig(model="", max_sequences=sequences), CacheMemory(default, default)
    assert plan_state_slots(config, STATES, memory) == slots
    assert STATES.states is not None
    left = default - slots * STATES.states.slot_bytes
    blocks = plan_kv_blocks(config, SMOLLM2, STATES, memory, slots)
    assert blocks == plan_kv_blocks(config, SMOLLM2, KV, CacheMemory(left, left))


def test_slots_come_out_of_the_memory_that_is_asked_for() -> None:
    config, memory = EngineConfig(model="", max_sequences=2, kv_cache_memory=GIB), CacheMemory(0, 4 * GIB)
    slots = plan_state_slots(config, STATES, memory)
    assert slots == 4
    assert STATES.states is not None
    blocks = plan_kv_blocks(config, SMOLLM2, STATES, memory, slots)
    assert blocks * KV.block_bytes(64) + slots * STATES.states.slot_bytes <= GIB
    assert (blocks + 1) * KV.block_bytes(64) + slots * STATES.states.slot_bytes > GIB


def test_a_cache_too_small_for_three_slots_is_rejected() -> None:
    for config, words in (
        (EngineConfig(model="", kv_cache_memory=256 << 20), "--kv-cache-memory 256MiB: .* room for 3 in half"),
        (EngineConfig(model=""), "--memory-percent .* room for 3 in half of the cache's 1000 bytes: raise it"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_state_slots(config, STATES, CacheMemory(1000, GIB))


def test_a_model_without_recurrent_states_has_no_slots() -> None:
    assert plan_state_slots(EngineConfig(model=""), KV, CacheMemory(GIB, GIB)) == 0


# Shapes of Gemma 3 27B and gpt-oss-20b: in Gemma one of six layers keeps all tokens, in gpt-oss every other.
GEMMA3 = replace(
    SMOLLM2,
    layers=tuple(LayerKind(window=None if layer % 6 == 5 else 1024) for layer in range(62)),
    num_heads=32,
    num_kv_heads=16,
    head_dim=128,
    max_position_embeddings=131072,
)
GPT_OSS = replace(
    SMOLLM2,
    layers=tuple(LayerKind(window=None if layer % 2 else 128) for layer in range(24)),
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
)
WINDOWED = {"gemma3": GEMMA3, "gpt-oss": GPT_OSS}


def shapes(name: str) -> tuple[KVShape, KVShape]:
    """Return the shape without and with blocks of their own for layers with a window."""
    grouped = grouped_cache_shape(WINDOWED[name], 2)
    assert grouped is not None
    return cache_shape(WINDOWED[name], 2), grouped


@pytest.mark.parametrize(("name", "before", "after"), [("gemma3", 15872, 3028), ("gpt-oss", 1536, 774)])
def test_layers_with_a_window_keep_only_it(name: str, before: int, after: int) -> None:
    """The keys and values of one sequence of 32,768 tokens take so many MiB: the table of docs/decisions/076."""
    whole, grouped = shapes(name)
    assert grouped.windowed is not None
    assert grouped.windowed.window is not None
    blocks, held = 32768 // 64, most_held(grouped.windowed.window, 64)
    assert blocks * whole.block_bytes(64) == before << 20
    assert blocks * grouped.block_bytes(64) + held * grouped.windowed.block_bytes(64) == after << 20
    assert whole.block_bytes(64) == grouped.block_bytes(64) + grouped.windowed.block_bytes(64)


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("settings", [{}, {"max_sequences": 4}, {"max_model_length": 8192}, {"block_size": 16}])
@pytest.mark.parametrize("gib", [0.1, 0.5, 1, 2, 4, 16, 60])
def test_more_tokens_fit_where_layers_with_a_window_have_their_own_blocks(
    name: str, settings: dict[str, int], gib: float
) -> None:
    whole, grouped = shapes(name)
    config, memory = EngineConfig(model="", **settings), CacheMemory(int(gib * GIB), int(gib * GIB))
    windows = plan_window_blocks(config, WINDOWED[name], grouped, memory)
    if not windows:
        return
    assert grouped.windowed is not None
    assert windows > most_held(grouped.windowed.window or 0, config.block_size)
    blocks = plan_kv_blocks(config, WINDOWED[name], grouped, memory, num_window_blocks=windows)
    used = blocks * grouped.block_bytes(config.block_size) + windows * grouped.windowed.block_bytes(config.block_size)
    assert used <= memory.default
    most = config.sequence_limit * -(-131072 // config.block_size)
    assert blocks == most or blocks > plan_kv_blocks(config, WINDOWED[name], whole, memory)


def test_windows_have_room_for_all_sequences_unless_that_takes_more_than_a_quarter_of_the_memory() -> None:
    config, (_, grouped) = EngineConfig(model="", max_sequences=64, token_budget=512), shapes("gpt-oss")
    ample, scarce = CacheMemory(4 * GIB, 4 * GIB), CacheMemory(GIB, GIB)
    assert plan_window_blocks(config, GPT_OSS, grouped, ample) == 64 * 4 + 8
    assert grouped.windowed is not None
    assert plan_window_blocks(config, GPT_OSS, grouped, scarce) == GIB // 4 // grouped.windowed.block_bytes(64)


def test_scarce_memory_is_shared_as_by_sequences_of_4096_tokens() -> None:
    config, (_, grouped) = EngineConfig(model=""), shapes("gemma3")
    memory = CacheMemory(8 * GIB, 8 * GIB)
    windows = plan_window_blocks(config, GEMMA3, grouped, memory)
    blocks = plan_kv_blocks(config, GEMMA3, grouped, memory, num_window_blocks=windows)
    assert abs(windows / blocks - most_held(1024, 64) / 64) < 0.01


def test_windows_as_long_as_the_requests_have_no_blocks_of_their_own() -> None:
    config, (_, grouped) = EngineConfig(model="", max_model_length=2048), shapes("gemma3")
    assert plan_window_blocks(config, GEMMA3, grouped, CacheMemory(8 * GIB, 8 * GIB)) == 0


@pytest.mark.parametrize("name", WINDOWED)
def test_a_length_larger_than_the_cache_is_rejected_with_memory_that_suffices(name: str) -> None:
    _, grouped = shapes(name)
    config, memory = EngineConfig(model="", max_model_length=65536), CacheMemory(GIB, 100 * GIB)
    with pytest.raises(ConfigError) as caught:
        resolve_max_model_length(config, WINDOWED[name], grouped, 40)
    enough = int(str(caught.value).rpartition(" ")[2].removesuffix("MiB")) << 20
    config = dataclasses.replace(config, kv_cache_memory=enough)
    windows = plan_window_blocks(config, WINDOWED[name], grouped, memory)
    assert windows
    blocks = plan_kv_blocks(config, WINDOWED[name], grouped, memory, num_window_blocks=windows)
    assert resolve_max_model_length(config, WINDOWED[name], grouped, blocks) == 65536


@pytest.mark.parametrize(
    "layers",
    [
        (LayerKind(),) * 4,
        (LayerKind(window=8),) * 4,
        (LayerKind(), LayerKind(window=8), LayerKind(kv_layer=0, window=8)),
    ],
    ids=["no windows", "windows only", "keys and values of a layer without one"],
)
def test_models_of_one_kind_of_layers_have_one_kind_of_blocks(layers: tuple[LayerKind, ...]) -> None:
    assert grouped_cache_shape(replace(SMOLLM2, layers=layers), 2) is None


def test_the_least_memory_counts_only_the_windows() -> None:
    whole, grouped = shapes("gemma3")
    config = EngineConfig(model="", max_model_length=32768, memory_percent=100)
    needs = [least_memory(config, kv, 0, step_bytes=0).cache >> 20 for kv in (whole, grouped)]
    assert needs == [15872, 3028]

"""Damaged and hostile model files are read or rejected in one line; nothing else is raised, and little is used for it.

`make fuzz FUZZ=tests/engine/model/test_damaged_files.py MINUTES=60` runs the properties with other examples for longer.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cluster.controlplane import free_ports
from fastgen.model.config.huggingface_families import FAMILIES
from fastgen.model.generation_defaults import generation_defaults
from fastgen.model.native import make_ropes, open_checkpoint
from fastgen.model.pooling import pooling_config
from fastgen.model.source import ModelSource
from fastgen.settings import ConfigError
from fastgen.text.tokenizer import Tokenizer
from support.damage import (
    EDGES,
    GGUFTensorInfo,
    GGUFValue,
    edited,
    edits,
    gguf_file,
    gguf_values,
    json_values,
    numbers,
    texts,
)
from support.quantized_models import FORMATS, model_of, save_quantized
from support.small_model import save_small_model
from support.tiny_models import SIZES, TINY
from support.waiting import PATIENCE

# The folder of an example is emptied by the example itself.
pytestmark = pytest.mark.usefixtures("quiet")
many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

_SECONDS = 10.0  # of processor time for one example
_GROWTH = 1 << 30  # bytes of memory


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@contextmanager
def bounded() -> Iterator[None]:
    """Check the time and memory that an example needs."""
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - started < _SECONDS
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < _GROWTH


def read_everything(path: Path) -> str | None:
    """Read a model as the server and the engine do; return the reason if it is rejected.

    Any exception but the expected one fails the test.
    """
    with bounded():
        reason = rejection(lambda: ModelSource.open(str(path)))
        if reason is not None:
            return reason
        source = ModelSource.open(str(path))
        parts = (read_settings, read_tokenizer, read_weights)
        return next(filter(None, [rejection(partial(part, source)) for part in parts]), None)


def rejection(read: Callable[[], object]) -> str | None:
    """Return the reason for which the files are rejected: one line."""
    try:
        read()
    except ConfigError as error:
        reason = str(error)
    else:
        return None
    assert reason, "a rejection without a reason"
    assert len(reason.splitlines()) == 1, reason
    assert len(reason) < 2000, reason
    return reason


def read_settings(source: ModelSource) -> None:
    pooling_config(source)
    generation_defaults("auto", source.tokenizer)


def read_tokenizer(source: ModelSource) -> None:
    Tokenizer.load(source.tokenizer)


def read_weights(source: ModelSource) -> None:
    if source.native is None:
        return
    checkpoint = open_checkpoint(source)
    make_ropes(source.native, None, checkpoint.rope_factors)
    for name in source.native.tensor_shapes():
        stored = checkpoint.stored(name)
        stored.float32()
        if len(stored.shape) == 2:
            stored.int8()


# GGUF


@cache
def whole_gguf() -> tuple[list[tuple[str, GGUFValue]], list[tuple[str, GGUFTensorInfo]], bytes]:
    """Return the entries and data of a small, valid file."""
    numbers_of: dict[str, tuple[int, Any]] = {
        "block_count": (4, 1),
        "context_length": (4, 64),
        "embedding_length": (4, 8),
        "feed_forward_length": (4, 4),
        "attention.head_count": (4, 2),
        "attention.layer_norm_rms_epsilon": (6, 1e-5),
        "rope.freq_base": (6, 1e4),
    }
    tokens = ["<unk>", "<s>", "</s>", "a", "b", "ab", "\u2581"]
    metadata = [
        ("general.architecture", GGUFValue(8, "llama")),
        *((f"llama.{name}", GGUFValue(kind, value)) for name, (kind, value) in numbers_of.items()),
        ("tokenizer.ggml.model", GGUFValue(8, "llama")),
        ("tokenizer.ggml.tokens", GGUFValue(8, tokens, is_array=True)),
        ("tokenizer.ggml.scores", GGUFValue(6, [-float(number) for number in range(7)], is_array=True)),
        ("tokenizer.ggml.token_type", GGUFValue(5, [2, 3, 3, 1, 1, 1, 1], is_array=True)),
        ("tokenizer.ggml.bos_token_id", GGUFValue(4, 1)),
        ("tokenizer.ggml.eos_token_id", GGUFValue(4, 2)),
    ]
    shapes = {"token_embd.weight": (8, 7), "output_norm.weight": (8,)}
    for part, shape in {"attn_norm": (8,), "ffn_norm": (8,), "ffn_gate": (8, 4), "ffn_up": (8, 4)}.items():
        shapes[f"blk.0.{part}.weight"] = shape
    for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
        shapes[f"blk.0.{part}.weight"] = (8, 8)
    shapes["blk.0.ffn_down.weight"] = (4, 8)
    tensors, offset = [], 0
    for name, shape in shapes.items():
        tensors.append((name, GGUFTensorInfo(shape, 0, offset)))
        size = 4
        for dimension in shape:
            size *= dimension
        offset += -(-size // 32) * 32
    return metadata, tensors, bytes(offset)


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(gguf_file(*whole_gguf()))
    assert read_everything(tmp_path / "model.gguf") is None


def read_gguf(folder: Path, content: bytes) -> str | None:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return read_everything(path)


@many
@given(changes=edits)
def test_gguf_files_with_other_bytes_are_read_or_rejected(tmp_path: Path, changes: Any) -> None:
    content = gguf_file(*whole_gguf())
    head = len(content) - len(whole_gguf()[2])
    read_gguf(tmp_path, edited(content[:head], changes) + content[head:])


def _keys(owner: type) -> Iterator[str]:
    for name, value in vars(owner).items():
        if isinstance(value, type):
            yield from _keys(value)
        elif isinstance(value, str) and not name.startswith("__"):
            yield value.replace("{arch}", "llama")


gguf_keys = st.sampled_from(sorted(set(_keys(gguf.Keys)))) | texts


@many
@given(
    entries=st.lists(st.tuples(gguf_keys, gguf_values), min_size=1, max_size=3),
    dropped=st.sets(st.integers(0, 12), max_size=1),
    is_repeated=st.booleans(),
)
@example(entries=[("general.alignment", GGUFValue(4, 0))], dropped=set(), is_repeated=False)
@example(entries=[("general.alignment", GGUFValue(8, "x"))], dropped=set(), is_repeated=False)
@example(entries=[("llama.block_count", GGUFValue(10, 1 << 40))], dropped=set(), is_repeated=False)
@example(entries=[("llama.tags", GGUFValue(9, [0, 0], is_array=True))], dropped=set(), is_repeated=False)
@example(entries=[("split.count", GGUFValue(8, "x"))], dropped=set(), is_repeated=False)
@example(entries=[("tokenizer.ggml.tokens", GGUFValue(4, 7))], dropped=set(), is_repeated=False)
@example(entries=[("llama.expert_count", GGUFValue(4, 2**31 - 1))], dropped=set(), is_repeated=False)
def test_gguf_files_with_other_keys_are_read_or_rejected(
    tmp_path: Path, entries: list[tuple[str, GGUFValue]], dropped: set[int], is_repeated: bool
) -> None:
    metadata, tensors, data = whole_gguf()
    new = dict(entries)
    kept = [entry for number, entry in enumerate(metadata) if number not in dropped and entry[0] not in new]
    read_gguf(tmp_path, gguf_file([*kept, *(entries if is_repeated else new.items())], tensors, data))


sizes = st.sampled_from(EDGES) | st.integers(0, 64)


@many
@given(
    place=st.integers(0, 10),
    name=st.none() | texts | st.sampled_from(["rope_freqs.weight", "blk.0.attn_q.bias", "output.weight"]),
    info=st.builds(GGUFTensorInfo, st.lists(sizes, max_size=6).map(tuple), st.integers(0, 40), sizes),
    is_added=st.booleans(),
)
@example(place=1, name=None, info=GGUFTensorInfo((), 0, 224), is_added=False)
@example(place=0, name=None, info=GGUFTensorInfo((2**63, 2**63), 0, 0), is_added=False)
def test_gguf_files_with_other_tensors_are_read_or_rejected(
    tmp_path: Path, place: int, name: str | None, info: GGUFTensorInfo, is_added: bool
) -> None:
    metadata, tensors, data = whole_gguf()
    entry = (tensors[place][0] if name is None else name, info)
    changed = [*tensors[:place], entry, *tensors[place + (not is_added) :]]
    read_gguf(tmp_path, gguf_file(metadata, changed, data))


def damaged_gguf(damage: str) -> bytes:
    metadata, tensors, data = whole_gguf()
    (first, _), (second, info) = tensors[:2]
    match damage:
        case "nested array":
            return gguf_file([*metadata, ("general.tags", GGUFValue(9, [0], is_array=True))], tensors, data)
        case "long array":
            content = gguf_file([*metadata, ("general.tags", GGUFValue(8, [], is_array=True))], tensors, data)
            place = content.index(b"general.tags") + len("general.tags") + 8
            return content[:place] + (2**40).to_bytes(8, "little") + content[place + 8 :]
        case "overlap":
            moved = GGUFTensorInfo(info.dimensions, info.kind, 0)
            return gguf_file(metadata, [tensors[0], (second, moved), *tensors[2:]], data)
        case "repeated key":
            return gguf_file([*metadata, metadata[0]], tensors, data)
        case "repeated tensor":
            return gguf_file(metadata, [tensors[0], (first, info), *tensors[2:]], data)
        case "alignment 0":
            return gguf_file([*metadata, ("general.alignment", GGUFValue(4, 0))], tensors, data)
        case "alignment 3":
            return gguf_file([*metadata, ("general.alignment", GGUFValue(4, 3))], tensors, data)
        case "five dimensions":
            return gguf_file(metadata, [(first, GGUFTensorInfo((8, 7, 1, 1, 1), 0, 0)), *tensors[1:]], data)
    raise AssertionError(damage)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("nested array", "array of type 9"),
        ("long array", "array of 1099511627776 entries"),
        ("overlap", r"tensor output_norm\.weight at offset 0 instead of 224"),
        ("repeated key", r"repeated or empty key 'general\.architecture'"),
        ("repeated tensor", r"repeated or long tensor name 'token_embd\.weight'"),
        ("alignment 0", r"general\.alignment 0, which is not a power of 2"),
        ("alignment 3", r"general\.alignment 3, which is not a power of 2"),
        ("five dimensions", r"tensor \S+ with 5 dimensions"),
    ],
)
def test_a_damaged_gguf_head_is_rejected_with_its_fault(tmp_path: Path, damage: str, words: str) -> None:
    reason = read_gguf(tmp_path, damaged_gguf(damage))
    assert reason is not None
    assert re.search(rf"model\.gguf: the GGUF file is damaged \(.*{words}", reason), reason


# Folders


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose model has few weights and no large vocabulary, with a tokenizer and all optional files."""
    folder = tmp_path_factory.mktemp("whole")
    TINY["llama"].build().save_pretrained(folder)
    vocabulary = {chr(97 + number): number for number in range(20)}
    bytes_of = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": bytes_of,
        "decoder": bytes_of,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "a", "add_bos_token": False}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "b"}}))
    (folder / "added_tokens.json").write_text(json.dumps({"<extra>": 20}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "temperature": 0.7}))
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return folder


@pytest.fixture
def copied(small: Path, tmp_path: Path) -> Path:
    """A copy of it of which examples replace a file."""
    return Path(shutil.copytree(small, tmp_path / "model"))


def with_file(folder: Path, name: str, content: bytes) -> str | None:
    """Read the model with another file, and put the file back."""
    path = folder / name
    before = path.read_bytes() if path.exists() else None
    path.write_bytes(content)
    try:
        return read_everything(folder)
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode("ascii")


JSON_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "modules.json",
    "1_Pooling/config.json",
]


def test_the_undamaged_folder_is_read(copied: Path) -> None:
    assert read_everything(copied) is None


@many
@given(name=st.sampled_from(JSON_FILES), changes=edits)
def test_json_files_with_other_bytes_are_read_or_rejected(copied: Path, name: str, changes: Any) -> None:
    with_file(copied, name, edited((copied / name).read_bytes(), changes))


@many
@given(name=st.sampled_from(JSON_FILES), value=json_values)
def test_json_files_with_another_value_are_read_or_rejected(copied: Path, name: str, value: Any) -> None:
    with_file(copied, name, encoded(value))


DEEP = b"[" * 100_000 + b"]" * 100_000
LONG = b"9" * 5000


@pytest.mark.parametrize("name", JSON_FILES)
@pytest.mark.parametrize("content", [DEEP, b'{"a":' + DEEP + b"}", LONG, b'{"vocab_size":' + LONG + b"}", b"", b"\xff"])
def test_deep_long_and_empty_json_files_are_rejected_by_name(copied: Path, name: str, content: bytes) -> None:
    reason = with_file(copied, name, content)
    assert reason is not None
    assert name in reason


@pytest.mark.parametrize("name", [*JSON_FILES, "tokenizer.json", "chat_template.jinja"])
def test_files_over_the_limit_are_rejected_by_name(copied: Path, name: str) -> None:
    reason = with_file(copied, name, b" " * (64 << 20) + b"{}")
    assert reason is not None
    assert f"{name}: has more than 64 MiB" in reason


def test_a_file_over_the_limit_is_rejected_for_its_size_where_the_limit_cuts_a_character(copied: Path) -> None:
    reason = with_file(copied, "config.json", b" " * (64 << 20) + "é".encode())
    assert reason is not None
    assert "has more than 64 MiB" in reason


@pytest.mark.parametrize("name", JSON_FILES)
def test_half_a_surrogate_pair_is_rejected_by_name(copied: Path, name: str) -> None:
    reason = with_file(copied, name, b'{"a": "\\ud800"}')
    assert reason is not None
    assert name in reason


CONFIG_FIELDS = sorted(
    {name for family in FAMILIES.values() for name in family.defaults}
    | SIZES.keys()
    | {"head_dim", "layer_types", "rope_parameters", "rope_scaling", "architectures", "model_type", "no_rope_layers"}
    | {"mlp_only_layers", "quantization_config", "matryoshka_dimensions", "per_layer_config", "is_encoder_decoder"}
)
ROPE_FIELDS = [
    *("rope_type", "type", "factor", "rope_theta", "short_factor", "long_factor", "low_freq_factor", "truncate"),
    *("high_freq_factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "mscale"),
    *("mscale_all_dim", "full_attention", "partial_rotary_factor"),
]
rope = st.dictionaries(
    st.sampled_from(ROPE_FIELDS),
    json_values | st.sampled_from(["linear", "yarn", "llama3", "longrope", "dynamic"]),
    max_size=5,
)


@many
@given(
    family=st.sampled_from([*FAMILIES, "gpt2"]),
    changes=st.dictionaries(st.sampled_from(CONFIG_FIELDS), json_values | numbers | rope, min_size=1, max_size=3),
)
@example(family="llama", changes={"rope_scaling": {"rope_type": "longrope", "original_max_position_embeddings": 1}})
@example(family="llama", changes={"num_hidden_layers": 2**40})
@example(family="llama", changes={"rope_theta": float("nan")})
@example(family="gpt2", changes={"architectures": 7})
def test_configurations_with_other_values_are_read_or_rejected(
    copied: Path, family: str, changes: dict[str, Any]
) -> None:
    base = {"model_type": family, **SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    with_file(copied, "config.json", encoded(base | changes))


TOKENIZER_FIELDS = ["eos_token", "bos_token", "chat_template", "added_tokens_decoder", "extra_special_tokens"]
GENERATION_FIELDS = ["eos_token_id", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"]


@many
@given(fields=st.dictionaries(st.sampled_from(TOKENIZER_FIELDS) | texts, json_values, max_size=3))
def test_tokenizer_settings_with_other_values_are_read_or_rejected(copied: Path, fields: dict[str, Any]) -> None:
    with_file(copied, "tokenizer_config.json", encoded(fields))


@many
@given(fields=st.dictionaries(st.sampled_from(GENERATION_FIELDS), json_values | numbers, min_size=1, max_size=3))
def test_generation_settings_with_other_values_are_read_or_rejected(copied: Path, fields: dict[str, Any]) -> None:
    with_file(copied, "generation_config.json", encoded(fields))


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
names = st.sampled_from([SINGLE, "other.safetensors", "../x.safetensors", "/x.safetensors", "1_Pooling"]) | texts


@many
@given(index=st.fixed_dictionaries({"weight_map": st.dictionaries(texts, names | json_values)}) | json_values)
def test_indexes_with_other_values_are_read_or_rejected(copied: Path, index: Any) -> None:
    kept = copied / "kept"
    (copied / SINGLE).rename(kept)
    try:
        with_file(copied, INDEX, encoded(index))
    finally:
        kept.rename(copied / SINGLE)


def safetensors_head(folder: Path) -> tuple[dict[str, Any], bytes]:
    content = (folder / SINGLE).read_bytes()
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def safetensors_file(head: bytes, data: bytes, length: int | None = None) -> bytes:
    return (len(head) if length is None else length).to_bytes(8, "little") + head + data


@many
@given(changes=edits, length=st.none() | st.sampled_from(EDGES))
def test_safetensors_heads_with_other_bytes_are_read_or_rejected(
    copied: Path, changes: Any, length: int | None
) -> None:
    head, data = safetensors_head(copied)
    with_file(copied, SINGLE, safetensors_file(edited(encoded(head), changes), data, length))


DTYPES = [
    "F64",
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "F8_E5M2",
    "F8_E8M0",
    "F4",
    "F6_E2M3",
    "I64",
    "U8",
    "BOOL",
    "C64",
    "X",
]


@many
@given(
    place=st.integers(0, 29),
    entry=st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(DTYPES) | json_values,
            "shape": st.lists(sizes, max_size=4) | json_values,
            "data_offsets": st.lists(sizes, max_size=3) | json_values,
        },
    ),
    name=st.none() | texts | st.sampled_from(["lm_head.bias", "model.layers.0.self_attn.k_scale", "__metadata__"]),
)
@example(place=3, entry={"dtype": "F4"}, name=None)
@example(place=3, entry={"dtype": "F8_E4M3"}, name="model.layers.0.self_attn.k_scale")
@example(place=3, entry={}, name="model.layers." + "9" * 5000 + ".self_attn.k_scale")
def test_safetensors_heads_with_other_entries_are_read_or_rejected(
    copied: Path, place: int, entry: dict[str, Any], name: str | None
) -> None:
    head, data = safetensors_head(copied)
    changed = sorted(head)[place % len(head)]
    old = head.pop(changed)
    head[changed if name is None else name] = old | entry
    with_file(copied, SINGLE, safetensors_file(encoded(head), data))


# Quantised weights

QUANTIZATION_FIELDS = [
    *("quant_method", "bits", "group_size", "checkpoint_format", "version", "zero_point", "dynamic", "pack_dtype"),
    *("weight_block_size", "fmt", "modules_to_not_convert", "ignore", "config_groups", "kv_cache_scheme", "format"),
    *("sparsity_config", "quant_algo", "desc_act", "sym"),
]
GROUP_FIELDS = ["num_bits", "type", "strategy", "group_size", "symmetric", "block_structure", "dynamic", "actorder"]
module_lists = st.lists(
    st.sampled_from(["lm_head", "re:.*", "re:(", "re:(a+)+", "*", "Linear", ""]) | texts, max_size=3
)
group_values = (
    st.sampled_from([4, 8, "int", "float", "group", "channel", "tensor", "block", [16, 16], 32]) | json_values
)
config_groups = st.dictionaries(
    texts,
    st.fixed_dictionaries(
        {"weights": st.dictionaries(st.sampled_from(GROUP_FIELDS), group_values, max_size=4)},
        optional={"targets": module_lists, "input_activations": json_values},
    )
    | json_values,
    max_size=2,
)
METHODS = ["awq", "gptq", "fp8", "compressed-tensors", "modelopt", "mxfp4"]


@pytest.fixture(scope="module")
def packed_models(tmp_path_factory: pytest.TempPathFactory, small: Path) -> dict[str, Path]:
    """The small model in some formats of quantised weights."""
    found = {}
    for name in ("awq", "gptq with act-order", "pack-quantized asymmetric", "int-quantized", "fp8 in blocks"):
        root = tmp_path_factory.mktemp("packed")
        found[name] = save_quantized(model_of("llama"), FORMATS[name], root)[0]
        shutil.copy(small / "tokenizer.json", found[name])
    return found


def test_the_undamaged_quantised_models_are_read(packed_models: dict[str, Path]) -> None:
    for folder in packed_models.values():
        assert read_everything(folder) is None


@many
@given(
    place=st.integers(0, 4),
    changes=st.dictionaries(
        st.sampled_from(QUANTIZATION_FIELDS),
        json_values | numbers | module_lists | config_groups | st.sampled_from(METHODS),
        min_size=1,
        max_size=3,
    ),
)
@example(place=0, changes={"modules_to_not_convert": ["(a+)+$"]})
@example(place=1, changes={"bits": 10**40})
@example(place=4, changes={"weight_block_size": [2**31, 1]})
def test_descriptions_of_quantised_weights_with_other_values_are_read_or_rejected(
    packed_models: dict[str, Path], place: int, changes: dict[str, Any]
) -> None:
    folder = list(packed_models.values())[place]
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= changes
    with_file(folder, "config.json", encoded(config))


@many
@given(
    model=st.integers(0, 4),
    place=st.integers(0, 200),
    entry=st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from([*DTYPES, "I32", "I8", "F16"]) | json_values,
            "shape": st.lists(sizes, max_size=4) | json_values,
            "data_offsets": st.lists(sizes, max_size=3) | json_values,
        },
    ),
    name=st.none()
    | texts
    | st.sampled_from(["lm_head.qweight", "model.layers.0.mlp.up_proj_blocks", ".weight_packed"]),
)
@example(model=2, place=3, entry={}, name="lm_head.weight_shape")
@example(model=4, place=3, entry={"dtype": "F8_E5M2"}, name=None)
def test_heads_of_quantised_weights_with_other_entries_are_read_or_rejected(
    packed_models: dict[str, Path], model: int, place: int, entry: dict[str, Any], name: str | None
) -> None:
    folder = list(packed_models.values())[model]
    head, data = safetensors_head(folder)
    changed = sorted(head)[place % len(head)]
    old = head.pop(changed)
    head[changed if name is None else name] = old | entry
    with_file(folder, SINGLE, safetensors_file(encoded(head), data))


@many
@given(model=st.integers(0, 4), changes=edits)
def test_quantised_weights_with_other_bytes_are_read_or_rejected(
    packed_models: dict[str, Path], model: int, changes: Any
) -> None:
    """Numbers that are valid may be any; groups and shapes that tensors hold are checked."""
    folder = list(packed_models.values())[model]
    content = (folder / SINGLE).read_bytes()
    with_file(folder, SINGLE, edited(content, changes))


def test_a_message_is_one_short_line_whatever_it_quotes() -> None:
    assert str(ConfigError("a\nb\x1b[2J\ud800c\u2028")) == "a\\nb\\x1b[2J\\ud800c\\u2028"
    long = str(ConfigError("begins" + "x" * 10_000 + "ends"))
    assert long.startswith("begins")
    assert long.endswith("ends")
    assert len(long) < 2000


# Whole commands


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", SINGLE])
@pytest.mark.parametrize("change", [make_fifo, make_directory, make_loop, Path.unlink])
def test_what_is_no_file_is_rejected_by_name(copied: Path, name: str, change: Callable[[Path], None]) -> None:
    change(copied / name)
    reason = read_everything(copied)
    assert reason is not None
    assert name in reason


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json", "modules.json"])
@pytest.mark.parametrize("change", [make_fifo, make_directory, make_loop])
def test_what_is_no_file_counts_as_missing_where_a_file_is_optional(
    copied: Path, name: str, change: Callable[[Path], None]
) -> None:
    change(copied / name)
    assert read_everything(copied) is None


@pytest.mark.parametrize("model", ["a" * 5000, "\0", "~nobody-of-this-name/model", "/proc/self/mem/x"])
def test_a_name_that_cannot_be_a_path_is_rejected(model: str) -> None:
    with pytest.raises(ConfigError):
        ModelSource.open(model)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["serve", "generate"])
def test_a_damaged_file_ends_a_command_with_one_line_and_exit_code_2(tmp_path: Path, command: str) -> None:
    folder = save_small_model(tmp_path / "model")
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(content[:-100])
    prompts = ["--port", str(free_ports(1)[0])] if command == "serve" else ["x"]
    done = subprocess.run(
        [sys.executable, "-m", "fastgen", command, str(folder), *prompts, "--device", "cpu"],
        capture_output=True,
        text=True,
        timeout=120 * PATIENCE,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert re.search(r"model\.safetensors: cannot be read as a safetensors file", done.stderr.splitlines()[-1])

"""GGUF files: our reader must agree with package gguf."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from fastgen.model import ModelError
from fastgen.model.checkpoint.gguf import locate_tensors
from fastgen.model.checkpoint.gguf_file import GGUFFile
from fastgen.model.config.from_gguf import architecture_from_gguf
from fastgen.model.layers.rope import Rope
from fastgen.model.native import open_checkpoint
from fastgen.model.source import ModelSource
from support.demo_weights import demo_model
from support.waiting import HANG_SECONDS


def write(path: Path, tensors: dict[str, tuple[np.ndarray, str]], **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, (values, kind) in tensors.items():
        quantisation = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quantize(values, quantisation), raw_dtype=quantisation)
    for name, value in metadata.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def theirs() -> gguf.GGUFReader:
    """The demo model read by package gguf, which takes seconds."""
    return gguf.GGUFReader(demo_model())


@pytest.mark.slow
def test_tensors_of_the_demo_model_equal_package_gguf_bit_for_bit(theirs: gguf.GGUFReader) -> None:
    """Those outside of the layers, and those of the first and the last layer: the others are like them."""
    ours = GGUFFile(demo_model())
    assert list(ours.tensor_names()) == [tensor.name for tensor in theirs.tensors]
    inner = re.compile(r"blk\.([1-9]|1[0-9]|2[0-8])\.")
    compared = [tensor for tensor in theirs.tensors if not inner.match(tensor.name)]
    assert {tensor.tensor_type for tensor in compared} == {tensor.tensor_type for tensor in theirs.tensors}
    for tensor in compared:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours.tensor(tensor.name), expected), tensor.name


def test_metadata_equals_package_gguf(theirs: gguf.GGUFReader) -> None:
    ours = GGUFFile(demo_model()).metadata
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours[name] == field.contents(), name


@pytest.mark.parametrize("length", [0, 3, 5, 20, 100, 1 << 20, 60 << 20])
def test_a_truncated_file_is_rejected_in_one_line(tmp_path: Path, length: int) -> None:
    path = tmp_path / "cut.gguf"
    with demo_model().open("rb") as whole:
        path.write_bytes(whole.read(length))
    with pytest.raises(ModelError) as caught:
        GGUFFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"PK\3\4" + bytes(60), "not a GGUF file"),
        (b"GGUF\1\0\0\0" + bytes(60), "GGUF version 1"),
        (b"GGUF\0\0\0\3" + bytes(60), "big-endian"),
        (b"GGUF\3\0\0\0" + b"\xff" * 60, "damaged"),
    ],
)
def test_a_file_that_is_not_gguf_is_rejected(tmp_path: Path, head: bytes, words: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(head)
    with pytest.raises(ModelError, match=words):
        GGUFFile(path)


def test_the_shape_of_the_demo_model() -> None:
    a = ModelSource.open(str(demo_model())).architecture
    assert (a.num_layers, a.hidden_size, a.num_heads, a.num_kv_heads, a.head_dim) == (30, 576, 9, 3, 64)
    assert (a.vocab_size, a.max_position_embeddings, a.tie_word_embeddings) == (49152, 8192, True)
    assert a.eos_token_ids == {0, 2, 4}  # <|endoftext|>, <|im_end|>, <reponame>
    assert a.num_parameters == 134_515_008


METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": 50,
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.eot_token_id": 4,
}


@dataclass
class Described:
    """The contents of a GGUF file without tensors."""

    metadata: dict[str, Any]

    def tensor_names(self) -> list[str]:
        return []

    def tensor(self, name: str) -> np.ndarray:
        raise KeyError(name)


def test_metadata_defaults_and_both_end_tokens_are_read() -> None:
    a = architecture_from_gguf(Described(METADATA))
    assert (a.num_kv_heads, a.head_dim, a.rope_configs[0].theta) == (2, 32, 10000.0)
    assert a.eos_token_ids == {3, 4}


def test_end_tokens_are_found_by_their_text() -> None:
    tokens = {
        "tokenizer.ggml.tokens": ["<unk>", "<|end|>", "<|im_end|>", "a", "b", "<|eot_id|>", "<|user|>"],
        "tokenizer.ggml.token_type": [2, 4, 1, 1, 1, 3, 3],
    }
    assert architecture_from_gguf(Described(METADATA | tokens)).eos_token_ids == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "mamba"}, "general.architecture is 'mamba': this engine serves llama, qwen2, "),
        ({"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 2.0}, "rope.scaling.type is 'su'"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 9}, "9 experts per token"),
        ({"llama.rope.dimension_count": 16}, "rope.dimension_count is 16"),
        ({"llama.attention.value_length": 16}, "attention.value_length is 16"),
        ({"llama.block_count": None}, "block_count is missing"),
        ({"split.count": 3}, "split.count is 3: merge"),
    ],
)
def test_unsupported_metadata_is_rejected_by_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        architecture_from_gguf(Described(METADATA | changes))


def test_a_window_without_a_known_layer_pattern_is_rejected() -> None:
    metadata = {key.replace("llama.", "qwen2."): value for key, value in METADATA.items()}
    windowed = metadata | {"general.architecture": "qwen2", "qwen2.attention.sliding_window": 64}
    with pytest.raises(ModelError, match=r"qwen2\.attention\.sliding_window is 64"):
        architecture_from_gguf(Described(windowed))


def test_gemma_layer_pattern_and_attention_scale_of_its_largest_model() -> None:
    metadata = {key.replace("llama.", "gemma3."): value for key, value in METADATA.items()}
    metadata |= {"general.architecture": "gemma3", "gemma3.attention.sliding_window": 16}
    metadata |= {"gemma3.attention.key_length": 16, "gemma3.attention.value_length": 16}
    a = architecture_from_gguf(Described(metadata | {"gemma3.block_count": 8}))
    assert [layer.window for layer in a.layers] == [16, 16, 16, 16, 16, None, 16, 16]
    assert [layer.rope for layer in a.layers] == [1, 1, 1, 1, 1, 0, 1, 1]
    assert a.attention_scale == 16**-0.5
    largest = architecture_from_gguf(Described(metadata | {"gemma3.block_count": 62}))
    assert largest.attention_scale == 32**-0.5  # hidden size / heads


def tiny(tmp_path: Path, **extra: np.ndarray) -> ModelSource:
    a = architecture_from_gguf(Described(METADATA))
    rng = np.random.default_rng(0)
    names = {name: place.name for name, place in locate_tensors(a, ()).items()}
    shapes = {names[name]: shape for name, shape in a.tensor_shapes().items()}
    tensors = {name: (rng.standard_normal(shape, dtype=np.float32), "F32") for name, shape in shapes.items()}
    tensors |= {name: (values, "F32") for name, values in extra.items()}
    metadata = {key: value for key, value in METADATA.items() if key != "general.architecture"}
    return ModelSource.open(str(write(tmp_path / "tiny.gguf", tensors, **metadata)))


def test_scaled_rotary_frequencies_come_from_their_tensor(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    source = tiny(tmp_path, **{"rope_freqs.weight": factors})
    loaded = open_checkpoint(source).rope_factors
    assert loaded is not None
    positions, (rope,) = torch.tensor([5]), source.architecture.rope_configs
    plain, _ = Rope(rope, longest=128)(positions)
    stretched, _ = Rope(rope, longest=128, factors=loaded)(positions)
    torch.testing.assert_close(stretched.arccos()[0, 15], plain.arccos()[0, 15] / 8, atol=1e-3, rtol=0)
    assert torch.equal(stretched[0, 0], plain[0, 0])


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.0.ssm_a"])
def test_a_missing_or_unknown_tensor_is_named(tmp_path: Path, name: str) -> None:
    source = tiny(tmp_path, **{name: np.zeros(64, np.float32)})
    with pytest.raises(ModelError, match=r"blk\.0\.(attn_k\.bias is missing|ssm_a is not part of)"):
        open_checkpoint(source)


def test_opening_a_model_imports_neither_torch_nor_numba() -> None:
    program = (
        "import sys; from fastgen.model.source import ModelSource; ModelSource.open(sys.argv[1]); "
        "print([name for name in ('torch', 'numba', 'transformers') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(demo_model())]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_SECONDS)
    assert done.stdout.strip() == "[]"

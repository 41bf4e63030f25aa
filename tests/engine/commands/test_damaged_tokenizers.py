"""Damaged tokenizers end a command with one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from fastgen.commands.main import main

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 64,
}
TOKENIZER = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "decoder": {"type": "ByteFallback"}}


def line_of(model: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the only line that a command writes to standard error."""
    assert main(["generate", str(model), "hi"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastgen: error: ")
    return line


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("tokenizer.json", {}, "tokenizer.json: not a valid tokenizer"),
        ("tokenizer_config.json", [], "tokenizer_config.json: expected a JSON object"),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token must be a string"),
        ("added_tokens.json", {"<a>": "b"}, "added_tokens.json: the id of '<a>'"),
        ("config.json", CONFIG | {"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_a_damaged_folder(
    file: str, content: Any, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"config.json": CONFIG, "tokenizer.json": TOKENIZER, file: content}.items():
        (tmp_path / name).write_text(json.dumps(value))
    assert named in line_of(tmp_path, capsys)


def test_a_folder_without_tokenizer_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x05")
    assert "has no tokenizer.json" in line_of(tmp_path, capsys)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": ["a", "a"]}, "tokenizer.ggml.tokens: has the token 'a' twice"),
        ({"token_type": [1]}, "tokenizer.ggml.token_type: has 1 values for 3 tokens"),
        ({"merges": ["a x"]}, "tokenizer.ggml.merges"),
        ({"pre": "other"}, "tokenizer.ggml.pre 'other'"),
        ({"bos_token_id": 4294967295, "add_bos_token": True}, "tokenizer.ggml.bos_token_id: names no token"),
    ],
)
def test_a_damaged_gguf_file(
    change: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": ["a", "b", "ab"],
        "token_type": [1] * 3,
        "merges": ["a b"],
        **change,
    }
    for name, value in keys.items():
        add = {str: writer.add_string, list: writer.add_array, int: writer.add_uint32, bool: writer.add_bool}
        add[type(value)](f"tokenizer.ggml.{name}", value)  # type: ignore[operator]
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert named in line_of(path, capsys)

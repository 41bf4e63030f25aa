"""A model's tensors under Hugging Face's names, whatever file they come from.

Both kinds of checkpoint are checked against the shapes that the architecture asks for: a tensor that is missing, has
another shape, or is not known here is an error that names it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch

from fastgen.model.architecture import ModelArchitecture
from fastgen.model.errors import ModelError
from fastgen.model.gguf import GGUFFile
from fastgen.model.source import ModelSource

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
ROPE_FACTORS = "rope_freqs.weight"

_GGUF_NAMES = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def layer_tensor(layer: int, part: str) -> str:
    """The name of one of a layer's tensors, for example `self_attn.q_proj`."""
    return f"model.layers.{layer}.{part}.weight"


def expected_shapes(a: ModelArchitecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model and its shape."""
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (a.vocab_size, a.hidden_size), FINAL_NORM: (a.hidden_size,)}
    if not a.tie_word_embeddings:
        shapes[HEAD] = (a.vocab_size, a.hidden_size)
    parts: dict[str, tuple[int, ...]] = {
        "input_layernorm": (a.hidden_size,),
        "self_attn.q_proj": (queries, a.hidden_size),
        "self_attn.k_proj": (keys, a.hidden_size),
        "self_attn.v_proj": (keys, a.hidden_size),
        "self_attn.o_proj": (a.hidden_size, queries),
        "post_attention_layernorm": (a.hidden_size,),
        "mlp.gate_proj": (a.intermediate_size, a.hidden_size),
        "mlp.up_proj": (a.intermediate_size, a.hidden_size),
        "mlp.down_proj": (a.hidden_size, a.intermediate_size),
    }
    for layer in range(a.num_layers):
        shapes |= {layer_tensor(layer, part): shape for part, shape in parts.items()}
    return shapes


class Checkpoint:
    """Tensors by Hugging Face's names, as float32.

    Attributes:
        rope_factors: [head_dim / 2], what rotary frequencies are divided by, or None (GGUF's way of llama3 scaling).
    """

    def __init__(
        self, read: Callable[[str], torch.Tensor], names: Mapping[str, str], rope_factors: torch.Tensor | None = None
    ) -> None:
        self._read = read
        self._names = names
        self.rope_factors = rope_factors

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, float32."""
        return self._read(name)

    @classmethod
    def open(cls, source: ModelSource) -> Checkpoint:
        """The checkpoint of `source`.

        Raises:
            ModelError: naming the tensor that is missing, unknown or of another shape.
        """
        if source.gguf is not None:
            return _open_gguf(source.gguf, source.architecture)
        return _open_safetensors(source.path, source.architecture)


def _check(path: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Raises ModelError unless `found` is exactly what is expected. Names are those of the file."""
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{path}: tensor {name} is missing: the checkpoint is incomplete")
        if found[name] != shape:
            raise ModelError(f"{path}: tensor {name} has shape {found[name]}, the model's configuration says {shape}")
    unknown = sorted(found.keys() - expected.keys())
    if unknown:
        raise ModelError(f"{path}: tensor {unknown[0]} is not part of a Llama model served here: it cannot be left out")


def _open_gguf(file: GGUFFile, architecture: ModelArchitecture) -> Checkpoint:
    shapes = expected_shapes(architecture)
    names = {name: _gguf_name(name) for name in shapes}
    found = {name: file.shape(name) for name in file.tensor_names()}
    factors = None
    if found.pop(ROPE_FACTORS, None):
        factors = torch.from_numpy(np.array(file.tensor(ROPE_FACTORS)))
    _check(file.path, {names[name]: shape for name, shape in shapes.items()}, found)

    def read(name: str) -> torch.Tensor:
        values = file.tensor(names[name])
        if name.endswith("q_proj.weight"):
            values = _halves_from_pairs(values, architecture.num_heads)
        elif name.endswith("k_proj.weight"):
            values = _halves_from_pairs(values, architecture.num_kv_heads)
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    return Checkpoint(read, names, factors)


def _gguf_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[part]}.weight"


def _halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the order of rows that llama.cpp stores queries and keys in: it rotates neighbours, we rotate halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _open_safetensors(directory: Path, architecture: ModelArchitecture) -> Checkpoint:
    files: dict[Path, Any] = {path: safetensors.safe_open(path, "pt") for path in _safetensors_files(directory)}
    holder = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118 (not a dict)
    found = {name: tuple(file.get_slice(name).get_shape()) for name, file in holder.items() if not _is_derived(name)}
    if architecture.tie_word_embeddings:
        found.pop(HEAD, None)
    expected = expected_shapes(architecture)
    _check(directory, expected, found)

    def read(name: str) -> torch.Tensor:
        values: torch.Tensor = holder[name].get_tensor(name)
        if not values.dtype.is_floating_point or values.dtype.itemsize < 2:
            raise ModelError(f"{directory}: tensor {name} is {values.dtype}: float32, bfloat16 and float16 are served")
        return values.to(torch.float32)

    return Checkpoint(read, {name: name for name in expected})


def _is_derived(name: str) -> bool:
    """Old checkpoints carry the rotary frequencies, which follow from the configuration."""
    return name.endswith("rotary_emb.inv_freq")


def _safetensors_files(directory: Path) -> list[Path]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.is_file():
        try:
            files = sorted({directory / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: cannot be read as an index of safetensors files ({error})") from None
    else:
        files = [single]
    for path in files:
        if not path.is_file():
            raise ModelError(f"{directory}: {path.name} is missing: the weights must be safetensors files")
    return files

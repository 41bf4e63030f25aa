"""The tensors of a GGUF file under the engine's names, in the engine's order of rows."""

from __future__ import annotations

import numpy as np
import torch

from fastgen.model.architecture import EMBEDDING, FINAL_NORM, HEAD, ModelArchitecture
from fastgen.model.checkpoint import Checkpoint, check
from fastgen.model.gguf import GGUFFile

ROPE_FACTORS = "rope_freqs.weight"

_NAMES = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_LAYER_NAMES = {
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


def open_gguf(file: GGUFFile, architecture: ModelArchitecture) -> Checkpoint:
    """The checkpoint in a GGUF file.

    Raises:
        ModelError: naming the tensor that is missing, unknown or of another shape.
    """
    shapes = architecture.tensor_shapes()
    names = {name: gguf_name(name) for name in shapes}
    found = {name: file.shape(name) for name in file.tensor_names()}
    factors = None
    if found.pop(ROPE_FACTORS, None):
        factors = torch.from_numpy(np.array(file.tensor(ROPE_FACTORS)))
    check(file.path, {names[name]: shape for name, shape in shapes.items()}, found)

    def read(name: str) -> torch.Tensor:
        values = file.tensor(names[name])
        if name.endswith("q_proj.weight"):
            values = _halves_from_pairs(values, architecture.num_heads)
        elif name.endswith("k_proj.weight"):
            values = _halves_from_pairs(values, architecture.num_kv_heads)
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    return Checkpoint(read, factors)


def gguf_name(name: str) -> str:
    """The name that a GGUF file gives to a tensor."""
    if name in _NAMES:
        return _NAMES[name]
    layer, part = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
    return f"blk.{layer}.{_LAYER_NAMES[part]}.weight"


def _halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undoes the order of rows that llama.cpp stores queries and keys in: it rotates neighbours, we rotate halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)

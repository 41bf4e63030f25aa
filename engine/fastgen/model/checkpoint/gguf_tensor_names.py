"""Where each tensor of a model lies in a GGUF file: under what name, at which rows of it, and in what order.

Names are those of package `gguf` (`MODEL_TENSORS`, `TENSOR_NAMES`), orders those of llama.cpp's converter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from fastgen.model.config.architecture import EMBEDDING, FINAL_NORM, HEAD, ModelArchitecture

_NAMES = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", HEAD: "output.weight"}
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
# Gemma normalises behind attention, too, and calls the norm before the MLP by another name.
_SANDWICHED = _PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_FUSED = {
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "ffn_up": ("mlp.gate_proj", "mlp.up_proj"),  # Phi-3: both halves of its gated MLP
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj")


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place.

    Attributes:
        name: the file's tensor.
        first_row: where it begins, in rows of the file's tensor with all its leading dimensions taken together.
        paired_heads: heads whose rows llama.cpp has reordered; 0 where it has not. It rotates neighbouring rows of
            Llama's queries and keys, where Hugging Face and this engine rotate the halves of a head.
    """

    name: str
    first_row: int = 0
    paired_heads: int = 0


def places(architecture: ModelArchitecture, names: Collection[str]) -> dict[str, Place]:
    """The place of every tensor of `ModelArchitecture.tensor_shapes` in a file that has tensors of these `names`."""
    shapes = architecture.tensor_shapes()
    return {name: _place(name, architecture, shapes, names) for name in shapes}


def stored_shapes(
    shapes: Mapping[str, tuple[int, ...]], found: Mapping[str, Place], experts: int
) -> dict[str, tuple[int, ...]]:
    """The shapes of the file's own tensors. `experts`: of a layer, whose matrices are stored as one tensor."""
    rows: dict[str, int] = {}
    for name, place in found.items():
        rows[place.name] = max(rows.get(place.name, 0), place.first_row + shapes[name][0])
    stored: dict[str, tuple[int, ...]] = {}
    for name, place in found.items():
        rest = shapes[name][1:]
        if "_exps." in place.name:
            stored[place.name] = (experts, rows[place.name] // experts, *rest)
        elif "_inp_shexp." in place.name:
            stored[place.name] = rest  # the converter drops a dimension of 1
        else:
            stored[place.name] = (rows[place.name], *rest)
    return stored


def _place(
    name: str, architecture: ModelArchitecture, shapes: Mapping[str, tuple[int, ...]], names: Collection[str]
) -> Place:
    match = _LAYER.fullmatch(name)
    if match is None:
        return Place(_NAMES[name])
    layer, part, kind = match.groups()
    if expert := _EXPERT.fullmatch(part):
        return Place(f"blk.{layer}.ffn_{expert[2]}_exps.{kind}", int(expert[1]) * shapes[name][0])
    heads = {"self_attn.q_proj": architecture.num_heads, "self_attn.k_proj": architecture.num_kv_heads}
    paired = heads.get(part, 0) if architecture.name in ("llama", "mixtral") else 0
    for fused, parts in _FUSED.items():
        stored = f"blk.{layer}.{fused}.{kind}"
        if part in parts and stored in names and f"blk.{layer}.{_PARTS[parts[0]]}.{kind}" not in names:
            before = parts[: parts.index(part)]
            first_row = sum(shapes[f"model.layers.{layer}.{each}.{kind}"][0] for each in before)
            return Place(stored, first_row, paired)
    own = (_SANDWICHED if architecture.sandwich_norms else _PARTS)[part]
    return Place(f"blk.{layer}.{own}.{kind}", paired_heads=paired)

"""Location of each tensor of a model in a GGUF file.

Names are those of the package `gguf` (`MODEL_TENSORS`, `TENSOR_NAMES`); the order of rows is that of llama.cpp's
converter.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from fastgen.model.checkpoint.safetensors_tensor_names import TensorLocation
from fastgen.model.config.architecture import EMBEDDING, FINAL_NORM, HEAD, ModelArchitecture
from fastgen.model.config.gguf_families import PAIRED_FAMILIES

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
# Gemma also normalises the output of attention, and names the norm before the MLP differently.
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


def locate_tensors(architecture: ModelArchitecture, names: Collection[str]) -> dict[str, TensorLocation]:
    """Return the location of every tensor of `ModelArchitecture.tensor_shapes` in a file with tensors `names`."""
    shapes = architecture.tensor_shapes()
    return {name: _locate(name, architecture, shapes, names) for name in shapes}


def stored_shapes(
    shapes: Mapping[str, tuple[int, ...]], locations: Mapping[str, TensorLocation], experts: int
) -> dict[str, tuple[int, ...]]:
    """Return the expected shapes of the file's tensors. All `experts` of a layer are stored as one tensor."""
    rows: dict[str, int] = {}
    for name, location in locations.items():
        rows[location.name] = max(rows.get(location.name, 0), location.first_row + shapes[name][0])
    stored: dict[str, tuple[int, ...]] = {}
    for name, location in locations.items():
        rest = shapes[name][1:]
        if "_exps." in location.name:
            stored[location.name] = (experts, rows[location.name] // experts, *rest)
        elif "_inp_shexp." in location.name:
            stored[location.name] = rest  # the converter drops a dimension of 1
        else:
            stored[location.name] = (rows[location.name], *rest)
    return stored


def _locate(
    name: str, architecture: ModelArchitecture, shapes: Mapping[str, tuple[int, ...]], names: Collection[str]
) -> TensorLocation:
    match = _LAYER.fullmatch(name)
    if match is None:
        return TensorLocation(_NAMES[name])
    layer, part, kind = match.groups()
    if expert := _EXPERT.fullmatch(part):
        return TensorLocation(f"blk.{layer}.ffn_{expert[2]}_exps.{kind}", int(expert[1]) * shapes[name][0])
    heads = {"self_attn.q_proj": architecture.num_heads, "self_attn.k_proj": architecture.num_kv_heads}
    paired = heads.get(part, 0) if architecture.name in PAIRED_FAMILIES else 0
    for fused, parts in _FUSED.items():
        stored = f"blk.{layer}.{fused}.{kind}"
        if part in parts and stored in names and f"blk.{layer}.{_PARTS[parts[0]]}.{kind}" not in names:
            before = parts[: parts.index(part)]
            first_row = sum(shapes[f"model.layers.{layer}.{each}.{kind}"][0] for each in before)
            return TensorLocation(stored, first_row, paired)
    own = (_SANDWICHED if architecture.sandwich_norms else _PARTS)[part]
    return TensorLocation(f"blk.{layer}.{own}.{kind}", paired_heads=paired)

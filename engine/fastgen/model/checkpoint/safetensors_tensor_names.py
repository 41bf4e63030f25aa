"""Location of each tensor of a model in a safetensors checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fastgen.model.config.architecture import ModelArchitecture

# Phi-3 stores projections that read the same rows as one tensor.
_PHI3_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_MIXTRAL_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MIXTRAL_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.")


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a checkpoint stores a tensor.

    Attributes:
        name: the file's tensor, which may hold several tensors one below the other.
        first_row: first row in the file's tensor, with all its leading dimensions flattened.
        paired_heads: number of heads whose rows llama.cpp has permuted; 0 if none. It rotates neighbouring rows of
            Llama's queries and keys, where Hugging Face and this engine rotate the halves of a head.
    """

    name: str
    first_row: int = 0
    paired_heads: int = 0


def locate_tensors(architecture: ModelArchitecture) -> dict[str, TensorLocation]:
    """Return the location of every tensor of `ModelArchitecture.tensor_shapes`."""
    shapes = architecture.tensor_shapes()
    match architecture.name:
        case "phi3":
            return _fused(shapes)
        case "mixtral":
            return {name: TensorLocation(_mixtral_name(name)) for name in shapes}
        case _:
            return {name: TensorLocation(name) for name in shapes}


def stored_shapes(
    shapes: Mapping[str, tuple[int, ...]], locations: Mapping[str, TensorLocation]
) -> dict[str, tuple[int, ...]]:
    """Return the expected shapes of the file's tensors."""
    stored: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        location = locations[name]
        rows = max(location.first_row + shape[0], stored.get(location.name, (0,))[0])
        stored[location.name] = (rows, *shape[1:])
    return stored


def _fused(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, TensorLocation]:
    locations = {name: TensorLocation(name) for name in shapes}
    for name in shapes:
        for fused, parts in _PHI3_FUSED.items():
            prefix, found, suffix = name.partition(parts[0])
            if found:
                first_row = 0
                for part in (prefix + part + suffix for part in parts):
                    locations[part] = TensorLocation(prefix + fused + suffix, first_row)
                    first_row += shapes[part][0]
    return locations


def _mixtral_name(name: str) -> str:
    name = _MIXTRAL_EXPERT.sub(lambda found: f".mlp.experts.{found[1]}.{_MIXTRAL_PARTS[found[2]]}.", name)
    return name.replace(".mlp.", ".block_sparse_moe.")

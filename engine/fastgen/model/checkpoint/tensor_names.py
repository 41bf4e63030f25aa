"""Where each tensor of a model lies in a safetensors checkpoint: under what name, and at which rows of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
class Piece:
    """A tensor's place: the file's tensor, and its rows of it where several are stored as one."""

    name: str
    rows: slice | None = None


def pieces(architecture: ModelArchitecture) -> dict[str, Piece]:
    """The place of every tensor of `ModelArchitecture.tensor_shapes`."""
    shapes = architecture.tensor_shapes()
    match architecture.name:
        case "phi3":
            return _fused(shapes)
        case "mixtral":
            return {name: Piece(_mixtral_name(name)) for name in shapes}
        case _:
            return {name: Piece(name) for name in shapes}


def stored_shapes(shapes: Mapping[str, tuple[int, ...]], places: Mapping[str, Piece]) -> dict[str, tuple[int, ...]]:
    """The shapes of the file's own tensors."""
    stored: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        piece = places[name]
        rows = shape[0] if piece.rows is None else max(piece.rows.stop, stored.get(piece.name, (0,))[0])
        stored[piece.name] = (rows, *shape[1:])
    return stored


def _fused(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Piece]:
    places = {name: Piece(name) for name in shapes}
    for name in shapes:
        for fused, parts in _PHI3_FUSED.items():
            prefix, found, suffix = name.partition(parts[0])
            if found:
                places |= _in_a_row(shapes, [prefix + part + suffix for part in parts], prefix + fused + suffix)
    return places


def _in_a_row(shapes: Mapping[str, tuple[int, ...]], parts: Iterable[str], stored: str) -> dict[str, Piece]:
    places, first = {}, 0
    for part in parts:
        end = first + shapes[part][0]
        places[part] = Piece(stored, slice(first, end))
        first = end
    return places


def _mixtral_name(name: str) -> str:
    name = _MIXTRAL_EXPERT.sub(lambda found: f".mlp.experts.{found[1]}.{_MIXTRAL_PARTS[found[2]]}.", name)
    return name.replace(".mlp.", ".block_sparse_moe.")

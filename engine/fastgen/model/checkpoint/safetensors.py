"""Checkpoints of safetensors files in a Hugging Face directory."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import torch

from fastgen.model import ModelError
from fastgen.model.checkpoint.checkpoint import (
    Checkpoint,
    EmbeddingTable,
    TensorLocation,
    check_tensors,
    rows_before,
    stored_shapes,
)
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.checkpoint.kv_scales import is_kv_scale, read_kv_scales
from fastgen.model.config.architecture import EMBEDDING, HEAD, ModelArchitecture

# Names of the decoder's tensors begin so in a checkpoint with a head.
_PREFIX = "model."
# Phi-3 stores projections that read the same rows as one tensor.
_PHI3_FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_MIXTRAL_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_MIXTRAL_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.")


def open_safetensors(directory: Path, architecture: ModelArchitecture) -> Checkpoint:
    """Open the checkpoint of a Hugging Face directory.

    Raises:
        ModelError: naming the faulty file or tensor.
    """
    files: dict[Path, Any] = {path: safetensors.safe_open(path, "pt") for path in _safetensors_files(directory)}
    holder = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118 (not a dict)
    scales = read_kv_scales(
        directory, filter(is_kv_scale, holder), lambda name: holder[name].get_tensor(name), architecture.num_layers
    )
    found = {name: tuple(file.get_slice(name).get_shape()) for name, file in holder.items() if not _is_no_weight(name)}
    if architecture.tie_word_embeddings:
        found.pop(HEAD, None)
    shapes, locations = architecture.tensor_shapes(), _locate_tensors(architecture)
    if EMBEDDING not in found and EMBEDDING.removeprefix(_PREFIX) in found:  # saved without the head
        locations = {name: replace(at, name=at.name.removeprefix(_PREFIX)) for name, at in locations.items()}
    check_tensors(directory, stored_shapes(shapes, locations), found)

    def read(name: str) -> torch.Tensor:
        stored, first = locations[name].name, locations[name].first_row
        file, rows = holder[stored], shapes[name][0]
        values: torch.Tensor = (
            file.get_tensor(stored) if found[stored][0] == rows else file.get_slice(stored)[first : first + rows]
        )
        if not values.dtype.is_floating_point or values.dtype.itemsize < 2:
            raise ModelError(f"{directory}: tensor {stored} is {values.dtype}: convert it to float32 or bfloat16")
        return values

    return Checkpoint(lambda name: FloatTensor(lambda: read(name)), kv_scales=scales)


class FloatTensor:
    """A tensor stored in a floating-point format."""

    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        self._read = read

    def float32(self) -> torch.Tensor:
        """Read the values as float32."""
        return self._read().to(torch.float32)

    def int8(self) -> Int8Blocks:
        """Quantise the matrix to int8 blocks."""
        return Int8Blocks.quantise(self.float32().numpy())

    def table(self) -> EmbeddingTable:
        """Read the matrix in its stored format."""
        # Copy: pages of a mapped file may be evicted, and a step must not wait for the disk.
        values = self._read().clone()
        return lambda rows: values.index_select(0, rows).to(torch.float32)


def _is_no_weight(name: str) -> bool:
    """Return whether a tensor holds a KV scale, or rotary frequencies, which old checkpoints store needlessly."""
    return is_kv_scale(name) or name.endswith("rotary_emb.inv_freq")


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


def _locate_tensors(architecture: ModelArchitecture) -> dict[str, TensorLocation]:
    """Return the location of every tensor of `ModelArchitecture.tensor_shapes`."""
    shapes = architecture.tensor_shapes()
    match architecture.name:
        case "phi3":
            return {name: _phi3_location(name, shapes) for name in shapes}
        case "mixtral":
            return {name: TensorLocation(_mixtral_name(name)) for name in shapes}
        case _:
            return {name: TensorLocation(name) for name in shapes}


def _phi3_location(name: str, shapes: Mapping[str, tuple[int, ...]]) -> TensorLocation:
    for fused, parts in _PHI3_FUSED.items():
        for part in parts:
            if part in name:
                return TensorLocation(name.replace(part, fused), rows_before(shapes, name, part, parts))
    return TensorLocation(name)


def _mixtral_name(name: str) -> str:
    name = _MIXTRAL_EXPERT.sub(lambda found: f".mlp.experts.{found[1]}.{_MIXTRAL_PARTS[found[2]]}.", name)
    return name.replace(".mlp.", ".block_sparse_moe.")

"""Checkpoints of safetensors files in a Hugging Face directory."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors
import torch

from fastgen.model import ModelError, first_line
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
from fastgen.model.config.fields import shown
from fastgen.model_files import is_inside, read_json_object

# Prefix of the names of the decoder's tensors in a checkpoint with a head.
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
        ConfigError: if its index cannot be read.
        ModelError: naming the faulty file or tensor.
    """
    holder = _open_files(directory)

    def tensor(name: str, rows: slice | None = None) -> torch.Tensor:
        file = holder[name]
        try:
            values: torch.Tensor = file.get_tensor(name) if rows is None else file.get_slice(name)[rows]
        except Exception as error:  # safetensors raises several, for example for a type that torch does not have
            raise ModelError(f"{directory}: tensor {name} cannot be read ({first_line(error)})") from None
        return values

    scales = read_kv_scales(directory, filter(is_kv_scale, holder), tensor, architecture.num_layers)
    found = {name: tuple(file.get_slice(name).get_shape()) for name, file in holder.items() if not _is_no_weight(name)}
    if not architecture.has_head:
        found.pop(HEAD, None)
    elif architecture.tie_word_embeddings and {EMBEDDING, HEAD} <= found.keys():
        # As in transformers: a head with values of its own is used, whatever config.json says.
        embedding, head = tensor(EMBEDDING), tensor(HEAD)
        if embedding.dtype == head.dtype and torch.equal(embedding, head):
            found.pop(HEAD)
        else:
            architecture = replace(architecture, tie_word_embeddings=False)
    shapes, locations = architecture.tensor_shapes(), _locate_tensors(architecture)
    if EMBEDDING not in found and EMBEDDING.removeprefix(_PREFIX) in found:  # saved without the head
        locations = {name: replace(at, name=at.name.removeprefix(_PREFIX)) for name, at in locations.items()}
    elif EMBEDDING not in found and architecture.tie_word_embeddings and HEAD in found:  # one of the two is enough
        locations[EMBEDDING] = TensorLocation(HEAD)
    check_tensors(directory, stored_shapes(shapes, locations), found)

    def read(name: str) -> torch.Tensor:
        stored, first = locations[name].name, locations[name].first_row
        rows = shapes[name][0]
        values = tensor(stored, None if found[stored][0] == rows else slice(first, first + rows))
        if not values.dtype.is_floating_point or values.dtype.itemsize < 2:
            raise ModelError(f"{directory}: tensor {stored} is {values.dtype}: convert it to float32 or bfloat16")
        return values

    def stored(name: str) -> FloatTensor:
        return FloatTensor(lambda: read(name), shapes[name])

    return Checkpoint(stored, architecture.head, kv_scales=scales)


class FloatTensor:
    """A tensor stored in a floating-point format."""

    def __init__(self, read: Callable[[], torch.Tensor], shape: tuple[int, ...]) -> None:
        self._read = read
        self.shape = shape

    def values(self) -> torch.Tensor:
        """Read the values in their stored type."""
        return self._read()

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


def _open_files(directory: Path) -> dict[str, Any]:
    """Return the open safetensors file of each tensor, by the tensor's name."""
    holder: dict[str, Any] = {}
    for path in _safetensors_files(directory):
        try:
            file: Any = safetensors.safe_open(path, "pt")
        except Exception as error:  # safetensors.SafetensorError, OSError and others
            raise ModelError(f"{path}: cannot be read as a safetensors file ({first_line(error)})") from None
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if name in holder:
                raise ModelError(f"{path}: tensor {name} is in another file of the checkpoint too: remove one of them")
            holder[name] = file
    return holder


def _safetensors_files(directory: Path) -> list[Path]:
    """Return the checkpoint's files: model.safetensors, or those of the index if that file does not exist."""
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    files = _indexed_files(index) if index.is_file() and not single.is_file() else [single]
    for path in files:
        if not path.is_file():
            raise ModelError(f"{directory}: {path.name} is missing: expected all weights in safetensors files")
    return files


def _indexed_files(index: Path) -> list[Path]:
    names = read_json_object(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ModelError(f"{index}: weight_map must be an object with the name of a file for each tensor")
    for name in names.values():
        if not name.endswith(".safetensors") or not is_inside(name):
            raise ModelError(f"{index}: weight_map names {shown(name)}: expected a safetensors file in the directory")
    return sorted({index.parent / name for name in names.values()})


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

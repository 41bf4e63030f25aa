"""Checkpoints of GGUF files, under the engine's tensor names and order of rows.

The files' names are those of the package `gguf` (`MODEL_TENSORS`, `TENSOR_NAMES`); their order of rows is that of
llama.cpp's converter.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from copy import copy
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fastgen.model import ModelError
from fastgen.model.checkpoint.checkpoint import (
    Checkpoint,
    EmbeddingTable,
    Part,
    StoredBlocks,
    TensorLocation,
    check_tensors,
    rows_before,
    stored_shapes,
)
from fastgen.model.checkpoint.gguf_file import GGUFFile
from fastgen.model.checkpoint.gguf_types import FOUR_BIT_TYPES, dequantise
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.checkpoint.packed_blocks import PackedBlocks
from fastgen.model.config.architecture import EMBEDDING, FINAL_NORM, HEAD, ModelArchitecture
from fastgen.model.config.gguf_families import PAIRED_FAMILIES
from fastgen.model.config.rope_from_gguf import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

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

Scalar = TypeVar("Scalar", bound=np.generic)


def open_gguf(file: GGUFFile, architecture: ModelArchitecture) -> Checkpoint:
    """Open the checkpoint in a GGUF file.

    Raises:
        ModelError: naming a tensor that is missing, unknown or has another shape.
    """
    shapes, names = architecture.tensor_shapes(), frozenset(file.tensor_names())
    found = {name: file.shape(name) for name in names - {ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS}}
    locations = locate_tensors(architecture, names)
    check_tensors(file.path, stored_shapes(shapes, locations), found)
    factors = torch.from_numpy(np.array(file.tensor(ROPE_FACTORS))) if ROPE_FACTORS in names else None
    return Checkpoint(lambda name: GGUFTensor(file, locations[name], shapes[name]), architecture.head, factors)


class GGUFTensor:
    """A tensor in a GGUF file; see `checkpoint.StoredTensor`."""

    def __init__(self, file: GGUFFile, location: TensorLocation, shape: tuple[int, ...]) -> None:
        self._path, self._name, self._shape = file.path, location.name, shape
        self._kind, raw = file.raw(location.name)
        self._heads = location.paired_heads
        columns = file.shape(location.name)[-1]
        first_value = location.first_row * columns if len(shape) > 1 else location.first_row
        block, block_bytes = self._kind.block, self._kind.block_bytes
        start, size = first_value // block * block_bytes, math.prod(shape) // block * block_bytes
        self._raw = raw[start : start + size].reshape(shape[0] if len(shape) > 1 else size // block_bytes, -1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self._shape

    @property
    def block(self) -> int:
        """Values of a block of the tensor's type."""
        return self._kind.block

    def part(self, part: Part) -> GGUFTensor:
        """Return a part of the tensor. Its rows are those of whole heads if they are permuted."""
        found, block, block_bytes = copy(self), self._kind.block, self._kind.block_bytes
        if part.rows is not None:
            found._raw = found._raw[part.rows.start : part.rows.stop]
            found._heads = self._heads * len(part.rows) // self._shape[0]
        if part.columns is not None:
            first, end = part.columns.start, part.columns.stop
            if first % block or end % block:
                raise ModelError(
                    f"tensor {self._name} has blocks of {block} {self._kind.name} values in a row, and this number of "
                    "ranks divides one: lower --tensor-parallel"
                )
            found._raw = found._raw[:, first // block * block_bytes : end // block * block_bytes]
        found._shape = part.shape(self._shape)
        return found

    def values(self) -> torch.Tensor:
        """Read the exact values as float32."""
        return self.float32()

    def float32(self) -> torch.Tensor:
        """Read the exact values as float32."""
        values = _unpaired(dequantise(self._raw.reshape(-1), self._kind).reshape(self._shape), self._heads)
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def int8(self) -> Int8Blocks:
        """Read a matrix as int8 blocks, see `Int8Blocks.of_tensor`."""
        blocks = Int8Blocks.of_tensor(self._raw.reshape(-1), self._kind, self._shape[-1])
        return Int8Blocks(_unpaired(blocks.values, self._heads), _unpaired(blocks.scales, self._heads))

    @property
    def has_four_bits(self) -> bool:
        """Whether `blocks` returns values of four bits."""
        return self._kind.name in FOUR_BIT_TYPES

    def blocks(self) -> StoredBlocks | None:
        """Read a matrix in the file's blocks; those of other forms than `PackedBlocks` as `int8`.

        Raises:
            ModelError: if a scale is infinite or not a number.
        """
        packed = PackedBlocks.of_tensor(self._raw.reshape(-1), self._kind, self._shape[-1])
        if packed is not None and not packed.is_finite:
            raise ModelError(
                f"{self._path}: the GGUF file is damaged (tensor {self._name} has a scale that is not finite): "
                "download it again"
            )
        if packed is None:
            return self.int8() if self._kind.is_quantised else None
        if not self._heads:
            return packed
        return packed.rows(_unpaired(np.arange(self._shape[0])[:, None], self._heads)[:, 0])

    def table(self) -> EmbeddingTable:
        """Read the matrix in the file's blocks; rows are dequantised as they are looked up."""
        assert not self._heads, "only rows of projections are permuted"
        # Copy: pages of a mapped file may be evicted, and a step must not wait for the disk.
        stored, kind = self._raw.copy(), self._kind

        def look_up(rows: torch.Tensor) -> torch.Tensor:
            return torch.from_numpy(dequantise(stored[rows.numpy()].reshape(-1), kind).reshape(len(rows), -1))

        return look_up


def _unpaired(values: npt.NDArray[Scalar], heads: int) -> npt.NDArray[Scalar]:
    """Undo llama.cpp's permutation of rows (`TensorLocation.paired_heads`)."""
    if not heads:
        return values
    return values.reshape(heads, len(values) // heads // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)


def locate_tensors(architecture: ModelArchitecture, names: Collection[str]) -> dict[str, TensorLocation]:
    """Return the location of every tensor of `ModelArchitecture.tensor_shapes`; `names` are the file's tensors."""
    shapes = architecture.tensor_shapes()
    return {name: _locate(name, architecture, shapes, names) for name in shapes}


def _locate(
    name: str, architecture: ModelArchitecture, shapes: Mapping[str, tuple[int, ...]], names: Collection[str]
) -> TensorLocation:
    match = _LAYER.fullmatch(name)
    if match is None:
        return TensorLocation(_NAMES[name])
    layer, part, kind = match.groups()
    if expert := _EXPERT.fullmatch(part):
        stored, first = f"blk.{layer}.ffn_{expert[2]}_exps.{kind}", int(expert[1]) * shapes[name][0]
        return TensorLocation(stored, first, stack=architecture.most_experts)
    heads = {"self_attn.q_proj": architecture.num_heads, "self_attn.k_proj": architecture.num_kv_heads}
    paired = heads.get(part, 0) if architecture.name in PAIRED_FAMILIES else 0
    for fused, parts in _FUSED.items():
        stored = f"blk.{layer}.{fused}.{kind}"
        if part in parts and stored in names and f"blk.{layer}.{_PARTS[parts[0]]}.{kind}" not in names:
            return TensorLocation(stored, rows_before(shapes, name, part, parts), paired)
    own = (_SANDWICHED if architecture.output_norms else _PARTS)[part]
    return TensorLocation(f"blk.{layer}.{own}.{kind}", paired_heads=paired)

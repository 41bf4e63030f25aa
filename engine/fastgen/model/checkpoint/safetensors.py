"""Checkpoints of safetensors files in a Hugging Face directory."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from fastgen.model import ModelError
from fastgen.model.checkpoint.checkpoint import (
    WHOLE,
    Checkpoint,
    EmbeddingTable,
    Part,
    StoredBlocks,
    StoredTensor,
    TensorLocation,
    check_tensors,
    rows_before,
    stored_shapes,
)
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.checkpoint.kv_scales import is_kv_scale, read_kv_scales
from fastgen.model.checkpoint.quantized.find import quantized_weights
from fastgen.model.checkpoint.quantized.mxfp4 import MXFP4Weight
from fastgen.model.checkpoint.quantized.weight import QuantizedTensor, QuantizedWeight
from fastgen.model.checkpoint.tensor_files import TensorFiles
from fastgen.model.config.architecture import EMBEDDING, FINAL_NORM, HEAD, ModelArchitecture
from fastgen.model.config.quantization import Quantization

# What the names of the decoder's tensors begin with, and the name of the head: in a checkpoint of a text model with or
# without a head, and as the text part of a multimodal checkpoint of several versions of transformers.
_PREFIX = "model."
_LAYOUTS = {
    _PREFIX: HEAD,
    "": HEAD,
    "language_model.model.": f"language_model.{HEAD}",
    "model.language_model.": HEAD,
    "model.text_model.": HEAD,
}
_QKV: dict[str, tuple[str, ...]] = {"self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")}
_GATE_UP: dict[str, tuple[str, ...]] = {"mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj")}
# By family: tensors that stack projections of the same input, by their rows.
_CONVOLUTION = {"linear_attn.conv1d": tuple(f"linear_attn.{part}_conv1d" for part in "qkv")}
_LINEAR_QKV = {"linear_attn.in_proj_qkv": tuple(f"linear_attn.in_proj_{part}" for part in "qkv")}
_FUSED: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "phi3": _QKV | _GATE_UP,
    "glm": _GATE_UP,
    "glm4": _GATE_UP,
    "qwen3_next": _CONVOLUTION,
    "qwen3_5_text": _CONVOLUTION | _LINEAR_QKV,
    "qwen3_5_moe_text": _CONVOLUTION | _LINEAR_QKV,
}
# By family: parts of names that differ from those of `ModelArchitecture.tensor_shapes`.
_RENAMED: Mapping[str, Mapping[str, str]] = {
    "glm4": {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    },
    "glm4_moe": {".shared_expert.": ".shared_experts."},
    "gpt_oss": {".mlp.gate.": ".mlp.router."},
    "granitemoe": {".mlp.gate.": ".block_sparse_moe.router.layer."},
    "granitemoehybrid": {".mlp.gate.": ".block_sparse_moe.router.layer."},
    "llama4_text": {".mlp.gate.": ".feed_forward.router.", ".mlp.": ".feed_forward."},
    "gemma4_text": {".mlp.experts.": ".experts.", ".mlp.gate.weight": ".router.proj.weight", ".mlp.gate.": ".router."},
}
# Families that rotate neighbouring rows of queries and keys (see `TensorLocation.paired_heads`).
_PAIRED = frozenset({"ernie4_5", "glm", "glm4", "llama4_text"})
# Families whose stacked experts are [in, out] also where their sizes do not show it.
_TRANSPOSED = frozenset({"llama4_text"})
# Families whose checkpoints have queries and gates of attention head by head.
_GATED = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
_EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
_MIXTRAL_PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_GPT_OSS_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_GRANITE = frozenset({"granitemoe", "granitemoehybrid"})
_GRANITE_MATRIX = re.compile(r"(.+)\.mlp\.(?:shared_expert\.|experts\.(\d+)\.)?(gate|up|down)_proj\.weight")
_MIXTRAL_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.")


def open_safetensors(
    directory: Path,
    architecture: ModelArchitecture,
    other_parts: tuple[str, ...] = (),
    quantization: Quantization | None = None,
) -> Checkpoint:
    """Open the checkpoint of a Hugging Face directory.

    Args:
        other_parts: prefixes of the names of tensors that are ignored.
        quantization: how the quantised weights are stored; None if there are none.

    Raises:
        ConfigError: if its index cannot be read.
        ModelError: naming the faulty file or tensor.
    """
    files = TensorFiles(directory, other_parts)
    scales = read_kv_scales(directory, filter(is_kv_scale, files), files.read, architecture.num_layers)
    quantized = {} if quantization is None else quantized_weights(files, quantization)
    packed = frozenset(name for weight in quantized.values() for name in weight.tensors)
    found = {name: files.shape(name) for name in files if name not in packed and not _is_no_weight(name)}
    found |= {name: weight.shape for name, weight in quantized.items()}
    stored_name = _layout(found)
    for name in _unused_keys(architecture):
        found.pop(stored_name(name), None)
    stored_embedding, stored_head = stored_name(EMBEDDING), stored_name(HEAD)
    if not architecture.has_head:
        found.pop(stored_head, None)
    elif architecture.tie_word_embeddings and (tied := {stored_embedding, stored_head}) <= found.keys():
        # As in transformers: a head with values of its own is used, whatever config.json says.
        if tied.isdisjoint(quantized) and _are_equal(files.read(stored_embedding), files.read(stored_head)):
            found.pop(stored_head)
        else:
            architecture = replace(architecture, tie_word_embeddings=False)
    shapes, locations = architecture.tensor_shapes(), _locate_tensors(architecture)
    locations = {name: replace(at, name=stored_name(at.name)) for name, at in locations.items()}
    # Quantised matrices are [out, in].
    locations |= {name: replace(at, transposed=False) for name, at in locations.items() if at.name in quantized}
    if stored_embedding not in found and architecture.tie_word_embeddings and stored_head in found:
        locations[EMBEDDING] = TensorLocation(stored_head)  # one of the two is enough
    # transformers 5 saves the experts of a layer in one tensor.
    is_transposed = architecture.name in _TRANSPOSED
    locations = {name: _in_stack(at, shapes[name], found, is_transposed) for name, at in locations.items()}
    check_tensors(directory, stored_shapes(shapes, locations), found)

    rotated = architecture.rope_configs[0].dimensions
    tensors = _StoredTensors(files, quantized, found, locations, shapes, rotated)
    return Checkpoint(tensors, architecture.head, kv_scales=scales)


@dataclass(frozen=True, slots=True)
class _StoredTensors:
    """The model's tensors by name, read on demand.

    Attributes:
        files: of the checkpoint.
        quantized: quantised weights by the names that an unquantised checkpoint has.
        found: shapes of the files' tensors and of the quantised weights.
        locations, shapes: of the model's tensors, by the names of `ModelArchitecture.tensor_shapes`.
        rotated: dimensions of a head that are rotated.
    """

    files: TensorFiles
    quantized: Mapping[str, QuantizedWeight]
    found: Mapping[str, tuple[int, ...]]
    locations: Mapping[str, TensorLocation]
    shapes: Mapping[str, tuple[int, ...]]
    rotated: int

    def __call__(self, name: str) -> StoredTensor:
        location, tensor = self.locations[name], self._unordered(name)
        if not location.paired_heads:
            return tensor
        return ReorderedTensor(tensor, _order_of_halves(tensor.shape[0], location.paired_heads, self.rotated))

    def _unordered(self, name: str) -> StoredTensor:
        """Return a tensor in which neighbouring rows may still be rotated together."""
        location, shape = self.locations[name], self.shapes[name]
        if location.interleaved is None:
            return self._located(location, shape)
        order = _order_of_parts(*location.interleaved)[location.first_row :][: shape[0]]
        whole = self._located(TensorLocation(location.name), self.found[location.name])
        return ReorderedTensor(whole, order)

    def _located(self, location: TensorLocation, shape: tuple[int, ...]) -> StoredTensor:
        """Return the rows at a location in the order of the file."""
        if location.name not in self.quantized:
            return FloatTensor(partial(self._read, location, shape), shape)
        weight, first, step = self.quantized[location.name], location.first_row, location.step
        if step > 1:
            assert isinstance(weight, MXFP4Weight), "only gpt-oss's rows alternate"
            weight = weight.every(step, first % step)
        return QuantizedTensor(weight, first // step, shape)

    def _read(self, location: TensorLocation, shape: tuple[int, ...], part: Part = WHOLE) -> torch.Tensor:
        """Read a tensor that is not quantised, or a part of it."""
        stored, rows = location.name, part.rows or range(shape[0])
        first = 0 if location.stack else location.first_row
        slices = [slice(first + rows.start, first + rows.stop)]
        if part.columns is not None:
            slices.append(slice(part.columns.start, part.columns.stop))
        if location.stack:
            values = _rows_in_stack(self.files, location)[tuple(slices)].contiguous()
        else:
            is_whole = part.columns is None and self.found[stored][0] == len(rows)
            values = self.files.read(stored, *([] if is_whole else slices))
        if not values.dtype.is_floating_point or values.dtype.itemsize < 2:
            raise ModelError(
                f"{self.files.directory}: tensor {stored} is {values.dtype}: convert it to float32 or bfloat16"
            )
        return values


def _rows_in_stack(files: TensorFiles, location: TensorLocation) -> torch.Tensor:
    """Return an expert's rows in the file, from a tensor's first row on."""
    number, first = divmod(location.first_row, files.shape(location.name)[2 if location.transposed else 1])
    matrix = files.read(location.name, slice(number, number + 1))[0]
    return (matrix.T if location.transposed else matrix)[first :: location.step]


def _are_equal(embedding: torch.Tensor, head: torch.Tensor) -> bool:
    return embedding.dtype == head.dtype and torch.equal(embedding, head)


class FloatTensor:
    """A tensor stored in a floating-point format.

    Args:
        read: returns the tensor, or the `Part` of it that it is given.
        shape: of the tensor.
    """

    block = 1

    def __init__(self, read: Callable[..., torch.Tensor], shape: tuple[int, ...]) -> None:
        self._read = read
        self.shape = shape

    def part(self, part: Part) -> FloatTensor:
        """Return a part of the tensor."""
        return FloatTensor(lambda: self._read(part), part.shape(self.shape))

    def values(self) -> torch.Tensor:
        """Read the values in their stored type."""
        return self._read()

    def float32(self) -> torch.Tensor:
        """Read the values as float32."""
        return self._read().to(torch.float32)

    def int8(self) -> Int8Blocks:
        """Quantise the matrix to int8 blocks."""
        return Int8Blocks.quantise(self.float32().numpy())

    def blocks(self) -> None:
        """Return None: it is stored as floating-point numbers."""

    def table(self) -> EmbeddingTable:
        """Read the matrix in its stored format."""
        # Copy: pages of a mapped file may be evicted, and a step must not wait for the disk.
        values = self._read().clone()
        return lambda rows: values.index_select(0, rows).to(torch.float32)


class ReorderedTensor:
    """Rows of another stored tensor, all or some, in the given order.

    Args:
        tensor: the other one.
        order: [rows], its rows.
    """

    def __init__(self, tensor: StoredTensor, order: torch.Tensor) -> None:
        self._tensor = tensor
        self._order = order
        self.shape = (len(order), *tensor.shape[1:])
        self.block = tensor.block

    def part(self, part: Part) -> ReorderedTensor:
        """Return a part. The other tensor's rows from the first to the last of it are read."""
        if part.rows is None:
            return ReorderedTensor(self._tensor.part(part), self._order)
        order = self._order[part.rows.start : part.rows.stop]
        first, last = int(order.min()), int(order.max())
        return ReorderedTensor(self._tensor.part(replace(part, rows=range(first, last + 1))), order - first)

    def values(self) -> torch.Tensor:
        """Read the values."""
        return self._tensor.values()[self._order]

    def float32(self) -> torch.Tensor:
        """Read the values as float32."""
        return self._tensor.float32()[self._order]

    def int8(self) -> Int8Blocks:
        """Read the matrix as int8 blocks."""
        return self._tensor.int8().rows(self._order.numpy())

    def blocks(self) -> StoredBlocks | None:
        """Read the matrix in the blocks that the checkpoint stores."""
        blocks = self._tensor.blocks()
        return None if blocks is None else blocks.rows(self._order.numpy())

    def table(self) -> EmbeddingTable:
        """Read the matrix in its stored format."""
        table = self._tensor.table()
        return lambda rows: table(self._order[rows])


def _layout(found: Container[str]) -> Callable[[str], str]:
    """Return the function from names of `ModelArchitecture.tensor_shapes` to names in the file."""
    prefixes = (prefix for prefix in _LAYOUTS if prefix + FINAL_NORM.removeprefix(_PREFIX) in found)
    prefix = next(prefixes, _PREFIX)
    return lambda name: _LAYOUTS[prefix] if name == HEAD else prefix + name.removeprefix(_PREFIX)


def _unused_keys(architecture: ModelArchitecture) -> Iterator[str]:
    """Yield the tensors with which published files project keys and values that layers do not compute (Gemma 4)."""
    for index, layer in enumerate(architecture.layers):
        if layer.kv_layer is not None:
            names = (f"self_attn.{part}" for part in ("k_proj", "v_proj", "k_norm"))
            yield from (f"model.layers.{index}.{name}.{kind}" for name in names for kind in ("weight", "bias"))


def _is_no_weight(name: str) -> bool:
    """Return whether a tensor holds a KV scale, or rotary frequencies, which old checkpoints store needlessly."""
    return is_kv_scale(name) or name.endswith("rotary_emb.inv_freq")


def _locate_tensors(architecture: ModelArchitecture) -> dict[str, TensorLocation]:
    """Return the location of every tensor of `ModelArchitecture.tensor_shapes`."""
    shapes = architecture.tensor_shapes()
    return {name: _locate(name, architecture, shapes) for name in shapes}


def _locate(name: str, architecture: ModelArchitecture, shapes: Mapping[str, tuple[int, ...]]) -> TensorLocation:
    if architecture.name in ("mixtral", "minimax_m2"):
        return TensorLocation(_mixtral_name(name))
    if architecture.name == "gpt_oss" and (expert := _GPT_OSS_EXPERT.fullmatch(name)):
        return _gpt_oss_expert(expert, shapes[name][0], architecture.most_experts)
    if architecture.name in _GRANITE and (matrix := _GRANITE_MATRIX.fullmatch(name)):
        return _granite_matrix(matrix, shapes[name][0], architecture.most_experts)
    if architecture.name in _GATED and (location := _interleaved(name, architecture)) is not None:
        return location
    for fused, parts in _FUSED.get(architecture.name, {}).items():
        for part in parts:
            if part in name:
                return TensorLocation(name.replace(part, fused), rows_before(shapes, name, part, parts))
    heads = {"q_proj": architecture.num_heads, "k_proj": architecture.num_kv_heads}
    paired = next((count for part, count in heads.items() if f".{part}." in name), 0)
    renamed = (name.replace(own, stored) for own, stored in _RENAMED.get(architecture.name, {}).items() if own in name)
    return TensorLocation(next(renamed, name), paired_heads=paired if architecture.name in _PAIRED else 0)


def _in_stack(
    location: TensorLocation, shape: tuple[int, ...], found: Mapping[str, tuple[int, ...]], prefers_transposed: bool
) -> TensorLocation:
    """Return where an expert's matrix of this shape is in a file that stacks those of its layer.

    `found` has the file's shapes, which tell whether the matrices are transposed, unless they are square.
    """
    if (expert := _EXPERT.fullmatch(location.name)) is None:
        return location
    stack = f"{expert[1]}{'down' if expert[3] == 'down' else 'gate_up'}_proj"
    if stack not in found or len(found[stack]) != 3:
        return location
    experts, *sizes = found[stack]
    rows = shape[0] * (1 if expert[3] == "down" else 2)
    transposed = sizes == [shape[1], rows] and (prefers_transposed or shape[1] != rows)
    first = int(expert[2]) * rows + (rows // 2 if expert[3] == "up" else 0)
    return TensorLocation(stack, first, stack=experts, transposed=transposed)


def _interleaved(name: str, architecture: ModelArchitecture) -> TensorLocation | None:
    """Return where a family of `_GATED` stores a tensor that shares a tensor of the file with others; else None."""
    for part, first in (
        ("self_attn.q_proj", 0),
        ("self_attn.gate_proj", architecture.num_heads * architecture.head_dim),
    ):
        if part in name:
            groups = (architecture.num_heads, (architecture.head_dim,) * 2)
            return TensorLocation(name.replace(part, "self_attn.q_proj"), first, interleaved=groups)
    delta = architecture.delta
    if delta is None or architecture.name != "qwen3_next":
        return None
    shared = delta.value_heads // delta.key_heads
    values = shared * delta.value_dim
    mixed, gates = (delta.key_heads, (delta.key_dim, delta.key_dim, values, values)), (delta.key_heads, (shared,) * 2)
    stacked: dict[str, tuple[str, int, tuple[int, tuple[int, ...]]]] = {
        "in_proj_q.": ("in_proj_qkvz.", 0, mixed),
        "in_proj_k.": ("in_proj_qkvz.", delta.keys, mixed),
        "in_proj_v.": ("in_proj_qkvz.", 2 * delta.keys, mixed),
        "in_proj_z.": ("in_proj_qkvz.", delta.mixed, mixed),
        "in_proj_b.": ("in_proj_ba.", 0, gates),
        "in_proj_a.": ("in_proj_ba.", delta.value_heads, gates),
    }
    for part, (file, first_row, rows) in stacked.items():
        if part in name:
            return TensorLocation(name.replace(part, file), first_row, interleaved=rows)
    return None


def _order_of_parts(groups: int, sizes: tuple[int, ...]) -> torch.Tensor:
    """Return the order of rows in which each part of all groups follows the part before it."""
    parts = torch.arange(groups * sum(sizes)).view(groups, -1).split(sizes, 1)  # type: ignore[no-untyped-call]
    return torch.cat([part.flatten() for part in parts])


def _order_of_halves(rows: int, heads: int, rotated: int) -> torch.Tensor:
    """Return the order of rows in which a rotated pair is half of the head's `rotated` rows apart, not neighbours."""
    numbers = torch.arange(rows).view(heads, -1)
    pairs, rest = numbers[:, :rotated], numbers[:, rotated:]
    return torch.cat((pairs[:, ::2], pairs[:, 1::2], rest), 1).flatten()


def _gpt_oss_expert(name: re.Match[str], rows: int, experts: int) -> TensorLocation:
    """Return where a tensor of an expert is stored: the rows of gate and up alternate, and all experts are stacked."""
    prefix, number, part, kind = name.groups()
    step = 1 if part == "down" else 2
    stored = f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}"
    first = int(number) * rows * step + (part == "up")
    return TensorLocation(stored, first, step=step, stack=experts, transposed=kind == "weight")


def _granite_matrix(name: re.Match[str], rows: int, experts: int) -> TensorLocation:
    """Return where a matrix of an MLP or expert is stored: gate and up in one tensor, and all experts stacked."""
    prefix, number, part = name.groups()
    module = "shared_mlp" if number is None else "block_sparse_moe"
    stored = f"{prefix}.{module}.{'output' if part == 'down' else 'input'}_linear.weight"
    first = int(number or 0) * (1 if part == "down" else 2) + (part == "up")
    return TensorLocation(stored, first * rows, stack=0 if number is None else experts)


def _mixtral_name(name: str) -> str:
    name = _MIXTRAL_EXPERT.sub(lambda found: f".mlp.experts.{found[1]}.{_MIXTRAL_PARTS[found[2]]}.", name)
    return name.replace(".mlp.gate.e_score", ".mlp.e_score").replace(".mlp.", ".block_sparse_moe.")

"""Writes tiny checkpoints in the formats of quantised weights, and computes what they mean.

Each writer follows the format's specification by itself, with loops, in another way than the engine reads: it takes the
quantised integers or floats of a matrix and returns its tensors. Sources: AutoAWQ 0.2.9, awq/modules/linear/gemm.py
(`from_linear`); GPTQModel 7, gptqmodel/nn_modules/qlinear/__init__.py (`pack_original`); compressed-tensors 0.20,
compressors/pack_quantized/helpers.py (`pack_to_int32`); transformers 5.23, integrations/finegrained_fp8.py and
integrations/mxfp4.py; vLLM, quantization/modelopt.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from support.tiny_models import TINY, TINY_MULTIMODAL

Tensors = dict[str, torch.Tensor]
# [rows, columns] -> tensors by the names after the module's, and the values that they stand for.
Writer = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]


def as_words(unsigned: np.ndarray[Any, Any], bits: int) -> torch.Tensor:
    """Pack each row of unsigned integers [n, m] into int32 words, the first integer into the lowest bits."""
    in_word = 32 // bits
    rows, columns = unsigned.shape
    words = np.zeros((rows, -(-columns // in_word)), np.uint64)
    for column in range(columns):
        words[:, column // in_word] |= unsigned[:, column].astype(np.uint64) << np.uint64(bits * (column % in_word))
    return torch.from_numpy(words.astype(np.uint32).view(np.int32))


@dataclass(frozen=True)
class Groups:
    """Integers [rows, columns] of a matrix with scales and zero points [rows, groups]; `of` is a column's group."""

    values: np.ndarray[Any, Any]
    scales: torch.Tensor
    zeros: np.ndarray[Any, Any]
    of: np.ndarray[Any, Any]

    def dequantised(self) -> torch.Tensor:
        difference = torch.from_numpy((self.values - self.zeros[:, self.of]).astype(np.float64))
        return (difference * self.scales.double()[:, self.of]).float()


def quantised(weight: torch.Tensor, bits: int, of: np.ndarray[Any, Any], *, symmetric: bool) -> Groups:
    """Quantise each group of columns to integers from 0 to 2**bits - 1, with scales in float16."""
    wide, most = weight.double().numpy(), 2**bits - 1
    groups = int(of.max()) + 1
    scales, zeros = np.zeros((len(wide), groups)), np.zeros((len(wide), groups), np.int64)
    values = np.zeros(wide.shape, np.int64)
    for group in range(groups):
        part = wide[:, of == group]
        if symmetric:
            scale, zero = 2 * abs(part).max(1) / most, np.full(len(part), 2 ** (bits - 1))
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / most
            zero = np.rint(-low / scale).astype(np.int64)
        scale = scale.astype(np.float16).astype(np.float64)
        scales[:, group], zeros[:, group] = scale, zero
        values[:, of == group] = np.clip(np.rint(part / scale[:, None]) + zero[:, None], 0, most)
    return Groups(values, torch.from_numpy(scales).half(), zeros, of)


def in_order(columns: int, size: int) -> np.ndarray[Any, Any]:
    return np.arange(columns) // size


def awq(weight: torch.Tensor, size: int) -> tuple[Tensors, torch.Tensor]:
    groups = quantised(weight, 4, in_order(weight.shape[1], size), symmetric=False)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(unsigned: np.ndarray[Any, Any]) -> torch.Tensor:
        interleaved = np.empty_like(unsigned)
        for column in range(0, unsigned.shape[1], 8):
            for place in range(8):
                interleaved[:, column + place] = unsigned[:, column + order[place]]
        return as_words(interleaved, 4)

    tensors = {"qweight": packed(groups.values.T), "qzeros": packed(groups.zeros.T), "scales": groups.scales.T}
    return tensors, groups.dequantised()


def gptq(
    weight: torch.Tensor, bits: int, size: int, *, symmetric: bool = True, act_order: bool = False, version: int = 1
) -> tuple[Tensors, torch.Tensor]:
    of = in_order(weight.shape[1], size)
    if act_order:
        of = np.random.default_rng(weight.shape[1]).permutation(of)
    groups = quantised(weight, bits, of, symmetric=symmetric)
    zeros = as_words(groups.zeros.T, bits)
    if version == 1:  # GPTQModel subtracts from whole words
        ones = sum(1 << place for place in range(0, 32, bits))
        zeros = torch.from_numpy((zeros.numpy().view(np.uint32) - np.uint32(ones)).view(np.int32))
    tensors = {
        "qweight": as_words(groups.values, bits).T,
        "qzeros": zeros,
        "scales": groups.scales.T,
        "g_idx": torch.from_numpy(of.astype(np.int32)),
    }
    return tensors, groups.dequantised()


def pack_quantized(
    weight: torch.Tensor, bits: int, size: int | None, *, symmetric: bool = True, act_order: bool = False
) -> tuple[Tensors, torch.Tensor]:
    of = in_order(weight.shape[1], size or weight.shape[1])
    if act_order:
        of = np.random.default_rng(weight.shape[1]).permutation(of)
    groups = quantised(weight, bits, of, symmetric=symmetric)
    tensors = {
        "weight_packed": as_words(groups.values, bits),
        "weight_scale": groups.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = as_words(groups.zeros.T, bits).T
    if act_order:
        tensors["weight_g_idx"] = torch.from_numpy(of.astype(np.int32))
    return tensors, groups.dequantised()


def int_quantized(
    weight: torch.Tensor, *, per_tensor: bool = False, symmetric: bool = True
) -> tuple[Tensors, torch.Tensor]:
    whole = weight.reshape(1, -1) if per_tensor else weight
    groups = quantised(whole, 8, in_order(whole.shape[1], whole.shape[1]), symmetric=symmetric)
    scale = groups.scales.reshape(-1) if per_tensor else groups.scales
    values = torch.from_numpy((groups.values - 128).astype(np.int8)).reshape(weight.shape)
    tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.ones(1)}
    if not symmetric:
        zeros = torch.from_numpy((groups.zeros - 128).astype(np.int8))
        tensors["weight_zero_point"] = zeros.reshape(scale.shape)
    return tensors, groups.dequantised().reshape(weight.shape)


def float8(
    weight: torch.Tensor, block: tuple[int, int] | None, name: str = "weight_scale", kind: torch.dtype = torch.float32
) -> tuple[Tensors, torch.Tensor]:
    """Quantise blocks; a block of None is the tensor, whose scale has no dimensions."""
    rows, columns = weight.shape
    height, width = block or (rows, columns)
    scales = torch.empty(-(-rows // height), -(-columns // width), dtype=kind)
    stored, values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            place = slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width)
            scales[row, column] = weight[place].abs().max() / 448
            scale = scales[row, column].float()
            stored[place] = (weight[place] / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            values[place] = (stored[place].double() * scale.double()).float()
    return {"weight": stored, name: scales if block else scales.reshape(())}, values


def mxfp4(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Quantise the last dimension of [experts, rows, columns] to the nearest values."""
    lut = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    lut += [-value for value in lut]
    groups = weight.double().view(*weight.shape[:-1], -1, 32)
    exponents = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled[..., None] - torch.tensor(lut, dtype=torch.float64)).abs().argmin(-1)
    values = torch.tensor(lut, dtype=torch.float64)[codes] * torch.exp2(exponents)[..., None]
    blocks = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return {"blocks": blocks, "scales": (exponents + 127).to(torch.uint8)}, values.flatten(-2).float()


def _group(weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None) -> dict[str, Any]:
    defaults = {"num_bits": 8, "symmetric": True, "dynamic": False, "observer": "minmax", "group_size": None}
    return {
        "targets": ["Linear"],
        "weights": {**defaults, **weights},
        "input_activations": activations,
        "output_activations": None,
    }


def compressed(kind: str, weights: Mapping[str, Any], activations: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a `quantization_config` of compressed-tensors with one group."""
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "quantization_status": "compressed",
        "config_groups": {"group_0": _group(weights, activations)},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_BLOCK_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


@dataclass(frozen=True)
class StoredFormat:
    """A format, as checkpoints are published: `quantization_config`, and how a matrix is written.

    `is_exact_in_int8` is whether Int8Blocks can hold its values.
    """

    config: Mapping[str, Any]
    write: Writer
    is_exact_in_int8: bool = False


FORMATS: Mapping[str, StoredFormat] = {
    "awq": StoredFormat(_AWQ, lambda weight: awq(weight, 32), True),
    "awq by its old names": StoredFormat(
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "zero_point": True, "version": "GEMM"},
        lambda weight: awq(weight, 16),
    ),
    "gptq": StoredFormat(_GPTQ, lambda weight: gptq(weight, 4, 32), True),
    "gptq asymmetric": StoredFormat(_GPTQ | {"sym": False}, lambda weight: gptq(weight, 4, 32, symmetric=False), True),
    "gptq with act-order": StoredFormat(_GPTQ | {"desc_act": True}, lambda weight: gptq(weight, 4, 32, act_order=True)),
    "gptq v2": StoredFormat(
        _GPTQ | {"checkpoint_format": "gptq_v2"}, lambda weight: gptq(weight, 4, 32, symmetric=False, version=2), True
    ),
    "gptq 8 bit": StoredFormat(_GPTQ | {"bits": 8, "group_size": -1}, lambda weight: gptq(weight, 8, 1 << 20), True),
    "gptq 8 bit asymmetric": StoredFormat(
        _GPTQ | {"bits": 8, "sym": False}, lambda weight: gptq(weight, 8, 32, symmetric=False)
    ),
    "gptq with other bits for some modules": StoredFormat(
        _GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}},
        lambda weight: gptq(weight, 8 if weight.shape[1] == 96 else 4, 32),
        True,
    ),
    "pack-quantized": StoredFormat(
        compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}),
        lambda weight: pack_quantized(weight, 4, 32),
        True,
    ),
    "pack-quantized asymmetric": StoredFormat(
        compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False},
        ),
        lambda weight: pack_quantized(weight, 4, 32, symmetric=False),
        True,
    ),
    "pack-quantized with act-order": StoredFormat(
        compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "actorder": "group"},
        ),
        lambda weight: pack_quantized(weight, 4, 32, act_order=True),
    ),
    "pack-quantized 8 bit": StoredFormat(
        compressed("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
        lambda weight: pack_quantized(weight, 8, None),
        True,
    ),
    "int-quantized": StoredFormat(
        compressed("int-quantized", {"type": "int", "strategy": "channel"}, {**_TOKENS, "type": "int"}),
        int_quantized,
        True,
    ),
    "int-quantized per tensor": StoredFormat(
        compressed("int-quantized", {"type": "int", "strategy": "tensor"}),
        lambda weight: int_quantized(weight, per_tensor=True),
        True,
    ),
    "int-quantized asymmetric": StoredFormat(
        compressed("int-quantized", {"type": "int", "strategy": "channel", "symmetric": False}),
        lambda weight: int_quantized(weight, symmetric=False),
    ),
    "float-quantized": StoredFormat(
        compressed("float-quantized", {"type": "float", "strategy": "channel"}, _TOKENS),
        lambda weight: float8(weight, (1, weight.shape[1]), kind=torch.bfloat16),
    ),
    "float-quantized per tensor": StoredFormat(
        compressed("float-quantized", {"type": "float", "strategy": "tensor"}, {**_TOKENS, "strategy": "tensor"}),
        lambda weight: float8(weight, None),
    ),
    "float-quantized in blocks": StoredFormat(
        compressed("float-quantized", {"type": "float", "strategy": "block", "block_structure": [32, 48]}, _TOKENS),
        lambda weight: float8(weight, (32, 48)),
    ),
    "fp8 in blocks": StoredFormat(
        _BLOCK_FP8 | {"weight_block_size": [48, 32]}, lambda weight: float8(weight, (48, 32), "weight_scale_inv")
    ),
    "fp8 per tensor": StoredFormat(_BLOCK_FP8, lambda weight: float8(weight, None, "weight_scale_inv")),
    "modelopt": StoredFormat(
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
        lambda weight: float8(weight, None),
    ),
    "modelopt per channel": StoredFormat(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["lm_head"]},
        lambda weight: _flat(float8(weight, (1, weight.shape[1]))),
    ),
}


def _flat(written: tuple[Tensors, torch.Tensor]) -> tuple[Tensors, torch.Tensor]:
    tensors, values = written
    return tensors | {"weight_scale": tensors["weight_scale"].flatten()}, values


def model_of(family: str) -> PreTrainedModel:
    """Return a tiny model whose projections have numbers of columns that groups of 32 divide."""
    if family in TINY_MULTIMODAL:
        return TINY_MULTIMODAL[family].build()
    tiny = TINY[family]
    sizes = {"intermediate_size": 96}
    if "moe_intermediate_size" in tiny.settings:
        sizes["moe_intermediate_size"] = 64
    return replace(tiny, settings=tiny.settings | sizes).build()


def save_quantized(model: PreTrainedModel, stored: StoredFormat, folder: Path) -> tuple[Path, Path]:
    """Save the model twice: with quantised projections, and with the values that these stand for, in float32."""
    plain, packed = folder / "dequantised", folder / "quantised"
    model.save_pretrained(plain)
    tensors, values = _read(plain), {}
    written: Tensors = {}
    for name, tensor in tensors.items():
        values[name] = tensor
        if is_projection(name):
            parts, values[name] = stored.write(tensor)
            module = name.removesuffix("weight")
            written |= {module + part: value.contiguous() for part, value in parts.items()}
        else:
            written[name] = tensor
    config = json.loads((plain / "config.json").read_text())
    packed.mkdir()
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": stored.config}))
    save_file(written, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    return packed, plain


def save_mxfp4(model: PreTrainedModel, folder: Path) -> tuple[Path, Path]:
    """Save a gpt-oss model as it is published, with experts in MXFP4, and with the values that these stand for."""
    plain, packed = folder / "dequantised", folder / "quantised"
    model.save_pretrained(plain)
    written: Tensors = {}
    values = _read(plain)
    for name, tensor in list(values.items()):
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            parts, dequantised = mxfp4(tensor.transpose(1, 2))
            values[name] = dequantised.transpose(1, 2).contiguous()
            written |= {f"{name}_{part}": value.contiguous() for part, value in parts.items()}
        else:
            written[name] = tensor
    excluded = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": excluded}
    packed.mkdir()
    (packed / "config.json").write_text(json.dumps(config))
    save_file(written, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    return packed, plain


def is_projection(name: str) -> bool:
    ends = ("proj.weight", "w1.weight", "w2.weight", "w3.weight")
    return name.endswith(ends)


def _read(folder: Path) -> Tensors:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")

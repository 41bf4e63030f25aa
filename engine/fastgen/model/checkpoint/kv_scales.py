"""Scales of a float8 KV cache in a checkpoint: one for the keys and one for the values of each layer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from fastgen.model import ModelError

# compressed-tensors writes `self_attn.k_scale`, NVIDIA's ModelOpt `self_attn.k_proj.k_scale`.
_NAME = re.compile(
    r"(?:(?:model|language_model|text_model)\.){0,2}layers\.(\d{1,5})"
    r"\.self_attn\.(?:(?:[kv]|qkv)_proj\.)?([kv])_scale"
)


@dataclass(frozen=True, slots=True)
class KVScales:
    """Scales of one layer: the cache holds key / `key` and value / `value`."""

    key: float = 1.0
    value: float = 1.0


def is_kv_scale(name: str) -> bool:
    """Return whether a tensor of a safetensors file is a scale of the KV cache, by its name."""
    return _NAME.fullmatch(name) is not None


def read_kv_scales(
    path: Path, names: Iterable[str], read: Callable[[str], torch.Tensor], num_layers: int
) -> tuple[KVScales, ...] | None:
    """Read the scales of all layers; None if there are none.

    `names` are the checkpoint's tensors for which `is_kv_scale` is true, and `read` returns one of them.

    Raises:
        ModelError: naming a scale that is missing, is of a layer that does not exist, or cannot be used.
    """
    found: dict[tuple[int, str], float] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        assert match is not None
        found[int(match[1]), match[2]] = _scale(path, name, read(name))
    if not found:
        return None
    wanted = [(layer, part) for layer in range(num_layers) for part in "kv"]
    for layer, part in wanted:
        if (layer, part) not in found:
            raise ModelError(
                f"{path}: layer {layer} has no {part}_scale, but others have: the checkpoint is incomplete"
            )
    if len(found) > len(wanted):
        raise ModelError(f"{path}: a {max(found)[1]}_scale is of layer {max(found)[0]}, which the model does not have")
    return tuple(KVScales(found[layer, "k"], found[layer, "v"]) for layer in range(num_layers))


def _scale(path: Path, name: str, stored: torch.Tensor) -> float:
    if stored.numel() != 1:
        raise ModelError(f"{path}: tensor {name} has {stored.numel()} scales: only one scale for a layer is supported")
    scale = float(stored.float())
    if not 0 < scale < math.inf:
        raise ModelError(f"{path}: tensor {name} is {scale}: expected a positive, finite number")
    return scale

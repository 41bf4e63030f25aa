"""How a model's matrices are stored in memory: what `--quantization auto` stands for. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastgen.kernels.cpu.vector_width import has_byte_products
from fastgen.model.checkpoint.gguf_file import GGUFFile
from fastgen.model.checkpoint.gguf_types import TYPES
from fastgen.model.checkpoint.packed_blocks import PACKED_TYPES
from fastgen.model.source import ModelSource
from fastgen.settings import EngineConfig

_QUANTISED = {kind.name for kind in TYPES.values() if kind.is_quantised}
_MIB = 1 << 20


def with_storage(config: EngineConfig, source: ModelSource) -> EngineConfig:
    """Return the settings with `quantization` other than auto.

    auto is int8 if most matrices of a GGUF file are quantised, FastGen's own code runs it on a CPU with AVX2, and no
    dtype is set; otherwise none. It is never stored, with which the demo model's greedy tokens differ (decision 061).
    """
    if config.quantization != "auto":
        return config
    can_keep = (
        config.device == "cpu" and config.dtype == "auto" and source.native is not None and has_byte_products(256)
    )
    is_quantised = source.gguf is not None and _is_mostly_quantised(source.gguf)
    return replace(config, quantization="int8" if can_keep and is_quantised else "none")


def _is_mostly_quantised(file: GGUFFile) -> bool:
    """Return whether most matrices are quantised. In some files only the embeddings are, which int8 does not change."""
    types = file.matrix_types()
    return 2 * sum(count for name, count in types.items() if name in _QUANTISED) > sum(types.values())


def describe_storage(file: GGUFFile, quantization: str, dtype: str) -> str | None:
    """Describe for the log how a GGUF file's quantised weights are stored; return None if there are none.

    Args:
        file: the file.
        quantization: none, int8 or stored.
        dtype: of weights that are not quantised.
    """
    num_values, num_bytes = file.quantised_size()
    grown, int8 = num_values * (4 if dtype == "float32" else 2), num_values * 9 // 8
    if not num_values:
        return None
    taken = f"the file's quantised weights take {num_bytes // _MIB} MiB and become"
    kept_by = "--quantization stored keeps them as they are"
    if quantization == "none":
        return f"{taken} {grown // _MIB} MiB in {dtype}: {kept_by}, --quantization int8 takes {int8 // _MIB} MiB"
    if quantization == "int8":
        return (
            f"{taken} {int8 // _MIB} MiB in int8: {kept_by}, --quantization none takes {grown // _MIB} MiB in {dtype}"
        )
    found = file.matrix_types()
    packed = [name for name in found if name in PACKED_TYPES]
    others = [name for name in found if name in _QUANTISED and name not in PACKED_TYPES]
    kept = [name for name in found if name not in _QUANTISED]
    parts = [
        *([f"{_listed(packed)} packed"] if packed else []),
        *([f"{_listed(others)} in int8, because they have no packed form"] if others else []),
        *([f"{_listed(kept)} in {dtype}"] if kept else []),
    ]  # fmt: skip
    return (
        f"weights as the file stores them: {', '.join(parts)}; quantised ones take {num_bytes // _MIB} MiB in the file "
        f"and would take {grown // _MIB} MiB in {dtype}: --quantization none computes with those"
    )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))

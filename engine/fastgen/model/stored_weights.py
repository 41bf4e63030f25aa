"""How a model's weights are stored, in words and bytes, for those who ask what is served."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from fastgen.model.checkpoint.tensor_files import TensorFiles, safetensors_files
from fastgen.model.source import ModelSource
from fastgen.settings import ConfigError


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """The files of a model's weights.

    Attributes:
        format: such as `GGUF Q4_1`, `safetensors BF16` or `safetensors MXFP4`; empty if unknown.
        num_bytes: size of the files; 0 if unknown.
    """

    format: str = ""
    num_bytes: int = 0

    @classmethod
    def of(cls, source: ModelSource) -> StoredWeights:
        """Describe the files. Only transformers' code may read others than GGUF and safetensors: these are unknown."""
        if source.gguf is not None:
            return cls(f"GGUF {next(iter(source.gguf.matrix_types()))}", source.path.stat().st_size)
        try:
            files = safetensors_files(source.path)
            kinds = _kinds(source)
        except ConfigError:
            return cls()
        return cls(f"safetensors {', '.join(kinds)}", sum(path.stat().st_size for path in files))


def _kinds(source: ModelSource) -> list[str]:
    """Return the formats of quantised matrices; without any, the type of most weights."""
    if source.quantization is not None:
        return list(dict.fromkeys(group.format.title for group in source.quantization.groups))
    sizes, files = Counter[str](), TensorFiles(source.path, source.other_parts)
    for name in files:
        sizes[files.type_name(name)] += math.prod(files.shape(name))
    return [kind for kind, _ in sizes.most_common(1)]

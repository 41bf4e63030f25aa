"""How a model pools, from sentence-transformers' modules.json or GGUF metadata. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastgen.model import ModelError
from fastgen.model.config.fields import Fields, shown
from fastgen.model.source import ModelSource
from fastgen.model_files import is_inside, read_json, read_json_object

Method = Literal["last", "mean"]

# Supported modules of sentence-transformers, by the last part of their type.
_SUPPORTED = {"Transformer", "Pooling", "Normalize"}
_METHODS: dict[str, Method] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_GGUF_METHODS: dict[int, Method] = {1: "mean", 3: "last"}  # llama.cpp's enumeration


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How a model turns hidden states into a vector.

    Attributes:
        method: `last` takes the hidden state of the last token, `mean` the mean of those of all tokens.
        normalised: whether vectors are scaled to length 1.
        dimensions: lengths to which the model's vectors may be truncated; empty if it names none.
    """

    method: Method = "last"
    normalised: bool = True
    dimensions: tuple[int, ...] = ()


def pooling_config(source: ModelSource) -> PoolingConfig | None:
    """Return how the model at `source` pools; None if its files do not say.

    A method of a GGUF file that is not supported counts as none.

    Raises:
        ConfigError: if a file cannot be read.
        ModelError: naming the module or method that is not supported, or the field with an invalid value.
    """
    if source.gguf is not None:
        kind = source.gguf.metadata.get("general.architecture")
        number = Fields(source.gguf.metadata).count(f"{kind}.pooling_type")
        return PoolingConfig(_GGUF_METHODS[number]) if number in _GGUF_METHODS else None
    modules = source.path / "modules.json"
    return _of_modules(source.path, modules) if modules.is_file() else None


def _of_modules(folder: Path, path: Path) -> PoolingConfig | None:
    try:
        modules = {str(module["type"]).rpartition(".")[2]: str(module.get("path", "")) for module in read_json(path)}
    except (TypeError, KeyError, AttributeError):
        raise ModelError(f"{path}: expected a list of modules with a type") from None
    if "Pooling" not in modules:
        return None
    for name in modules:
        if name not in _SUPPORTED:
            raise ModelError(f"{path}: the module {name} is not supported: only {', '.join(sorted(_SUPPORTED))} are")
    if not is_inside(modules["Pooling"]):
        raise ModelError(f"{path}: the path of Pooling is {shown(modules['Pooling'])}: expected one in the folder")
    pooling_path = folder / modules["Pooling"] / "config.json"
    dimensions = Fields(read_json_object(folder / "config.json")).integers("matryoshka_dimensions") or ()
    return PoolingConfig(
        _method(pooling_path, read_json_object(pooling_path)), "Normalize" in modules, tuple(dimensions)
    )


def _method(path: Path, config: dict[str, Any]) -> Method:
    """Return the method of a Pooling module, whose modes are flags, or a name in newer versions."""
    prefix = "pooling_mode_"
    modes = [config["pooling_mode"]] if "pooling_mode" in config else [
        name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value is True
    ]  # fmt: skip
    if len(modes) != 1 or str(modes[0]) not in _METHODS:
        raise ModelError(
            f"{path}: pooling by {', '.join(map(str, modes)) or 'nothing'} is not supported: only last and mean are"
        )
    return _METHODS[modes[0]]

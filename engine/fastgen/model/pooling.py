"""How a model pools, from sentence-transformers' modules.json or GGUF metadata. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastgen.model import ModelError
from fastgen.model.config.fields import Fields, shown
from fastgen.model.source import ModelSource
from fastgen.model_files import is_inside, optional_json_object, read_json, read_json_object

Method = Literal["last", "mean"]

# Supported modules of sentence-transformers, by the last part of their type.
_SUPPORTED = {"Transformer", "Pooling", "Normalize"}
_METHODS: dict[str, Method] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
# llama.cpp's enumeration (llama_pooling_type). 0 means that the model does not pool.
_GGUF_METHODS: dict[int, Method] = {1: "mean", 3: "last"}
_OTHER_GGUF_METHODS = {2: "cls", 4: "rank"}
_REMEDY = "give --task embed and --pooling last or mean, or another --task"


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

    Raises:
        ConfigError: if a file cannot be read.
        ModelError: naming the module, method or field that is not supported, or the field with an invalid value.
    """
    if source.gguf is not None:
        return _of_gguf(source.path, source.gguf.metadata)
    modules = source.path / "modules.json"
    return _of_modules(source.path, modules) if modules.is_file() else None


def _of_gguf(path: Path, metadata: Mapping[str, Any]) -> PoolingConfig | None:
    key = f"{metadata.get('general.architecture')}.pooling_type"
    number = Fields(metadata).count(key)
    if not number:
        return None
    if number not in _GGUF_METHODS:
        name = _OTHER_GGUF_METHODS.get(number, "unknown")
        raise ModelError(f"{path}: {key} is {number} ({name}): only 1 (mean) and 3 (last) are supported; {_REMEDY}")
    return PoolingConfig(_GGUF_METHODS[number])


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
        if not is_inside(modules[name]):
            raise ModelError(f"{path}: the path of {name} is {shown(modules[name])}: expected one in the folder")
    pooling_path = folder / modules["Pooling"] / "config.json"
    pooling = read_json_object(pooling_path)
    method = _method(pooling_path, pooling)
    if method == "mean" and pooling.get("include_prompt") is False:
        raise ModelError(f"{pooling_path}: include_prompt is false: not supported; {_REMEDY}")
    _check_texts_are_unchanged(folder, folder / modules.get("Transformer", ""))
    dimensions = Fields(read_json_object(folder / "config.json")).integers("matryoshka_dimensions") or ()
    return PoolingConfig(method, "Normalize" in modules, tuple(dimensions))


def _check_texts_are_unchanged(folder: Path, transformer: Path) -> None:
    """Raise ModelError if sentence-transformers changes texts before it encodes them."""
    path = folder / "config_sentence_transformers.json"
    prompt = optional_json_object(path).get("default_prompt_name")
    if prompt is not None:
        raise ModelError(
            f"{path}: default_prompt_name is {shown(prompt)}: not supported; set it to null, and send texts with it"
        )
    path = transformer / "sentence_bert_config.json"
    if optional_json_object(path).get("do_lower_case"):
        raise ModelError(f"{path}: do_lower_case is true: not supported; set it to false, and send texts in lower case")


def _method(path: Path, config: dict[str, Any]) -> Method:
    """Return the method of a Pooling module, whose modes are flags, or a name in newer versions."""
    prefix = "pooling_mode_"
    modes = [config["pooling_mode"]] if "pooling_mode" in config else [
        name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value is True
    ]  # fmt: skip
    if len(modes) != 1 or str(modes[0]) not in _METHODS:
        raise ModelError(
            f"{path}: pooling by {', '.join(map(str, modes)) or 'nothing'} is not supported: only last and mean are; "
            f"{_REMEDY}"
        )
    return _METHODS[modes[0]]

"""Open MODEL: a GGUF file, or a Hugging Face directory on disk or on a hub. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgen.model import ModelError
from fastgen.model.checkpoint.gguf_file import GGUFFile
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.config.from_gguf import architecture_from_gguf
from fastgen.model.config.from_huggingface import architecture_from_huggingface
from fastgen.model.config.huggingface_families import is_native
from fastgen.model.hub import download, hub_repository


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk whose configuration is read but whose weights are not loaded.

    Attributes:
        path: the GGUF file or the directory.
        native: architecture of a native model; None for a model run by transformers.
        tokenizer: argument of `Tokenizer.load`.
        gguf: the open file; None for a directory.
    """

    path: Path
    native: ModelArchitecture | None
    tokenizer: Mapping[str, Any] | Path
    gguf: GGUFFile | None

    @property
    def architecture(self) -> ModelArchitecture:
        """Architecture of a native model."""
        assert self.native is not None, f"{self.path} is not a native model"
        return self.native

    @classmethod
    def open(cls, model: str) -> ModelSource:
        """Open `model`, a path or the name of a model on a hub, which is downloaded if it is not cached.

        Raises:
            ModelError: if it does not exist or cannot be served.
        """
        path = Path(model).expanduser()
        if path.is_dir():
            return cls._open_directory(path)
        if path.is_file():
            return cls._open_gguf(path)
        if hub_repository(model) is not None:
            return cls._open_directory(download(model))
        raise ModelError(
            f"model {model}: no such file or directory: give a GGUF file, a Hugging Face directory or the name of a "
            "model on the hub"
        )

    @classmethod
    def _open_gguf(cls, path: Path) -> ModelSource:
        file = GGUFFile(path)
        try:
            architecture = architecture_from_gguf(file)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        tokenizer = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
        return cls(path, architecture, tokenizer, file)

    @classmethod
    def _open_directory(cls, path: Path) -> ModelSource:
        config_path = path / "config.json"
        if not config_path.is_file():
            found = sorted(entry.name for entry in path.glob("*.gguf"))
            remedy = (
                f"give the file itself, {path / found[0]}" if found else "give a Hugging Face directory or a GGUF file"
            )
            raise ModelError(f"model {path}: the directory has no config.json: {remedy}")
        generation_path = path / "generation_config.json"
        generation_config = read_json_object(generation_path) if generation_path.is_file() else None
        try:
            architecture = _native(read_json_object(config_path), generation_config)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        return cls(path, architecture, path, None)


def _native(config: dict[str, Any], generation_config: dict[str, Any] | None) -> ModelArchitecture | None:
    """Return the architecture of a native model, or None if transformers' code may run it.

    Raises:
        ModelError: naming the field of a model that neither can serve.
    """
    if is_native(config):
        return architecture_from_huggingface(config, generation_config)
    kind, classes = config.get("model_type"), config.get("architectures")
    if not isinstance(kind, str):
        raise ModelError(f"config.json: model_type is {kind!r}: expected the name of a decoder")
    if config.get("is_encoder_decoder"):
        raise ModelError(f"config.json: model_type is {kind!r}: encoder-decoder models are not served")
    for name in ("vision_config", "audio_config"):
        if name in config:
            raise ModelError(f"config.json: model_type is {kind!r} with {name}: only text models are served")
    if config.get("quantization_config"):
        raise ModelError("config.json: quantization_config is set: quantised checkpoints are not served, use GGUF")
    if classes and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in classes):
        raise ModelError(f"config.json: architectures is {classes}: only causal language models are served")
    return None


def read_json(path: Path) -> Any:
    """Return the JSON value of a file; raise a ModelError if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error})") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file; raise a ModelError if it cannot be read or holds another value."""
    values = read_json(path)
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object")
    return values

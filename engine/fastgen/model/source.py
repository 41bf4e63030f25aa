"""Open a model: a GGUF file, or a Hugging Face directory on disk or on a hub. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastgen.model import ModelError
from fastgen.model.checkpoint.gguf_file import GGUFFile
from fastgen.model.config.architecture import MOST_LAYERS, ModelArchitecture
from fastgen.model.config.end_tokens import eos_token_ids
from fastgen.model.config.fields import Fields, shown
from fastgen.model.config.from_gguf import architecture_from_gguf
from fastgen.model.config.from_huggingface import architecture_from_huggingface
from fastgen.model.config.huggingface_families import draft_prefixes, is_native
from fastgen.model.config.multimodal import multimodal, text_config
from fastgen.model.config.quantization import MODELOPT_FILE, Quantization, quantization_of, quantization_of_modelopt
from fastgen.model.hub import download_model, hub_repository
from fastgen.model_files import optional_json_object, read_json_object
from fastgen.settings import ConfigError
from fastgen.text.tokenizer_formats.huggingface import end_token_id

# Fields that hold the number of layers. transformers builds all layers before it reads a weight.
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NOT_WITH_TRANSFORMERS = (
    "quantised weights are not supported for models that run transformers' code, use an unquantised checkpoint"
)


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on disk whose configuration is read but whose weights are not loaded.

    Attributes:
        path: the GGUF file or the directory.
        native: architecture of a native model; None for a model run by transformers.
        tokenizer: argument of `Tokenizer.load`.
        gguf: the open file; None for a directory.
        other_parts: prefixes of the checkpoint's tensors that belong to no decoder, such as those of a vision tower.
        quantization: how a directory stores quantised weights; None if it stores none.
    """

    path: Path
    native: ModelArchitecture | None
    tokenizer: Mapping[str, Any] | Path
    gguf: GGUFFile | None
    other_parts: tuple[str, ...] = ()
    quantization: Quantization | None = None

    @property
    def architecture(self) -> ModelArchitecture:
        """Architecture of a native model."""
        assert self.native is not None, f"{self.path} is not a native model"
        return self.native

    @classmethod
    def open(cls, model: str) -> ModelSource:
        """Open `model`, a path or the name of a model on a hub, which is downloaded if it is not cached.

        Raises:
            ConfigError: if one of its files is damaged, or its tokenizer is not supported; a ModelError if it does not
                exist or cannot be served.
        """
        try:
            path = Path(model).expanduser()
            if path.is_dir():
                return cls._open_directory(path)
            if path.is_file():
                return cls._open_gguf(path)
        except (OSError, RuntimeError) as error:  # unreadable folders, names that are too long, unknown home folders
            raise ModelError(f"model {shown(model)}: cannot be opened ({error})") from None
        if hub_repository(model) is not None:
            return cls._open_directory(download_model(model))
        raise ModelError(
            f"model {model}: no such file or directory: give a GGUF file, a Hugging Face directory or the name of a "
            "model on the hub"
        )

    @classmethod
    def _open_gguf(cls, path: Path) -> ModelSource:
        file = GGUFFile(path)
        try:
            architecture = architecture_from_gguf(file)
        except ConfigError as error:  # a ModelError, or a plain ConfigError about the tokenizer's keys
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
        generation_config = optional_json_object(path / "generation_config.json")
        config = read_json_object(config_path)
        try:
            architecture, other_parts = _native(config, generation_config, end_token_id(path))
            quantization = _quantization(path, config)
            if architecture is None and quantization is not None:
                raise ModelError(f"{MODELOPT_FILE}: {_NOT_WITH_TRANSFORMERS}")
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        return cls(path, architecture, path, None, other_parts, quantization)


def _native(
    config: dict[str, Any], generation_config: dict[str, Any], tokenizer_end: int | None
) -> tuple[ModelArchitecture | None, tuple[str, ...]]:
    """Return the architecture of a native model, or None if transformers' code may run the model, and `other_parts`.

    Raises:
        ModelError: naming the file, and the field that is missing, invalid or not supported.
    """
    with _faults_of("generation_config.json"):
        generation_ends = eos_token_ids(generation_config.get("eos_token_id"))
    with _faults_of("config.json"):
        if (row := multimodal(config)) is not None:
            with _faults_of("text_config"):
                text = text_config(config, row)
                return architecture_from_huggingface(text, generation_ends, tokenizer_end), row.other_parts
        if is_native(config):
            architecture = architecture_from_huggingface(config, generation_ends, tokenizer_end)
            return architecture, draft_prefixes(config, architecture.num_layers)
        _check_for_transformers(Fields(config))
    return None, ()


def _quantization(path: Path, config: Mapping[str, Any]) -> Quantization | None:
    """Return how the directory stores quantised weights. ModelOpt also describes it in a file of its own."""
    parts = (config, config.get("text_config"))
    described = [part for part in parts if isinstance(part, Mapping) and part.get("quantization_config") is not None]
    if described:
        with _faults_of("config.json"):
            return quantization_of(described[0])
    with _faults_of(MODELOPT_FILE):
        return quantization_of_modelopt(optional_json_object(path / MODELOPT_FILE))


@contextmanager
def _faults_of(place: str) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{place}: {error}") from None


def _check_for_transformers(fields: Fields) -> None:
    """Check the fields of a model that transformers' code may run.

    Raises:
        ModelError: naming the field that is invalid or not supported.
    """
    kind, classes = fields.value("model_type"), fields.texts("architectures")
    if not isinstance(kind, str):
        raise ModelError(f"model_type is {shown(kind)}: expected the name of a decoder")
    if fields.flag("is_encoder_decoder", False):
        raise ModelError(f"model_type is {shown(kind)}: encoder-decoder models are not supported")
    if fields.value("quantization_config"):
        raise ModelError(f"quantization_config is set: {_NOT_WITH_TRANSFORMERS}")
    if classes and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in classes):
        raise ModelError(f"architectures is {shown(classes)}: only causal language models are supported")
    for name in _LAYER_COUNTS:
        fields.integer(name, 1, most=MOST_LAYERS)
    eos_token_ids(fields.value("eos_token_id"))

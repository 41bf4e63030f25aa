"""Multimodal checkpoints: their text part is served as a text model, in every layout that transformers writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from fastgen.model import ModelError
from fastgen.model.checkpoint.checkpoint import Checkpoint
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.config.huggingface_families import FAMILIES
from fastgen.model.config.multimodal import MULTIMODAL, SAME_DECODERS, default_sizes
from fastgen.model.config.rope import LinearScaling
from fastgen.model.native import open_checkpoint
from fastgen.model.source import ModelSource
from support.tiny_models import TINY_MULTIMODAL

KINDS = [(name, is_original) for name in TINY_MULTIMODAL for is_original in (True, False)]


def opened(folder: Path) -> tuple[ModelSource, Checkpoint]:
    source = ModelSource.open(str(folder))
    return source, open_checkpoint(source)


def edit_config(folder: Path, part: str | None = None, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edited = config if part is None else config[part]
    edited.update(changes)
    for name in [name for name, value in changes.items() if value is ...]:
        del edited[name]
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, changes: dict[str, torch.Tensor]) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | changes, path, metadata={"format": "pt"})


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    TINY_MULTIMODAL["multimodal-gemma3"].build().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("name", "is_original"), KINDS)
def test_the_text_part_has_the_same_tensors_in_every_layout(tmp_path: Path, name: str, *, is_original: bool) -> None:
    model: Any = TINY_MULTIMODAL[name].build()
    model.save_pretrained(tmp_path, save_original_format=is_original)
    source, checkpoint = opened(tmp_path)
    decoder = model.get_decoder()
    decoder = getattr(decoder, "model", decoder)  # Llama 4 returns a model with a head
    theirs = dict(as_ours(decoder.state_dict(), source.architecture))
    theirs["lm_head.weight"] = model.get_output_embeddings().weight
    shapes = source.architecture.tensor_shapes()
    assert theirs.keys() - shapes.keys() <= {"lm_head.weight"}, "a tied head"
    for tensor in shapes:
        assert torch.equal(checkpoint.tensor(tensor), theirs[tensor]), tensor


def as_ours(state: dict[str, torch.Tensor], architecture: ModelArchitecture) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of transformers' decoder by our names.

    It stacks experts, heads' queries and gates, and the queries, keys and values of linear attention.
    """
    for stored_name, stored in state.items():
        name, value = stored_name.replace("feed_forward.router.", "mlp.gate.").replace("feed_forward.", "mlp."), stored
        if architecture.name == "llama4_text":
            value = _as_others(name, stored, architecture)
        if name.endswith("experts.gate_up_proj"):
            for number, expert in enumerate(value):
                gate_up = zip(("gate", "up"), expert.chunk(2), strict=True)
                yield from ((f"model.{name[:-12]}{number}.{part}_proj.weight", matrix) for part, matrix in gate_up)
        elif name.endswith("experts.down_proj"):
            yield from ((f"model.{name[:-9]}{number}.down_proj.weight", each) for number, each in enumerate(value))
        elif "self_attn.q_proj" in name and architecture.gated_attention:
            heads = value.view(architecture.num_heads, 2, architecture.head_dim, -1)
            for index, part in enumerate(("q_proj", "gate_proj")):
                yield f"model.{name.replace('q_proj', part)}", heads[:, index].reshape(-1, *value.shape[1:])
        elif "linear_attn.conv1d" in name or "linear_attn.in_proj_qkv" in name:
            delta = architecture.delta
            assert delta is not None
            rows = value.split([delta.keys, delta.keys, delta.values])
            own = name.replace("conv1d", "{}_conv1d").replace("qkv", "{}")
            yield from ((f"model.{own.format(part)}", each) for part, each in zip("qkv", rows, strict=True))
        else:
            yield f"model.{name}", value


def test_the_embedding_or_the_head_of_a_tied_text_part_is_enough(gemma: Path) -> None:
    path = gemma / "model.safetensors"
    values = load_file(path)
    embedding = values.pop("language_model.model.embed_tokens.weight")
    save_file(values | {"language_model.lm_head.weight": embedding}, path, metadata={"format": "pt"})
    assert torch.equal(opened(gemma)[1].tensor("model.embed_tokens.weight"), embedding)


def _as_others(name: str, value: torch.Tensor, architecture: ModelArchitecture) -> torch.Tensor:
    """Return a tensor of Llama 4 as others have it: its experts are [in, out], and neighbouring rows are rotated."""
    if "experts." in name:
        return value.transpose(1, 2)
    heads = {"q_proj": architecture.num_heads, "k_proj": architecture.num_kv_heads}.get(name.split(".")[-2])
    return value if heads is None else value.view(heads, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)


@pytest.mark.parametrize("name", ["multimodal-qwen2-vl", "multimodal-qwen2-5-vl"])
def test_published_qwen_vl_has_the_fields_of_its_text_part_beside_those_of_others(tmp_path: Path, name: str) -> None:
    TINY_MULTIMODAL[name].build().save_pretrained(tmp_path)
    nested = ModelSource.open(str(tmp_path)).architecture
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    text = config.pop("text_config")
    del text["model_type"], text["layer_types"]
    parameters = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": parameters["mrope_section"]}
    path.write_text(json.dumps({**text, **config, "rope_theta": parameters["rope_theta"], "rope_scaling": scaling}))
    source, checkpoint = opened(tmp_path)
    assert source.architecture == nested
    assert checkpoint.tensor("model.norm.weight").shape == (nested.hidden_size,)


def test_another_rotary_type_than_that_of_sections_is_read(tmp_path: Path) -> None:
    TINY_MULTIMODAL["multimodal-qwen3-vl"].build().save_pretrained(tmp_path)
    edit_config(tmp_path, "text_config", rope_scaling={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    (rope,) = ModelSource.open(str(tmp_path)).architecture.rope_configs
    assert rope.scaling == LinearScaling(4.0)


@pytest.mark.parametrize("text", SAME_DECODERS)
def test_fields_of_a_type_with_the_decoder_of_another_family_mean_the_same(text: str) -> None:
    same, theirs = SAME_DECODERS[text], CONFIG_MAPPING[text]
    fields, family = (
        {field.name for field in dataclasses.fields(CONFIG_MAPPING[kind])} for kind in (text, same.family)
    )
    assert fields <= family | {"head_dim"}, "a field that the family does not read"
    assert fields.isdisjoint(same.fixed), "a field that is not fixed"
    defaults = {name.replace("num_local_", "num_"): value for name, value in same.defaults.items()}
    read = {**FAMILIES[same.family].defaults, **defaults, **same.fixed}
    expected = {name: getattr(theirs(), name) for name in read if name in fields} | {"rope_theta": theirs.default_theta}
    # The head is tied as the whole model says. Windows are off unless a file enables them.
    others = {"tie_word_embeddings", "sliding_window"}
    assert {name: read[name] for name in expected.keys() - others} == {
        name: value for name, value in expected.items() if name not in others
    }
    assert read.keys() - expected.keys() <= {*others, "max_window_layers", *same.fixed}


@pytest.mark.parametrize(
    "tensor", ["vision_towers.x", "language_model.model.x", "projector.x", "model.layers.0.x", "lm_head.weight"]
)
def test_a_tensor_that_is_in_no_known_part_is_named(gemma: Path, tensor: str) -> None:
    edit_tensors(gemma, {tensor: torch.zeros(2)})
    with pytest.raises(ModelError, match=rf"tensor {tensor} is not part of the model"):
        opened(gemma)


def test_a_tensor_of_a_vision_tower_is_unknown_in_a_text_model(gemma: Path) -> None:
    path = gemma / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text())["text_config"]))
    with pytest.raises(ModelError, match=r"tensor multi_modal_projector\.\S+ is not part of the model"):
        opened(gemma)


def test_scales_of_a_float8_cache_are_found_in_the_text_part(gemma: Path) -> None:
    layers = ModelSource.open(str(gemma)).architecture.num_layers
    names = [f"language_model.model.layers.{layer}.self_attn.{part}_scale" for layer in range(layers) for part in "kv"]
    edit_tensors(gemma, {name: torch.tensor(0.5) for name in names})
    scales = opened(gemma)[1].kv_scales
    assert scales is not None
    assert [(scale.key, scale.value) for scale in scales] == [(0.5, 0.5)] * layers


def test_end_tokens_and_quantisation_are_those_of_the_whole_model(gemma: Path) -> None:
    (gemma / "generation_config.json").unlink()
    edit_config(gemma, "text_config", eos_token_id=7)
    assert ModelSource.open(str(gemma)).architecture.eos_token_ids == {7}
    edit_config(gemma, eos_token_id=[9, 11])
    assert ModelSource.open(str(gemma)).architecture.eos_token_ids == {9, 11}
    edit_config(gemma, quantization_config={"quant_method": "unknown"})
    with pytest.raises(ModelError, match="quantization_config"):
        ModelSource.open(str(gemma))


def test_a_head_is_tied_by_the_field_of_either_part_or_the_default_of_the_class(gemma: Path) -> None:
    def ties() -> bool:
        return ModelSource.open(str(gemma)).architecture.tie_word_embeddings

    edit_config(gemma, tie_word_embeddings=False)
    edit_config(gemma, "text_config", tie_word_embeddings=False)
    assert not ties()
    edit_config(gemma, "text_config", tie_word_embeddings=True)
    assert ties()
    edit_config(gemma, "text_config", tie_word_embeddings=False)
    edit_config(gemma, tie_word_embeddings=...)
    assert ties()


def test_a_fault_in_the_text_part_is_named_with_its_place(gemma: Path) -> None:
    edit_config(gemma, "text_config", num_hidden_layers="4")
    with pytest.raises(ModelError, match=r"config\.json: text_config: num_hidden_layers is '4'"):
        ModelSource.open(str(gemma))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}},
            "model_type is 'gemma3n': multimodal models with a text part of type 'gemma3n_text' are not supported: "
            "it needs embeddings for each layer",
        ),
        ({"model_type": "llava", "text_config": {"model_type": "gpt2"}}, "text part of type 'gpt2' are not supported"),
        ({"model_type": "llava", "text_config": {"model_type": ["x"]}}, "are not supported"),
        ({"model_type": "kosmos", "text_config": {"model_type": "llama"}}, "multimodal models of this type"),
        ({"model_type": "gemma3", "text_config": "x"}, "text_config is 'x': expected an object"),
        ({"model_type": "phi4_multimodal", "vision_config": {}}, "with vision_config: only text models are supported"),
        ({"model_type": "gemma3", "architectures": ["Gemma3ForSequenceClassification"]}, "architectures is"),
    ],
)
def test_other_multimodal_models_are_rejected_with_the_reason(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=words):
        ModelSource.open(str(tmp_path))


@pytest.mark.parametrize("kind", MULTIMODAL)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    row, theirs = MULTIMODAL[kind], CONFIG_MAPPING[kind]()
    assert row.text == theirs.text_config.model_type
    assert row.ties is next(f.default for f in dataclasses.fields(type(theirs)) if f.name == "tie_word_embeddings")


@pytest.mark.parametrize("text", [text for text in FAMILIES if default_sizes(text)])
def test_sizes_that_a_text_part_leaves_out_are_those_of_transformers(text: str) -> None:
    theirs = CONFIG_MAPPING[text]()
    assert default_sizes(text) == {name: getattr(theirs, name) for name in default_sizes(text)}
    assert len(default_sizes(text)) == 5 - (not hasattr(theirs, "intermediate_size"))


def test_every_type_that_a_text_part_has_by_default_has_sizes() -> None:
    assert all(default_sizes(row.text) for row in MULTIMODAL.values())


def test_published_gemma_3_states_few_sizes(gemma: Path) -> None:
    stated = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    scaling = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "model_type": "gemma3_text"}
    edit_config(gemma, text_config={**stated, **scaling})
    found = ModelSource.open(str(gemma)).architecture
    assert (found.vocab_size, found.num_heads, found.num_kv_heads, found.head_dim) == (262_208, 8, 4, 256)

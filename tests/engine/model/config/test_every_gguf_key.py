"""Every key of package gguf for every family: honoured, rejected by name, or known to change no number.

A newer package with a new key fails a test here, until the key is served, rejected or entered with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np
import pytest

from fastgen.model import ModelError
from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.config.from_gguf import architecture_from_gguf
from fastgen.model.config.gguf_families import FAMILIES
from fastgen.model.config.gguf_keys import WITHOUT_EFFECT
from fastgen.model.config.rope import LinearScaling, NoRotation, RopeConfig, YarnScaling

SIZES: dict[str, Any] = {
    "block_count": 4,
    "context_length": 128,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 2,
    "attention.head_count_kv": 2,
    "attention.key_length": 32,
    "attention.value_length": 32,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.dimension_count": 32,
    "rope.freq_base": 10_000.0,
    "vocab_size": 50,
}
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {"attention.sliding_window": 16},
    "phi3": {"attention.sliding_window": 16},
    "gemma2": {"attention.sliding_window": 16},
    "gemma3": {"attention.sliding_window": 16, "rope.freq_base_swa": 5000.0},
    "qwen2moe": EXPERTS | {"expert_shared_feed_forward_length": 64},
    "qwen3moe": EXPERTS,
    "granite": {"logit_scale": 8.0},
    "granitemoe": EXPERTS | {"logit_scale": 8.0, "expert_shared_feed_forward_length": 64},
}


@dataclass
class Described:
    """The contents of a GGUF file with few tensors."""

    metadata: dict[str, Any]
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def tensor_names(self) -> list[str]:
        return list(self.tensors)

    def tensor(self, name: str) -> np.ndarray:
        return self.tensors[name]


def metadata_of(kind: str, **changes: Any) -> dict[str, Any]:
    values = SIZES | OF_FAMILY.get(kind, {}) | changes
    return {"general.architecture": kind, **{f"{kind}.{name}": value for name, value in values.items()}}


def described(kind: str, **changes: Any) -> ModelArchitecture:
    return architecture_from_gguf(Described(metadata_of(kind, **{k.replace("__", "."): v for k, v in changes.items()})))


def keys(owner: type) -> Iterator[str]:
    for name, value in vars(owner).items():
        if isinstance(value, type):
            yield from keys(value)
        elif isinstance(value, str) and not name.startswith("__"):
            yield value


ALL_KEYS = sorted(set(keys(gguf.Keys)))
OF_ARCHITECTURE = [key.removeprefix("{arch}.") for key in ALL_KEYS if key.startswith("{arch}.")]
# Keys that do not begin with the architecture, by their beginnings.
OTHER_KEYS = {
    "general.": "notes on the file, and recommended sampling parameters, which a request states",
    "split.": "split.count is rejected; the others number the parts",
    "tokenizer.": "read by the tokenizer, see tests/engine/text",
    "adapter.": "rejected",
    "clip.": "rejected",
    "diffusion.": "rejected",
    "imatrix.": "rejected",
    "xielu.": "rejected",
}
VALUES: dict[str, Any] = {
    "attention.causal": False,
    "attention.sliding_window": 24,
    "attention.sliding_window_pattern": 3,
    "expert_used_count": 3,
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "tensor_data_layout": "Meta AI original pth",
    "classifier.output_labels": ["yes", "no"],
    "attention.layer_norm_epsilon": 1e-3,
    "rope.scaling.finetuned": True,
    "expert_weights_norm": True,
    "use_parallel_residual": True,
    "swin_norm": True,
    "rope.scaling.yarn_log_multiplier": 0.1,
    "attention.head_count": 4,
    "attention.head_count_kv": 1,
    "pooling_type": 3,
}
_REASONS = {name: reason for reason, names in WITHOUT_EFFECT.items() for name in names}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("name", OF_ARCHITECTURE)
def test_a_key_is_honoured_or_rejected_by_name_or_known_to_change_nothing(kind: str, name: str) -> None:
    metadata = metadata_of(kind)
    full = f"{kind}.{name}"
    before = architecture_from_gguf(Described(metadata))
    given = metadata.get(full)
    value = VALUES[name] if name in VALUES else 7.5 if given is None else given * 2
    if kind in ("qwen3moe", "granitemoe") and name == "expert_weights_norm":
        value = False  # its default is true
    assert value != given
    message = ""
    try:
        after = architecture_from_gguf(Described(metadata | {full: value}))
    except ModelError as error:
        message = str(error)
    if message:
        assert full in message or "head size" in message or "heads" in message
    elif after == before:
        assert name in _REASONS, f"{full} is ignored, and no reason is given"


def test_every_other_key_has_a_beginning_of_which_it_is_known_what_it_does() -> None:
    others = [key for key in ALL_KEYS if not key.startswith("{arch}.")]
    assert [key for key in others if not key.startswith(tuple(OTHER_KEYS))] == []


@pytest.mark.parametrize("key", ["adapter.type", "clip.projector_type", "diffusion.shift_logits", "xielu.beta"])
def test_keys_of_files_that_are_no_decoder_are_rejected(key: str) -> None:
    with pytest.raises(ModelError, match=key):
        architecture_from_gguf(Described(metadata_of("llama") | {key: 1}))


def test_a_file_that_is_no_model_is_rejected() -> None:
    with pytest.raises(ModelError, match=r"general\.type is 'adapter'"):
        architecture_from_gguf(Described(metadata_of("llama") | {"general.type": "adapter"}))


def test_keys_that_no_version_of_the_package_has_are_rejected() -> None:
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.new_factor is 2\.0: not supported"):
        described("llama", rope__scaling__new_factor=2.0)


def test_switched_off_keys_change_nothing() -> None:
    off = {
        "logit_scale": 1.0,
        "expert_gating_func": 1,
        "attention__clamp_kqv": 0.0,
        "use_parallel_residual": False,
        "rope__dimension_sections": [0, 0, 0, 0],
        "rope__scaling__attn_factor": 1.0,
        "nextn_predict_layers": 0,
    }
    assert described("llama", **off) == described("llama")


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [
        # llama.cpp's load_hparams: the type is linear if none is given, and rope.scale_linear is the old name.
        ({"rope__scaling__factor": 4.0}, LinearScaling(4.0)),
        ({"rope__scale_linear": 4.0}, LinearScaling(4.0)),
        ({"rope__scaling__type": "linear", "rope__scale_linear": 4.0}, LinearScaling(4.0)),
        ({"rope__scaling__factor": 2.0, "rope__scale_linear": 4.0}, LinearScaling(2.0)),
        ({"rope__scaling__factor": 0.0}, None),
        ({"rope__scaling__factor": 1.0}, None),
        ({"rope__scaling__type": "linear"}, None),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
        ({"rope__scaling__type": "yarn", "rope__scale_linear": 1.0}, YarnScaling(1.0, 128, 1.0, 32.0, 1.0, True)),
    ],
)
def test_rope_scaling_is_read_as_llama_cpp_reads_it(changes: dict[str, Any], scaling: Any) -> None:
    assert described("qwen2", **changes).rope_configs == (RopeConfig(10_000.0, 32, scaling),)


def test_granite_has_no_positions_if_the_key_says_so() -> None:
    for value, scaling in ((True, None), (False, NoRotation())):
        given = described("granite", rope__scaling__finetuned=value)
        assert given.rope_configs == (RopeConfig(10_000.0, 32, scaling),)
    assert described("granite", attention__scale=0.25).attention_scale == 0.25
    assert described("granite").attention_scale == 32**-0.5


def test_key_value_heads_may_be_listed_for_each_layer_if_they_are_alike() -> None:
    assert described("granite", attention__head_count_kv=[1] * 4) == described("granite", attention__head_count_kv=1)
    for counts in ([2, 2, 1, 2], [0] * 4, []):
        with pytest.raises(ModelError, match=r"granite\.attention\.head_count_kv"):
            described("granite", attention__head_count_kv=counts)


def test_a_list_tells_which_layers_have_a_window() -> None:
    pattern = [True, False, False, True]
    layers = described("gemma3", attention__sliding_window_pattern=pattern).layers
    assert [layer.window is not None for layer in layers] == pattern
    with pytest.raises(ModelError, match="sliding_window_pattern has 1 entries: expected 4"):
        described("gemma3", attention__sliding_window_pattern=[True])


ONES = np.ones(16, np.float32)


@pytest.mark.parametrize(
    ("kind", "tensors", "changes", "words"),
    [
        ("llama", {"rope_freqs.weight": ONES[:3]}, {}, r"rope_freqs\.weight has shape \(3,\): expected \(16,\)"),
        ("llama", {"rope_freqs.weight": ONES * 0}, {}, "a factor that is not a positive number"),
        ("llama", {"rope_freqs.weight": ONES * np.nan}, {}, "a factor that is not a positive number"),
        ("qwen2", {"rope_freqs.weight": ONES}, {}, r"rope_freqs\.weight with other rope scaling, or not of a llama"),
        ("llama", {"rope_freqs.weight": ONES}, {"rope__scaling__type": "yarn"}, r"rope_freqs\.weight with other"),
        ("phi3", {"rope_factors_long.weight": ONES}, {}, r"rope_factors_short\.weight is missing"),
        ("phi3", {"rope_factors_short.weight": ONES}, {"rope__scaling__factor": 2.0}, "beside LongRoPE"),
        ("llama", {}, {"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}, "beside LongRoPE"),
        ("llama", {}, {"rope__freq_base": 1.0}, r"rope\.freq_base is 1\.0: expected a number above 1"),
        ("llama", {}, {"block_count": 1 << 40}, r"block_count is 1099511627776: expected an integer of at most"),
    ],
)
def test_rotary_factors_that_cannot_be_used_are_rejected_by_name(
    kind: str, tensors: dict[str, np.ndarray], changes: dict[str, Any], words: str
) -> None:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    with pytest.raises(ModelError, match=words):
        architecture_from_gguf(Described(metadata_of(kind, **named), tensors))

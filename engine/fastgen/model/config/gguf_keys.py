"""Keys of GGUF files that the engine does not read: those without effect, and those that it rejects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastgen.model import ModelError
from fastgen.model.config.fields import Fields, shown

# Keys that change no result where they are unread, by the reason.
WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "the shapes and names of the tensors decide": (
        "expert_count",
        "expert_used_count",
        "expert_shared_count",
        "expert_feed_forward_length",
        "expert_shared_feed_forward_length",
        "feed_forward_length",
        "vocab_size",
    ),
    "the model has RMS norms, whose epsilon is a key of its own": ("attention.layer_norm_epsilon",),
    "only YaRN and LongRoPE use it, and read it": (
        "rope.scaling.original_context_length",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
    ),
    "of Mamba layers, whose tensors are rejected": (
        "ssm.conv_kernel",
        "ssm.group_count",
        "ssm.inner_size",
        "ssm.state_size",
        "ssm.time_step_rank",
    ),
    "a note on the model's training or conversion": ("rope.scaling.finetuned", "tensor_data_layout"),
    "read by `model.pooling`, not of the decoder": ("pooling_type",),
    "names of a classifier's results, whose tensors are rejected": ("classifier.output_labels",),
}
_WITHOUT_EFFECT = frozenset(name for names in WITHOUT_EFFECT.values() for name in names)

# Values besides 0, with which llama.cpp computes the same as without the key.
_NEUTRAL: Mapping[str, Any] = {
    "attention.output_scale": 1,
    "embedding_scale": 1,
    "expert_gating_func": 1,  # softmax
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_scale": 1,
    "logit_scale": 1,
    "residual_scale": 1,
    "rope.scaling.attn_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.yarn_ext_factor": 1,
}

# Prefixes of keys in files without a decoder, or of families that have keys without the architecture's prefix.
_FOREIGN = ("adapter.", "clip.", "diffusion.", "imatrix.", "xielu.")


def reject_unread_keys(metadata: Mapping[str, Any], fields: Fields) -> None:
    """Check the keys of the architecture that nothing has read, and look for keys of unsupported files.

    Raises:
        ModelError: naming a key that may change the results, or that files of supported decoders do not have.
    """
    for name, value in fields.unread().items():
        if name in _WITHOUT_EFFECT or _is_off(value) or value == _NEUTRAL.get(name):
            continue
        raise ModelError(f"{fields.name_of(name)} is {shown(value)}: not supported, and ignoring it may change results")
    foreign = min((key for key in metadata if key.startswith(_FOREIGN)), default=None)
    if foreign is not None:
        raise ModelError(f"the file has the key {foreign}: only files of decoders are supported")


def _is_off(value: Any) -> bool:
    """Return whether a value is 0, false, empty or a list of such values: unset, in llama.cpp's parameters."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        return not any(value)
    return not value

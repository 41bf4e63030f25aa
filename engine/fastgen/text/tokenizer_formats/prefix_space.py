"""The setting `add_prefix_space` of tokenizer_config.json: whether a text starts as if a space were before it.

tokenizer.json usually agrees with it. transformers' classes below apply the setting where it does not (read in version
5.23); the generic class ignores it.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers

_CLASSES = frozenset(
    {"CodeGen", "CodeLlama", "Cohere", "GPT2", "GPTNeoX", "Llama", "Qwen2", "Qwen3_5", "Roberta", "XGLM"}
)
_SPACE = "\u2581"


def applies(tokenizer_class: object) -> bool:
    """Return whether a class in tokenizer_config.json, None for the model's own, applies the setting."""
    if tokenizer_class is None:
        return True
    return str(tokenizer_class).removesuffix("Fast").removesuffix("Tokenizer") in _CLASSES


def apply(backend: tokenizers.Tokenizer, adds: bool) -> None:
    """Make a tokenizer add a space before a text, or not."""
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        found = getattr(backend, part)
        if found is None:
            continue
        state = json.loads(found.__getstate__())  # tokenizers exposes nested parts only by pickling, as JSON
        changed = _changed(state, adds)
        if changed != state:
            setattr(backend, part, _parsed(part, changed))


def _parsed(part: str, state: dict[str, Any] | None) -> Any:
    empty = {"type": "BPE", "vocab": {}, "merges": []}
    return getattr(tokenizers.Tokenizer.from_str(json.dumps({"model": empty, part: state})), part)


def _changed(state: dict[str, Any], adds: bool) -> dict[str, Any] | None:
    """Return the state of a part with the setting applied; None if the part is only there to add a space."""
    kind = state.get("type")
    if kind == "Sequence":
        (name,) = (key for key, value in state.items() if isinstance(value, list))
        steps = [_changed(step, adds) for step in state[name]]
        return state | {name: [step for step in steps if step is not None]}
    if kind == "ByteLevel":
        return state | {"add_prefix_space": adds}
    if kind == "Metaspace":
        scheme = state.get("prepend_scheme", "always")
        return state | {"prepend_scheme": ("first" if scheme == "never" else scheme) if adds else "never"}
    is_prefix = kind == "Prepend" and state.get("prepend") == _SPACE
    is_prefix |= kind == "Strip" and state.get("content") == " " and state.get("start") == 1
    return None if is_prefix and not adds else state

"""The tokens that end a generation of a Hugging Face folder's model.

transformers (5.23) ends on `eos_token_id` of generation_config.json, or of config.json without that file. vLLM adds the
tokenizer's `eos_token` (`SamplingParams.update_from_generation_config`), and so does this engine. If
generation_config.json has no `eos_token_id`, that of config.json applies here, so that generations end.

For GGUF files see `fastgen.text.tokenizer_formats.gguf_vocabulary`.
"""

from __future__ import annotations

from typing import Any

from fastgen.model import ModelError
from fastgen.model.config.fields import shown


def end_tokens(
    of_config: frozenset[int], of_generation_config: frozenset[int], of_tokenizer: int | None
) -> frozenset[int]:
    """Return the end tokens for both files' `eos_token_id` and the id of the tokenizer's `eos_token`."""
    return (of_generation_config or of_config).union([] if of_tokenizer is None else [of_tokenizer])


def eos_token_ids(value: Any) -> frozenset[int]:
    """Return the tokens of an `eos_token_id`; negative ones name no token.

    Raises:
        ModelError: if it is neither an id nor a list of ids.
    """
    entries = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(entry) is int for entry in entries):
        raise ModelError(f"eos_token_id is {shown(value)}: expected an integer or a list of integers")
    return frozenset(entry for entry in entries if entry >= 0)

"""Request fields of OpenAI, vLLM and SGLang that this server does not implement.

A field is rejected by name, or accepted if it cannot change the answer. Of other servers, only fields that can change
it are listed: the rest is ignored, as unknown fields are. Implemented fields are in the request classes, most of
them in `generation_request.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pydantic import AfterValidator, BaseModel

from fastgen.server.openai.fields.types import one_of, optional


@dataclass(frozen=True, slots=True)
class Refused:
    """Marks a field that is rejected unless it is null or one of the `neutral` values, which have no effect."""

    why: str
    neutral: tuple[object, ...] = ()


@dataclass(frozen=True, slots=True)
class Ignored:
    """Marks a field that is accepted with any value because it cannot change the answer."""

    why: str


def refused(why: str, *neutral: object, choices: tuple[str, ...] = ()) -> Any:
    """Return a field that accepts only null and `neutral` values, which have no effect.

    Args:
        why: what to use instead, or what is missing; part of the error message.
        neutral: the error message suggests the first of them.
        choices: all values in OpenAI's API; other values are reported as invalid instead of unsupported.
    """
    remedy = f"leave it out or set it to {json.dumps(neutral[0])}" if neutral else "leave it out"

    def check(value: Any) -> Any:
        if value is None or any(value == same and type(value) is type(same) for same in neutral):
            return value
        raise ValueError(f"this value is not supported ({why}); {remedy}")

    steps = (one_of(*choices),) if choices else ()
    return optional(*steps, AfterValidator(check), Refused(why, neutral))


def ignored(why: str) -> Any:
    """Return a field that is accepted with any value because it cannot change the answer; the value is not kept."""
    return optional(AfterValidator(lambda _: None), Ignored(why))


_TEXT_ONLY = "only text models are supported"
_NOT_STORED = "nothing is stored"
_NO_BEAMS = "beam search is not implemented"
_NO_CUSTOM_CODE = "requests cannot run code"

_SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority", "fast")


class OpenAIFields(BaseModel):
    """OpenAI's fields that chat completions and responses share."""

    user: Any = ignored("it names the end user for abuse reports")
    safety_identifier: Any = ignored("it names the end user for abuse reports")
    metadata: Any = ignored(_NOT_STORED)
    prompt_cache_key: Any = ignored("the prefix cache needs no hint")
    prompt_cache_options: Any = ignored("the prefix cache needs no hint")
    prompt_cache_retention: Any = ignored("the prefix cache keeps blocks while it has room")
    service_tier: Any = refused("there is only one tier", "auto", "default", choices=_SERVICE_TIERS)
    moderation: Any = refused("moderation is not supported")


class ExtensionFields(BaseModel):
    """Fields of vLLM and SGLang for completions and chat completions."""

    # vLLM
    thinking_token_budget: Any = refused("only chat completions separate reasoning", -1)
    use_beam_search: Any = refused(_NO_BEAMS, False)
    length_penalty: Any = refused(_NO_BEAMS, 1.0, 1)
    early_stopping: Any = refused(_NO_BEAMS, False)
    watermarking: Any = refused("watermarks are not implemented", False)
    logprob_token_ids: Any = refused("logprobs of given tokens are not implemented; use logprobs")
    logits_processors: Any = refused(_NO_CUSTOM_CODE, [], {})
    detokenize: Any = refused("responses contain text; return_token_ids adds the ids", True)
    prompt_embeds: Any = refused("prompts are text or token ids", [])
    return_token_offsets: Any = refused("offsets are not returned; /tokenize has the tokens", False)
    vllm_xargs: Any = refused(_NO_CUSTOM_CODE, {})
    repetition_detection: Any = refused("it is not implemented; use repetition_penalty")
    guided_whitespace_pattern: Any = refused("JSON may have at most 20 characters of white space between tokens")

    # SGLang
    stop_regex: Any = refused("only strings and tokens stop; use stop", [])
    lora_path: Any = refused("adapters are not supported; name a served model")
    session_params: Any = refused("there are no sessions; send the whole prompt", {})
    custom_params: Any = refused(_NO_CUSTOM_CODE, {})
    custom_logit_processor: Any = refused(_NO_CUSTOM_CODE)
    return_hidden_states: Any = refused("hidden states are not returned", False)
    return_routed_experts: Any = refused("routed experts are not returned", False)
    return_cached_tokens_details: Any = refused("usage.prompt_tokens_details has the cached tokens", False)
    extra_key: Any = refused("use cache_salt to separate cached prefixes", "", [])


class ChatFields(BaseModel):
    """Fields of chat completions only."""

    # OpenAI
    store: Any = refused(_NOT_STORED, False)
    audio: Any = refused(_TEXT_ONLY)
    modalities: Any = refused(_TEXT_ONLY, ["text"])
    prediction: Any = ignored("it is a hint for speed")
    verbosity: Any = refused("chat templates have no such variable", "medium", choices=("low", "medium", "high"))
    web_search_options: Any = refused("the server cannot search; give the model a tool")
    functions: Any = refused("use tools", [], {})
    function_call: Any = refused("use tool_choice", "none", "auto")

    # vLLM
    echo: Any = refused("use /v1/completions, or continue_final_message", False)
    return_prompt_text: Any = refused("/tokenize has the rendered tokens", False)

    # SGLang
    separate_reasoning: Any = refused("start the server with --reasoning-parser none", True)
    stream_reasoning: Any = refused("reasoning is streamed as it arrives", True)
    return_prompt_token_ids: Any = refused("use return_token_ids", False)
    return_meta_info: Any = refused("usage has the counts", False)
    task: Any = refused("chat templates have no such variable")
    input_ids: Any = refused("use /v1/completions for token ids")
    reasoning: Any = refused("use reasoning_effort")

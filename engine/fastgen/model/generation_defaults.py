"""A model's own sampling defaults, from its generation_config.json, config.json or GGUF metadata."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import INTEGERS, SamplingParams
from fastgen.model import ModelError
from fastgen.model.config.fields import shown
from fastgen.model_files import optional_json_object, read_json_object
from fastgen.text.tokenizer_formats.gguf_vocabulary import values

log = logging.getLogger("fastgen.model")

# Numbers that become sampling parameters, by their name in the file. vLLM reads all but typical_p.
NUMBERS: Mapping[str, str] = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
# Tokens that are never generated, as in transformers; vLLM ignores them.
BANNED = ("bad_words_ids", "suppress_tokens")
# Keys that change which tokens transformers generates and that the engine ignores, with their neutral values besides
# null.
IGNORED: Mapping[str, tuple[Any, ...]] = {
    "begin_suppress_tokens": ([],),
    "constraints": ([],),
    "diversity_penalty": (0,),
    "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "exponential_decay_length_penalty": (),
    "force_words_ids": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1,),
    "max_time": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beam_groups": (1,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "sequence_bias": ({}, []),
    "stop_strings": ([], ""),
    "token_healing": (False,),
    "top_h": (),
    "watermarking_config": (),
}
# Keys that do not change which tokens the engine generates, by the reason.
WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "the server samples unless temperature is 0, as in vLLM": ("do_sample",),
    "the request and the model's length limit the generation": ("max_length", "num_return_sequences"),
    "the end tokens, see `fastgen.model.config.end_tokens`": ("eos_token_id",),
    "the tokenizer names them": ("bos_token_id", "pad_token_id"),
    "of encoders, or of beams alone": ("decoder_start_token_id", "early_stopping", "length_penalty"),
    "no sampled token depends on it": ("renormalize_logits", "remove_invalid_values"),
    "the cache, the compiler and the output of transformers": (
        *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory", "prefill_chunk_size"),
        *("compile_config", "disable_compile", "continuous_batching_config", "return_dict_in_generate"),
        *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
        *("_from_model_config", "transformers_version"),
    ),
    "speculation changes the speed, not the tokens": (
        *("is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "assistant_ensemble_weight"),
        *("prompt_lookup_num_tokens", "max_matching_ngram_size", "use_mtp", "speculation_type"),
    ),
}
_KNOWN = {*NUMBERS, *BANNED, *(name for names in WITHOUT_EFFECT.values() for name in names)}
_REMEDY = "correct it, or start with --generation-config none"

# Values by name of the sampling parameter; `max_tokens` limits a chat's answer unless the request sets a limit.
GenerationDefaults = dict[str, Any]


def generation_defaults(name: str, model: Path | Mapping[str, Any]) -> GenerationDefaults:
    """Return the sampling parameters of requests that do not set them.

    As in transformers, config.json may have them if there is no generation_config.json. What the engine cannot apply
    is logged. Of a GGUF file's metadata, only `suppress_tokens` applies, as in llama.cpp.

    Args:
        name: the setting `generation_config`: `auto` reads the file, `none` leaves OpenAI's defaults.
        model: a folder, or the `tokenizer.*` metadata of a GGUF file.

    Raises:
        ConfigError: if a file or key cannot be read; a ModelError if a value cannot be used.
    """
    if name == "none":
        return {}
    if isinstance(model, Mapping):
        num_tokens, suppressed = len(values(model, "tokens", str, ())), values(model, "suppress_tokens", int, ())
        words = tuple((token,) for token in suppressed if 0 <= token < num_tokens)
        return {"bad_words": words} if words else {}
    path = model / "generation_config.json"
    is_own, config = path.is_file(), optional_json_object(model / "config.json")
    path, given = (path, read_json_object(path)) if is_own else (model / "config.json", config)
    defaults: GenerationDefaults = {
        name: _number(path, key, given[key], is_integer=name in INTEGERS)
        for key, name in NUMBERS.items()
        if given.get(key) is not None
    }
    if defaults.get("top_k", 0) < 0:  # -1 is "off" in vLLM's spelling
        defaults["top_k"] = 0
    if banned := _banned(path, given, config.get("vocab_size")):
        defaults["bad_words"] = banned
    try:
        SamplingParams(**defaults)
    except RequestError as error:
        key = next(key for key, name in NUMBERS.items() if name == error.param)
        raise ModelError(f"{path}: {key}{str(error).removeprefix(error.param)}; {_REMEDY}") from None
    for key, value in given.items():
        is_neutral = value is None or value in IGNORED.get(key, ())
        if not is_neutral and (key in IGNORED or (is_own and key not in _KNOWN)):
            log.warning("%s: %s is %s: ignored, as this server has no such default", path.name, key, shown(value))
    return defaults


def in_words(defaults: GenerationDefaults) -> str:
    """Return defaults as a log shows them: `temperature 0.6, 2 banned sequences of tokens`."""
    words = [f"{name} {value:g}" for name, value in defaults.items() if name != "bad_words"]
    if banned := defaults.get("bad_words"):
        words.append(f"{len(banned)} banned sequences of tokens")
    return ", ".join(words)


def _number(path: Path, key: str, value: Any, *, is_integer: bool) -> float:
    """Convert a number of the file to the type of its sampling parameter.

    As in requests, 50.0 is an integer, and true is not a number.

    Raises:
        ModelError: if the value is not a finite number or, for an integer parameter, not an integer.
    """
    with suppress(OverflowError):  # an int beyond the range of float
        if type(value) in (int, float) and math.isfinite(value):
            if not is_integer:
                return float(value)
            if value == int(value):
                return int(value)
    expected = "an integer" if is_integer else "a number"
    raise ModelError(f"{path}: {key} is {shown(value)}: expected {expected}: {_REMEDY}")


def _banned(path: Path, given: Mapping[str, Any], vocab_size: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences that are never generated.

    Raises:
        ModelError: if one is not a sequence of the vocabulary's tokens.
    """
    words = [*_entries(path, given, "bad_words_ids"), *([token] for token in _entries(path, given, "suppress_tokens"))]
    limit = vocab_size if type(vocab_size) is int else 1 << 31
    for word in words:
        if not isinstance(word, list) or not word or not all(type(token) is int for token in word):
            raise ModelError(f"{path}: bad_words_ids, suppress_tokens: {shown(word)} is not a list of ids: {_REMEDY}")
        if not all(0 <= token < limit for token in word):
            raise ModelError(f"{path}: bad_words_ids, suppress_tokens: the vocabulary lacks {shown(word)}: {_REMEDY}")
    return tuple(map(tuple, words))


def _entries(path: Path, given: Mapping[str, Any], key: str) -> list[Any]:
    value = given.get(key)
    if not isinstance(value, list | None):
        raise ModelError(f"{path}: {key} is {shown(value)}: expected a list: {_REMEDY}")
    return value or []

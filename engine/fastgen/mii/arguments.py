"""DeepSpeed-MII's generation arguments and response."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import SamplingParams
from fastgen.settings import ConfigError
from fastgen.text.stop_strings import given_stop_strings

_FLOATS_OF_MII = ("temperature", "top_p")
# Additional arguments, named as in SamplingParams.
_MORE = ("seed", *(f.name for f in fields(SamplingParams) if type(f.default) is float and f.name not in _FLOATS_OF_MII))
# Model arguments of MII that are not supported, and what to use instead.
_REMEDIES = {
    "replica_num": "one server is one replica: for more, set replicas in a FastGenDeployment",
    "quantization_mode": 'use quantization="int8" (on a CPU)',
    "model_config": "pass each setting as its own argument",
    "tokenizer": "the model's own is used: leave it out",
    "enable_restful_api": "every server has an HTTP API: leave it out",
    "restful_api_port": "use port",
    "port_number": "use port",
    "all_rank_output": "only rank 0 answers: leave it out",
    "max_length": "use max_model_length",
}


@dataclass(frozen=True, slots=True)
class Response:
    """One response.

    Attributes:
        generated_text: the generated text; with `return_full_text`, the prompt and the generated text.
        prompt_length, generated_length: number of tokens. In a streamed chunk, 0 and the number of chunks so far.
        finish_reason: "stop", "length" or, if the generation was cut short, another `FinishReason`. None in a streamed
            chunk that is not the last.
    """

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: str | None

    def __str__(self) -> str:
        return self.generated_text


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateArguments:
    """Generation arguments, named as in MII.

    Attributes:
        max_length: maximum number of prompt and generated tokens; ignored with `max_new_tokens`.
        max_new_tokens, min_new_tokens: maximum and minimum number of generated tokens.
        do_sample: False decodes greedily and ignores `top_p`, `top_k` and `temperature`.
        top_p, top_k, temperature: sampling parameters. Without `top_k` all tokens are kept; the temperature defaults
            to 1.
        stop: stop strings, in addition to the model's end-of-sequence tokens.
        ignore_eos: continue after an end-of-sequence token.
        return_full_text: return the prompt followed by the generated text.
        more: further arguments, named as in `fastgen.SamplingParams`: `seed`, `min_p`, `typical_p` and the penalties.
    """

    max_length: int = 1024
    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    do_sample: bool = True
    top_p: float = 0.9
    top_k: int | None = None
    temperature: float | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    return_full_text: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> GenerateArguments:
        """Build from keyword arguments.

        Raises:
            RequestError: an argument has an unknown name, or a stop string is empty or not a string.
        """
        own = [f.name for f in fields(cls) if f.name != "more"]
        unknown = next((name for name in given if name not in (*own, *_MORE)), None)
        if unknown is not None:
            raise RequestError(f"{unknown}: no such argument; there are {', '.join((*own, *_MORE))}", unknown)
        values = {name: value for name, value in given.items() if name in own}
        values["stop"] = given_stop_strings(given.get("stop"))
        return cls(**values, more={name: value for name, value in given.items() if name in _MORE})

    def max_tokens(self, prompt_length: int) -> int:
        """Return the maximum number of tokens to generate after a prompt of this length.

        Raises:
            RequestError: the prompt is at least as long as `max_length`.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if prompt_length >= self.max_length:
            raise RequestError(
                f"max_length is {self.max_length} and the prompt has {prompt_length} tokens: raise it, or pass "
                "max_new_tokens instead",
                "max_length",
            )
        return self.max_length - prompt_length

    def sampling(self, prompt_length: int) -> SamplingParams:
        """Return the arguments as SamplingParams.

        Raises:
            RequestError: a value is out of range, or as `max_tokens`.
        """
        return SamplingParams(**self._sampling_fields(prompt_length))

    def body(self, prompt_length: int) -> dict[str, Any]:
        """Return the fields of a /v1/completions request.

        `prompt_length` is used only without `max_new_tokens`.

        Raises:
            RequestError: as `max_tokens`.
        """
        return {**self._sampling_fields(prompt_length), "stop": list(self.stop)}

    def response(
        self, prompt: str, text: str, prompt_length: int, generated_length: int, reason: str | None
    ) -> Response:
        """Return the response for a generated text."""
        full_text = prompt + text if self.return_full_text else text
        return Response(full_text, prompt_length, generated_length, reason)

    def _sampling_fields(self, prompt_length: int) -> dict[str, Any]:
        values = {
            "max_tokens": self.max_tokens(prompt_length),
            "min_tokens": self.min_new_tokens,
            "ignore_eos": self.ignore_eos,
            "temperature": 0.0,
        }
        if self.do_sample:
            values["temperature"] = 1.0 if self.temperature is None else self.temperature
            values |= {"top_p": self.top_p, "top_k": self.top_k or 0}
        return {**values, **self.more}


def check_model_arguments(given: Mapping[str, Any]) -> None:
    """Raise ConfigError with the remedy for an argument that only MII has."""
    for name in given:
        if name in _REMEDIES:
            raise ConfigError(f"{name}: {_REMEDIES[name]}")


def as_list(prompts: str | Sequence[str]) -> list[str]:
    """Return one prompt or several as a list."""
    return [prompts] if isinstance(prompts, str) else list(prompts)

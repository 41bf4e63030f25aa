"""Receipts: what an answer's tokens were computed from, so that another machine can compute them again.

The digest finds accidental changes. It is not a signature: whoever changes a receipt can compute it again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, asdict, fields
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_type_hints

import msgspec

from fastgen.core.request import FinishReason
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import SamplingParams
from fastgen.link.messages import EngineInfo
from fastgen.model.file_digests import FileDigest
from fastgen.settings import ConfigError
from fastgen.version import VERSION

RECEIPT_VERSION: Final = 1
# Their code computes, or decides which tokens a grammar allows.
_LIBRARIES = ("torch", "llvmlite", "llguidance")
# Those of a receipt decide no token, or differ between answers.
_NOT_IN_SAMPLING = ("seed", "logprobs", "prompt_logprobs")
_ALWAYS_SHOWN = ("max_tokens", "temperature")

_FINISH_REASONS: Final[dict[FinishReason, Literal["stop", "length", "abort"]]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.DEADLINE: "abort",
}


def _sampling_fields() -> list[Any]:
    types = get_type_hints(SamplingParams)
    return [
        (field.name, types[field.name])
        if field.name in _ALWAYS_SHOWN or field.default is MISSING
        else (field.name, types[field.name], field.default)
        for field in fields(SamplingParams)
        if field.name not in _NOT_IN_SAMPLING
    ]


if TYPE_CHECKING:
    ReceiptSampling = Any
else:
    # The fields of `SamplingParams` that decide tokens. Those with their default are left out, so a parameter that is
    # added later does not change the digests of receipts without it.
    ReceiptSampling = msgspec.defstruct(
        "ReceiptSampling",
        _sampling_fields(),
        frozen=True,
        kw_only=True,
        omit_defaults=True,
        forbid_unknown_fields=True,
        module=__name__,
        namespace={"__doc__": "Sampling parameters that decide tokens; those with their default are left out."},
    )


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ReceiptModel(_Part, frozen=True, kw_only=True):
    """The model's name in the response, and its files."""

    name: str
    files: list[FileDigest]


class ReceiptNumbers(_Part, frozen=True, kw_only=True):
    """The formats and settings that decide the bits of the logits, as in `EngineInfo`."""

    device: str
    dtype: str
    quantization: str
    kv_cache_dtype: str
    tensor_parallel: int
    block_size: int
    max_model_length: int
    deterministic: bool
    arithmetic: str

    @classmethod
    def of(cls, info: EngineInfo) -> ReceiptNumbers:
        """Return those of an engine."""
        return cls(**{name: getattr(info, name) for name in cls.__struct_fields__})


class ReceiptAnswer(_Part, frozen=True, kw_only=True):
    """One choice.

    Attributes:
        index: of the choice in the response.
        seed: its seed, in decimal, because programs in JavaScript would round a number of 63 bits.
        token_ids: the generated tokens, including the one that ended the generation.
        finish_reason: why the engine, or a stop string, ended it; `abort` if a deadline did.
        stop_string: the stop string that ended it, if one did.
    """

    index: int
    seed: Annotated[str, msgspec.Meta(pattern="^[0-9]{1,19}$")]
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    stop_string: str | None = None

    @property
    def is_cut(self) -> bool:
        """Whether something else than the engine ended it, so that the engine would continue."""
        return self.finish_reason == "abort" or self.stop_string is not None


class ReceiptPrompt(_Part, frozen=True, kw_only=True):
    """A prompt's tokens, how its answers are sampled, and the answers."""

    token_ids: list[int]
    sampling: ReceiptSampling
    answers: list[ReceiptAnswer]

    def sampling_params(self, answer: ReceiptAnswer, logprobs: int | None = None) -> SamplingParams:
        """Return the engine's parameters for one of the answers.

        Raises:
            RequestError: if a value is out of range.
        """
        values = {name: getattr(self.sampling, name) for name in self.sampling.__struct_fields__}
        return SamplingParams(**values, seed=int(answer.seed), logprobs=logprobs)


class Receipt(_Part, frozen=True, kw_only=True):
    """What the choices of one response were computed from, and their tokens.

    Attributes:
        version: of this form.
        model: the model's name and files.
        engine: versions of FastGen and of the libraries that compute.
        numbers: the formats and settings that decide the bits of the logits.
        prompts: the prompts, with their answers.
        digest: hexadecimal SHA-256 of the rest, as JSON with sorted keys and without white space.
    """

    version: Literal[1]
    model: ReceiptModel
    engine: dict[str, str]
    numbers: ReceiptNumbers
    prompts: list[ReceiptPrompt]
    digest: str = ""

    def computed_digest(self) -> str:
        """Return what `digest` must be."""
        content = msgspec.to_builtins(self)
        del content["digest"]
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def with_digest(self) -> Receipt:
        """Return this receipt with its digest."""
        return msgspec.structs.replace(self, digest=self.computed_digest())


@cache
def engine_versions() -> dict[str, str]:
    """Return the versions of FastGen and of the installed libraries that compute."""
    versions = {"fastgen": VERSION}
    for name in _LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def shown_sampling(sampling: SamplingParams) -> ReceiptSampling:
    """Return the parameters that decide tokens."""
    values = {name: value for name, value in asdict(sampling).items() if name not in _NOT_IN_SAMPLING}
    return ReceiptSampling(**{**values, "grammar": sampling.grammar})


def shown_finish(reason: FinishReason) -> Literal["stop", "length", "abort"]:
    """Return the finish reason of an answer. Raises KeyError for reasons that give the client an error instead."""
    return _FINISH_REASONS[reason]


def printable(text: str) -> str:
    """Return text of a receipt for a message: in one line, cut, and without commands to a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:800])


class _Versioned(msgspec.Struct):
    version: Any = None
    receipt: msgspec.Raw = msgspec.Raw(b"")


def parse_receipt(text: bytes) -> Receipt:
    """Read a receipt, or a response that has one.

    Raises:
        ConfigError: if it is neither, its version is unknown, or a field is invalid; names the field.
    """
    try:
        found = msgspec.json.decode(text, type=_Versioned)
        if found.version is None and bytes(found.receipt) not in (b"", b"null"):
            text = bytes(found.receipt)
            found = msgspec.json.decode(text, type=_Versioned)
        if found.version is None:
            raise ConfigError("receipt: there is none: give a receipt, or a response to a request with receipt: true")
        if found.version != RECEIPT_VERSION or isinstance(found.version, bool):
            shown = json.dumps(found.version)[:40]
            raise ConfigError(
                f"receipt: its version is {shown}, and fastgen {VERSION} knows version {RECEIPT_VERSION}: use a newer "
                "fastgen"
            )
        receipt = msgspec.json.decode(text, type=Receipt)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"receipt: cannot be read ({_one_line(error)})") from None
    except RecursionError:
        raise ConfigError("receipt: cannot be read (it is nested too deeply)") from None
    if not any(prompt.answers for prompt in receipt.prompts):
        raise ConfigError("receipt: it has no answers")
    for prompt in receipt.prompts:
        for answer in prompt.answers:
            try:
                prompt.sampling_params(answer)
            except RequestError as error:
                raise ConfigError(f"receipt: {_one_line(error)}") from None
    return receipt


def _one_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))

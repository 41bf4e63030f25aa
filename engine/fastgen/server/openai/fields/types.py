"""Types of request fields.

Each validator reports in one sentence what the field accepts, where pydantic's unions would list every alternative.
Numbers follow JSON: 1.0 is an integer, true is not. Token ids must be written without a decimal point.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, Strict

from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import MOST_LOGIT_BIASES

_MAX_STOP_STRINGS = 64
_MAX_STRING_LENGTH = 1024  # characters of a stop string or bad word
_MAX_LIST_LENGTH = 1024  # token ids or words; each generated token is compared with all of them
_MAX_NAMED = 16  # invalid values that an error message lists
_MAX_BUDGET = 1 << 20  # tokens of reasoning
_INT64_LIMIT = 1 << 63


def _integer(value: Any) -> Any:
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise ValueError("must be an integer")
    if not -_INT64_LIMIT <= value < _INT64_LIMIT:
        raise ValueError("must be a 64-bit integer")
    return value


def _number(value: Any) -> Any:
    if type(value) not in (int, float):
        raise ValueError("must be a number")
    with suppress(OverflowError):  # an int beyond the range of float
        if math.isfinite(value):
            return float(value)
    raise ValueError("must be a finite number")


def _string(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("must be a string")
    return value


def _top_k(value: int) -> int:
    """Map -1, vLLM's spelling of "off", to the engine's 0."""
    return 0 if value == -1 else value


def _seed(value: int) -> int | None:
    """Map OpenAI's negative seeds into the engine's range, and -1, vLLM's spelling of "random", to None."""
    return None if value == -1 else value & (_INT64_LIMIT - 1)


Integer = Annotated[int, BeforeValidator(_integer)]
Number = Annotated[float, BeforeValidator(_number)]
String = Annotated[str, BeforeValidator(_string)]
Boolean = Annotated[bool, Strict()]
TopK = Annotated[Integer, AfterValidator(_top_k)]
Seed = Annotated[Integer, AfterValidator(_seed)]


def _strings(value: Any, *, item: str, max_items: int) -> tuple[str, ...]:
    strings: Any = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(string, str) for string in strings):
        raise ValueError(f"must be a {item} or a list of them")
    if not all(strings):
        raise ValueError(f"contains an empty {item}; leave it out")
    noun = item.split()[-1]
    if len(strings) > max_items:
        raise ValueError(f"has {len(strings)} {noun}s; at most {max_items} are accepted")
    if any(len(string) > _MAX_STRING_LENGTH for string in strings):
        raise ValueError(f"contains a {noun} of more than {_MAX_STRING_LENGTH} characters; shorten it")
    return tuple(strings)


def _token_id_tuple(value: Any) -> tuple[int, ...]:
    tokens = [] if value is None else _token_ids(value)
    if len(tokens) > _MAX_LIST_LENGTH:
        raise ValueError(f"has {len(tokens)} tokens; at most {_MAX_LIST_LENGTH} are accepted")
    return tuple(_integer(token) for token in tokens)


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError("must be a list of token ids")
    return value


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("must map token ids to numbers")
    if len(value) > MOST_LOGIT_BIASES:
        raise ValueError(f"has {len(value)} tokens; at most {MOST_LOGIT_BIASES} are accepted")
    invalid = [repr(key[:40]) for key in value if not (key.isascii() and key.isdigit() and len(key) < 19)]
    if invalid:
        more = f" and {len(invalid) - _MAX_NAMED} more" if len(invalid) > _MAX_NAMED else ""
        raise ValueError(f"{', '.join(invalid[:_MAX_NAMED])}{more}: not a token id; use ids as keys")
    biases = {}
    for token, bias in value.items():
        try:
            biases[int(token)] = _number(bias)
        except ValueError as error:
            raise ValueError(f"the bias of token {token} {error}") from None
    return tuple(sorted(biases.items()))


def _prompts(value: Any) -> list[str | list[int]]:
    """Return one prompt or several, each a string or a list of token ids, as a list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in value):
            return value
    raise ValueError(
        "must be a string, a list of strings, a list of token ids, or a list of lists of token ids; no list may be "
        "empty"
    )


# Parts of the schemas in the OpenAPI document.
_TokenId = Annotated[int, Field(ge=0)]
_NotEmpty = Field(min_length=1)
_Strings = str | list[str] | None

Stops = Annotated[
    tuple[str, ...],
    PlainValidator(
        partial(_strings, item="stop string", max_items=_MAX_STOP_STRINGS),
        json_schema_input_type=_Strings,
    ),
]
BadWords = Annotated[
    tuple[str, ...],
    PlainValidator(partial(_strings, item="word", max_items=_MAX_LIST_LENGTH), json_schema_input_type=_Strings),
]
TokenIdTuple = Annotated[tuple[int, ...], PlainValidator(_token_id_tuple, json_schema_input_type=list[_TokenId] | None)]
TokenIds = Annotated[list[int], PlainValidator(_token_ids, json_schema_input_type=list[_TokenId])]
LogitBias = Annotated[
    tuple[tuple[int, float], ...], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float] | None)
]
_Prompts = (
    str
    | Annotated[list[str], _NotEmpty]
    | Annotated[list[_TokenId], _NotEmpty]
    | Annotated[list[Annotated[list[_TokenId], _NotEmpty]], _NotEmpty]
)
Prompts = Annotated[list[str | list[int]], PlainValidator(_prompts, json_schema_input_type=_Prompts)]


def one_of(*choices: str) -> PlainValidator:
    """Return a validator that accepts these strings and null."""
    listed = ", ".join(json.dumps(choice) for choice in choices)

    def check(value: Any) -> str | None:
        if value is None or (isinstance(value, str) and value in choices):
            return value
        raise ValueError(f"must be one of {listed}")

    return PlainValidator(check, json_schema_input_type=Literal[(*choices, None)])


def _truncation_limit(value: int) -> int:
    if value < -1 or value == 0:
        raise ValueError("must be at least 1, or -1 for the model's length")
    return value


def _thinking_budget(value: int) -> int | None:
    """Map -1, vLLM's spelling of "unlimited", to None."""
    if value < -1 or value > _MAX_BUDGET:
        raise ValueError(f"must be from 0 to {_MAX_BUDGET}, or -1 for no limit")
    return None if value == -1 else value


def _documents(value: Any) -> list[str]:
    """Return the texts of one document or several, each a string or an object with a `text`."""
    given = value if isinstance(value, list) else [value]
    texts: list[Any] = [item.get("text") if isinstance(item, dict) else item for item in given]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string, an object with a text, or a list of these that is not empty")
    return texts


Documents = Annotated[
    list[str], PlainValidator(_documents, json_schema_input_type=str | Annotated[list[str], _NotEmpty])
]
EncodingFormat = Annotated[str | None, one_of("float", "base64")]
ReasoningEffort = Annotated[str | None, one_of("none", "minimal", "low", "medium", "high", "xhigh", "max")]
ThinkingBudget = Annotated[Integer, AfterValidator(_thinking_budget)]
TruncationLimit = Annotated[Integer, AfterValidator(_truncation_limit)]
TruncationSide = Annotated[str | None, one_of("left", "right")]


def optional(*metadata: Any, description: str | None = None) -> Any:
    """Return a field that is null by default, with these validators and markers."""
    field: Any = Field(default=None, description=description)
    field.metadata = list(metadata)
    return field


def field_error(param: str, problem: str) -> RequestError:
    """Return the error for a field of the request; `problem` says what is wrong and what to do."""
    return RequestError(f"{param}: {problem}", param)

"""Types of the fields that clients send.

Each says in one sentence what it takes, whatever was sent: pydantic's own unions would name every form that a value
fails to have. JSON's numbers are taken as JSON means them: 1.0 is a whole number, true is none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, PlainValidator, Strict, WithJsonSchema

_MOST_STOPS = 64
_LONGEST_TEXT = 1024  # characters, of a stop string or a bad word
_MOST_LISTED = 1024  # of tokens and words that each generated token is compared with
_WORD_SIZE = 1 << 63


def _whole(value: Any) -> Any:
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise ValueError("must be a whole number")
    if not -_WORD_SIZE <= value < _WORD_SIZE:
        raise ValueError("must be a whole number of 64 bits")
    return value


def _number(value: Any) -> Any:
    if type(value) not in (int, float):
        raise ValueError("must be a number")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an int beyond every float
        finite = False
    if not finite:
        raise ValueError("must be a finite number")
    return float(value)


def _text(value: Any) -> Any:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


Whole = Annotated[int, BeforeValidator(_whole)]
Number = Annotated[float, BeforeValidator(_number)]
Text = Annotated[str, BeforeValidator(_text)]
Switch = Annotated[bool, Strict()]


def _texts(value: Any, what: str, most: int) -> tuple[str, ...]:
    texts: Any = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"must be a {what} or a list of them")
    if not all(texts):
        raise ValueError(f"holds an empty {what}; leave it out")
    noun = what.split()[-1]
    if len(texts) > most:
        raise ValueError(f"has {len(texts)} {noun}s; at most {most} are taken")
    if any(len(text) > _LONGEST_TEXT for text in texts):
        raise ValueError(f"holds a {noun} of more than {_LONGEST_TEXT} characters; shorten it")
    return tuple(texts)


def _stops(value: Any) -> tuple[str, ...]:
    return _texts(value, "stop string", _MOST_STOPS)


def _bad_words(value: Any) -> tuple[str, ...]:
    return _texts(value, "word", _MOST_LISTED)


def _token_list(value: Any) -> tuple[int, ...]:
    tokens = [] if value is None else _token_ids(value)
    if len(tokens) > _MOST_LISTED:
        raise ValueError(f"has {len(tokens)} tokens; at most {_MOST_LISTED} are taken")
    return tuple(_whole(token) for token in tokens)


def _token_ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise ValueError("must be a list of token ids")
    return value


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ValueError("must map token ids to numbers")
    biases = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit() and len(token) < 19):
            raise ValueError(f"{token[:40]!r} is no token id")
        try:
            biases[int(token)] = _number(bias)
        except ValueError as error:
            raise ValueError(f"the bias of token {token} {error}") from None
    return tuple(sorted(biases.items()))


def _prompts(value: Any) -> list[str | list[int]]:
    """A prompt in any of its four forms, as a list of texts and token lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and item and all(type(token) is int for token in item) for item in value):
            return value
    raise ValueError("give a text, a list of texts, a list of token ids, or a list of lists of token ids")


_A_TEXT, _A_TOKEN = {"type": "string"}, {"type": "integer", "minimum": 0}
_TEXT_OR_TEXTS = {"anyOf": [_A_TEXT, {"type": "array", "items": _A_TEXT}, {"type": "null"}]}

StopStrings = Annotated[tuple[str, ...], PlainValidator(_stops), WithJsonSchema(_TEXT_OR_TEXTS)]
BadWords = Annotated[tuple[str, ...], PlainValidator(_bad_words), WithJsonSchema(_TEXT_OR_TEXTS)]
TokenList = Annotated[
    tuple[int, ...],
    PlainValidator(_token_list),
    WithJsonSchema({"anyOf": [{"type": "array", "items": _A_TOKEN}, {"type": "null"}]}),
]
TokenIds = Annotated[list[int], PlainValidator(_token_ids), WithJsonSchema({"type": "array", "items": _A_TOKEN})]
Biases = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_biases),
    WithJsonSchema({"anyOf": [{"type": "object", "additionalProperties": {"type": "number"}}, {"type": "null"}]}),
]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _A_TEXT,
                {"type": "array", "items": _A_TEXT, "minItems": 1},
                {"type": "array", "items": _A_TOKEN, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": _A_TOKEN, "minItems": 1}, "minItems": 1},
            ]
        }
    ),
]


def only(*neutral: object) -> Callable[[Any], Any]:
    """A check that lets through None and the values that change nothing; the first of them is named as the remedy."""
    remedy = f"leave it out or set it to {json.dumps(neutral[0])}" if neutral else "leave it out"

    def check(value: Any) -> Any:
        if value is None or any(value == same and type(value) is type(same) for same in neutral):
            return value
        raise ValueError(f"this value is not served: {remedy}")

    return check


NotServed = Annotated[Any, AfterValidator(only())]
NoneOfThem = Annotated[Any, AfterValidator(only([], {}))]
FalseOnly = Annotated[Any, AfterValidator(only(False))]
NoCall = Annotated[Any, AfterValidator(only("none", "auto"))]
Empty = Annotated[Any, AfterValidator(only(""))]

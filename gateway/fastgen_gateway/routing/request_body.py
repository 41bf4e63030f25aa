"""Parse the body of a request for its routing, and change fields of it.

The picker reads the model, the size of the prompt and hashes of its prefixes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from fastgen_gateway.routing.client import GivenKey
from fastgen_gateway.routing.refusal import Refusal

# Bytes of a prompt that one hash stands for: about as many as the 64 tokens of an engine's KV block.
BLOCK_BYTES: Final = 256
# Hashes of one prompt: those of its first 128 KiB.
MOST_BLOCKS: Final = 512
# English text and JSON have about four bytes a token.
_BYTES_PER_TOKEN: Final = 4
# Maximum fields of a body that is changed: many more than any API has. The largest body has room for two million.
MOST_FIELDS: Final = 1000
_EMPTY: Final = msgspec.Raw(b"")


class _Fields(msgspec.Struct):
    """The fields that are read. All others are skipped, and no value is parsed but the model's name."""

    model: msgspec.Raw = _EMPTY
    tools: msgspec.Raw = _EMPTY
    instructions: msgspec.Raw = _EMPTY
    messages: msgspec.Raw = _EMPTY
    prompt: msgspec.Raw = _EMPTY
    input: msgspec.Raw = _EMPTY


class _ClientFields(msgspec.Struct):
    """The fields through which a client could affect other clients."""

    priority: msgspec.Raw = _EMPTY
    cache_salt: msgspec.Raw = _EMPTY


_FIELDS: Final = msgspec.json.Decoder(_Fields)
_NAME: Final = msgspec.json.Decoder(str)
_CLIENT_FIELDS: Final = msgspec.json.Decoder(_ClientFields)
_PRIORITY: Final = msgspec.json.Decoder(int | None)
_SALT: Final = msgspec.json.Decoder(str | None)
_INVALID: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class _Name(str):
    """Name of a field. The decoder calls its hook for each value of a type that it does not know."""

    __slots__ = ()


class _TooManyFieldsError(Exception):
    pass


@dataclass(frozen=True, slots=True)
class RequestBody:
    """A request's body.

    Attributes:
        model: the model's name, as the client wrote it.
        num_bytes: size of the body.
        prompt_tokens: estimated tokens of the prompt.
        blocks: for each full block of the prompt, the hash of the prompt up to its end.
    """

    model: str
    num_bytes: int
    prompt_tokens: int
    blocks: tuple[int, ...]

    @classmethod
    def parse(cls, body: bytes, salt: int = 0) -> RequestBody | Refusal:
        """Read a body, or return the error for one without a model. Nothing of the body is kept.

        Prefixes have the same hashes only with the same salt.
        """
        try:
            fields = _FIELDS.decode(body)
        except _INVALID as error:
            return _invalid_json(error)
        if not memoryview(fields.model):
            message = "the body has no model; set it to a name that GET /v1/models lists"
            return Refusal(400, "missing_model", message, param="model")
        try:
            model = _NAME.decode(fields.model)
        except _INVALID:
            return Refusal(400, "invalid_model", "model is not a string; set it to a model's name", param="model")
        # In the order in which they are rendered: agents repeat the tools and the messages so far.
        parts = (fields.tools, fields.instructions, fields.messages, fields.prompt, fields.input)
        return cls(
            model=model,
            num_bytes=len(body),
            prompt_tokens=sum(len(memoryview(part)) for part in parts) // _BYTES_PER_TOKEN + 1,
            blocks=prefix_hashes(parts, salt),
        )


def prefix_hashes(parts: tuple[msgspec.Raw, ...], salt: int = 0) -> tuple[int, ...]:
    """Return the hash of each prefix that ends with a full block; each is chained to the one before."""
    limit = MOST_BLOCKS * BLOCK_BYTES
    text = b"".join(bytes(memoryview(part)[:limit]) for part in parts)[:limit]
    hashes, parent = [], salt
    for end in range(BLOCK_BYTES, len(text) + 1, BLOCK_BYTES):
        parent = hash((parent, text[end - BLOCK_BYTES : end]))
        hashes.append(parent)
    return tuple(hashes)


def client_fields(body: bytes, key: GivenKey) -> dict[str, Any] | Refusal:
    """Return the fields of a body that its client may not choose freely, with the values for the engine.

    The priority is the client's, or the request's if that is served later. The salt keeps the cached prefixes of keys
    apart.
    """
    try:
        fields = _CLIENT_FIELDS.decode(body)
    except _INVALID as error:
        return _invalid_json(error)
    try:
        priority = _PRIORITY.decode(fields.priority) if memoryview(fields.priority) else None
    except _INVALID:
        return Refusal(400, "invalid_priority", "priority is not an integer; leave it out", param="priority")
    try:
        salt = _SALT.decode(fields.cache_salt) if memoryview(fields.cache_salt) else None
    except _INVALID:
        return Refusal(400, "invalid_cache_salt", "cache_salt is not a string; leave it out", param="cache_salt")
    own = key.client.priority
    return {"priority": own if priority is None else max(own, priority), "cache_salt": key.cache_salt(salt or "")}


def with_fields(body: bytes, changed: Mapping[str, Any]) -> bytes | Refusal:
    """Return a body with other values of some fields. The others keep their text; each name occurs once.

    Returns the error for a body with too many fields, which is not read to its end: an object for each of millions of
    fields takes twenty times the memory of the body. Also returns the error for a name that is not UTF-8, which
    `RequestBody.parse` skips.
    """
    number = itertools.count(1)

    def name(_: type, text: str) -> _Name:
        if next(number) > MOST_FIELDS:
            raise _TooManyFieldsError
        return _Name(text)

    try:
        fields: dict[str, Any] = msgspec.json.decode(body, type=dict[_Name, msgspec.Raw], dec_hook=name)
    except _TooManyFieldsError:
        message = f"the body has more than {MOST_FIELDS} fields; leave out those that the API does not have"
        return Refusal(400, "too_many_fields", message)
    except _INVALID as error:
        return _invalid_json(error)
    return msgspec.json.encode({**fields, **changed})


def _invalid_json(error: Exception) -> Refusal:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return Refusal(400, "invalid_json", f"the body is not a JSON object: {reason}")

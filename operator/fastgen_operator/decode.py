"""Decode JSON of the API server, whatever a tenant has put into it.

The API server accepts objects of 1.5 MB that are nested 10,000 levels deep. CPython's decoder raises RecursionError
after about 1,000 levels. What is nested deeper than `_DEPTH` levels is then cut out of the text before it is decoded.
No object that the operator can use has so many levels (`kube/compact.py`), so nothing that is cut is missed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final, TypeVar

import msgspec

from fastgen_operator.kinds import FASTGEN

# Levels that the decoder always manages, also deep in a call stack.
_DEPTH: Final = 200
# A string, or a bracket outside of strings.
_TOKEN: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)


# From this size on, the managedFields of a FastGenDeployment are cut out before it is decoded: they are never read, and
# each field manager can add as many as the spec has fields.
_LARGE: Final = 1 << 17


class _Metadata(msgspec.Struct):
    managed: msgspec.Raw = msgspec.field(name="managedFields", default=msgspec.Raw(b""))


class _Envelope(msgspec.Struct):
    """The part of an object that tells whether to cut it."""

    kind: str = ""
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class _Event(msgspec.Struct):
    """One line of a watch, with its object undecoded."""

    type: str
    object: msgspec.Raw


class _Page(msgspec.Struct):
    """One page of a list, with its items undecoded."""

    metadata: dict[str, Any]
    items: list[msgspec.Raw]


_Opened = TypeVar("_Opened", _Event, _Page)


def decode(data: bytes) -> Any:
    """Decode JSON. Values nested deeper than `_DEPTH` levels become null if the decoder cannot handle them.

    A large FastGenDeployment loses its managedFields.

    Raises:
        ValueError: the data is not JSON.
    """
    try:
        return json.loads(data if len(data) < _LARGE else _without_managed_fields(data))
    except RecursionError:
        return decode(_cut(data))


def decode_event(line: bytes) -> tuple[str, Any]:
    """Return the type and the object of one line of a watch.

    Raises:
        ValueError: the line is no event.
    """
    event = _opened(line, _Event)
    return event.type, decode(bytes(event.object))


def decode_page(data: bytes) -> tuple[dict[str, Any], Iterator[Any]]:
    """Return the metadata of a page of a list, and an iterator that decodes one item at a time.

    A decoded object takes up to thirty times the memory of its text, so only one at a time is in memory.

    Raises:
        ValueError: the data is no list.
    """
    page = _opened(data, _Page)
    return page.metadata, (decode(bytes(item)) for item in page.items)


def _opened(data: bytes, form: type[_Opened]) -> _Opened:
    """Decode the outer levels; the objects inside stay text. Raises ValueError."""
    try:
        return msgspec.json.decode(data, type=form)
    except RecursionError:
        return _opened(_cut(data), form)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def _without_managed_fields(data: bytes) -> bytes:
    """Return a large FastGenDeployment without its managedFields, and any other object unchanged."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except msgspec.MsgspecError:
        return data
    if envelope.kind != FASTGEN.name or not envelope.metadata.managed:
        return data
    return data.replace(bytes(envelope.metadata.managed), b"[]", 1)


def _cut(data: bytes) -> bytes:
    """Replace what is nested deeper than `_DEPTH` levels with null. Linear in the length, without recursion."""
    parts, depth, kept_from = [], 0, 0
    for token in _TOKEN.finditer(data):
        bracket = data[token.start()]
        if bracket in b"[{":
            depth += 1
            if depth == _DEPTH + 1:
                parts.append(data[kept_from : token.start()])
        elif bracket in b"]}":
            if depth == _DEPTH + 1:
                parts.append(b"null")
                kept_from = token.end()
            depth -= 1
    return b"".join([*parts, data[kept_from:]])

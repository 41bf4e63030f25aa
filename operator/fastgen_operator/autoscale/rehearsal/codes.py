"""Rates in two bytes each, and records of them as text for the status. Pure."""

from __future__ import annotations

import base64
import binascii
import math
import struct
import zlib
from array import array
from collections.abc import Iterable
from typing import Final

# An unknown rate has the code 0, a rate in tokens per second 1 + _SCALE ln(1 + rate). The error is at most 0.05 %.
_SCALE: Final = 1000.0
_MOST_CODE: Final = 65_535
_VERSION: Final = "1."
_HEADER: Final = struct.Struct("<q")


def encoded(rates: Iterable[float | None]) -> bytes:
    """Return the codes of rates in forward tokens per second; None is unknown."""
    return b"".join(struct.pack("<H", 0 if rate is None else _code(rate)) for rate in rates)


def decoded(codes: bytes) -> list[float | None]:
    """Return the rates of codes, in forward tokens per second; None where unknown."""
    return [None if code == 0 else math.expm1((code - 1) / _SCALE) for code in array("H", codes)]


def to_text(number: int, codes: bytes) -> str:
    """Return codes as text, with the number of the period that follows them."""
    return _VERSION + base64.b64encode(zlib.compress(_HEADER.pack(number) + codes, 9)).decode()


def from_text(text: str, most: int) -> tuple[int, bytes]:
    """Return the number and the codes of `to_text`, decompressing at most `most` codes.

    Raises:
        ValueError: the text is not of this version, or damaged.
    """
    if not text.startswith(_VERSION):
        raise ValueError("arrivals of another version")
    most_bytes = _HEADER.size + 2 * most
    try:
        unpack = zlib.decompressobj()
        data = unpack.decompress(base64.b64decode(text.removeprefix(_VERSION), validate=True), most_bytes + 1)
    except (binascii.Error, zlib.error) as error:
        raise ValueError(f"damaged arrivals: {error}") from error
    if not unpack.eof or len(data) < _HEADER.size or len(data) > most_bytes or len(data) % 2:
        raise ValueError("damaged arrivals: wrong length")
    (number,) = _HEADER.unpack_from(data)
    if number <= 0:
        raise ValueError("damaged arrivals: wrong time")
    return number, data[_HEADER.size :]


def _code(rate: float) -> int:
    return 1 + round(min(_MOST_CODE - 1, _SCALE * math.log1p(rate)))

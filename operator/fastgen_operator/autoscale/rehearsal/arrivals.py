"""The arrivals of the last hours, in bounded memory. Pure.

Time is divided into slots of `SLOT_SECONDS`. A slot without a measurement is unknown, which is not the same as without
arrivals: a gap in the scrapes, a fleet without a ready replica and a restart of the operator say nothing about the
load.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
import zlib
from array import array
from dataclasses import dataclass, replace
from typing import Final

SLOT_SECONDS: Final = 15
# Six hours.
SLOTS: Final = 1440
# Two bytes a slot: 0 is unknown, 1 + _SCALE ln(1 + tokens per second) otherwise, so that a rate is kept to 0.05 %.
_SCALE: Final = 1000.0
_MOST_CODE: Final = 65_535
# Of the text in the status. It is decompressed to at most this many bytes.
_VERSION: Final = "1."
_HEADER: Final = struct.Struct("<q")
_MOST_BYTES: Final = _HEADER.size + 2 * SLOTS


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival rates by slot, the newest last.

    Attributes:
        slot: number of the slot in progress, since 1970; 0 before the first measurement.
        codes: the completed slots before it, two bytes each.
        total, count: sum and number of the rates measured in the slot in progress.
    """

    slot: int = 0
    codes: bytes = b""
    total: float = 0.0
    count: int = 0

    def add(self, time: float, rate: float | None) -> Arrivals:
        """Return the arrivals after a scrape.

        Args:
            time: seconds since 1970. If it is before the slot in progress, the clock was set back, or that of an
                earlier leader was ahead: that slot is still in progress, but at this time.
            rate: arriving forward tokens per second since the scrape before; None if unknown.
        """
        slot = int(time // SLOT_SECONDS)
        after = self._begin(slot) if slot > self.slot else replace(self, slot=slot)
        if rate is None or not math.isfinite(rate) or rate < 0:
            return after
        return replace(after, total=after.total + rate, count=after.count + 1)

    def _begin(self, slot: int) -> Arrivals:
        """Complete the slot in progress and begin another one; slots between them are unknown."""
        if not self.slot:
            return Arrivals(slot)
        code = _code(self.total / self.count) if self.count else 0
        unknown = bytes(2 * min(SLOTS, slot - self.slot - 1))
        return Arrivals(slot, (self.codes + struct.pack("<H", code) + unknown)[-2 * SLOTS :])

    def rates(self) -> list[float | None]:
        """Return the rates of the completed slots, in forward tokens per second; None where unknown."""
        codes = array("H", self.codes)
        return [None if code == 0 else math.expm1((code - 1) / _SCALE) for code in codes]

    def encode(self) -> str:
        """Return the completed slots as text, for the status."""
        packed = zlib.compress(_HEADER.pack(self.slot) + self.codes, 9)
        return _VERSION + base64.b64encode(packed).decode()

    @classmethod
    def decode(cls, text: str) -> Arrivals:
        """Return the arrivals of `encode`; raise ValueError if the text is not of this version, or damaged."""
        if not text.startswith(_VERSION):
            raise ValueError("arrivals of another version")
        try:
            unpack = zlib.decompressobj()
            data = unpack.decompress(base64.b64decode(text.removeprefix(_VERSION), validate=True), _MOST_BYTES + 1)
        except (binascii.Error, zlib.error) as error:
            raise ValueError(f"damaged arrivals: {error}") from error
        if not unpack.eof or len(data) < _HEADER.size or len(data) > _MOST_BYTES or len(data) % 2:
            raise ValueError("damaged arrivals: wrong length")
        (slot,) = _HEADER.unpack_from(data)
        if slot <= 0:
            raise ValueError("damaged arrivals: wrong time")
        return cls(slot, data[_HEADER.size :])


def _code(rate: float) -> int:
    return min(_MOST_CODE, 1 + round(_SCALE * math.log1p(rate)))

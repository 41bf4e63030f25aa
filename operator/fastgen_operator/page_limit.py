"""How many objects of a list to request at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

# Bytes of a page of a list. An object has at most 1.5 MB.
PAGE_BYTES: Final = 8 << 20
# Pages grow until they take these seconds, far less than the time after which a request fails.
_PAGE_SECONDS: Final = 5.0
_MOST_OBJECTS, _FIRST_OBJECTS = 500, 20


@dataclass(slots=True)
class PageLimit:
    """Keeps the pages of a list small: `objects`, the maximum for the next page, follows their bytes and their time."""

    objects: int = _FIRST_OBJECTS

    def follow(self, num_bytes: int, seconds: float) -> None:
        """Choose the limit after a page: the next one should have half of `PAGE_BYTES`, and take `_PAGE_SECONDS`.

        A page that took longer, but arrived, makes no smaller ones: a busy server may take as long for a single object.
        """
        by_time = max(1.0, _PAGE_SECONDS / max(1e-3, seconds))
        growth = min(4.0, PAGE_BYTES / (2 * max(1, num_bytes)), by_time)
        self.objects = max(1, min(_MOST_OBJECTS, math.ceil(self.objects * growth)))

    def too_large(self) -> None:
        """Choose a lower limit after a page of more bytes. Raises ValueError if it was a single object."""
        if self.objects == 1:
            raise ValueError(f"one object is larger than {PAGE_BYTES >> 20} MiB")
        self.too_slow()

    def too_slow(self) -> None:
        """Choose a lower limit after a page that did not arrive in time."""
        self.objects = max(1, self.objects // 4)

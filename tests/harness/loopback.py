"""Addresses of this machine for servers that all listen on the same port, as pods do."""

from __future__ import annotations

import itertools
import random

_NUM_ADDRESSES = 1 << 22  # 127.64.0.0/10
_FIRST = random.randrange(_NUM_ADDRESSES)  # other runs of the tests begin elsewhere


def _address(number: int) -> str:
    return f"127.{64 + (number >> 16) % 64}.{number >> 8 & 255}.{number & 255}"


LOOPBACK = (_address(number) for number in itertools.count(_FIRST))

"""A limit on the memory of request bodies in transit."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Final

from fastgen_gateway.routing.refusal import Refusal, bodies_full

# Smaller bodies are not counted: requests with short prompts are never refused because of large ones.
_SMALL_BYTES: Final = 64 << 10
# The largest body that Envoy accepts (`envoy.yaml`), and the size of one of unknown length.
LARGEST_BYTES: Final = 17 << 20
_LENGTH: Final = re.compile("[0-9]{1,8}")


@dataclass(frozen=True, slots=True)
class Incoming:
    """A body in transit. Its bytes are 0 if it is small. Without keys, the client is empty."""

    num_bytes: int
    client: str


class IncomingBodies:
    """Counts the bytes of bodies from their headers until the picker has read them.

    A client takes no more of the limit than it leaves for others.

    Args:
        most_bytes: maximum bytes of all counted bodies.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._clients = Counter[str]()

    @property
    def num_bytes(self) -> int:
        """The bytes of all counted bodies."""
        return self._clients.total()

    def begin(self, content_length: str | None, client: str = "") -> Incoming | Refusal:
        """Count a body that is about to arrive, or return the error for one beyond the limit. Call `end` for it.

        Args:
            content_length: the header; None for a body of unknown length.
            client: name of the client; empty without keys, for which all clients are one.
        """
        known = int(content_length) if content_length and _LENGTH.fullmatch(content_length) else LARGEST_BYTES
        body = Incoming(0 if known <= _SMALL_BYTES else min(known, LARGEST_BYTES), client)
        if body.num_bytes:
            left = self._most - self.num_bytes - body.num_bytes
            if left < (self._clients[client] if client else 0):
                return bodies_full(self._most)
            self._clients[client] += body.num_bytes
        return body

    def end(self, body: Incoming) -> None:
        """Count the end of a body."""
        self._clients[body.client] -= body.num_bytes
        if not self._clients[body.client]:
            del self._clients[body.client]

"""Many clients that each wait for a response on a connection of its own."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any

from support.waiting import PATIENCE


class HeldClients:
    """Sends requests at once, in a thread, and collects the responses.

    Args:
        port: of the gateway.
        number: of requests.
        body: of each.
        header: one more line of their heads.

    Attributes:
        statuses: number of responses by HTTP status; 0 for a connection that was closed without one.
    """

    def __init__(self, port: int, number: int, body: Mapping[str, Any], header: str = "Accept: */*") -> None:
        self.statuses: Counter[int] = Counter()
        self.bodies: list[bytes] = []
        self._port, self._body, self._header = port, json.dumps(body).encode(), header
        self._thread = threading.Thread(target=lambda: asyncio.run(self._send_all(number)), daemon=True)
        self._thread.start()

    @property
    def num_ended(self) -> int:
        return sum(self.statuses.values())

    def wait(self, seconds: float = 60) -> Counter[int]:
        """Return the statuses once all requests have ended, within `PATIENCE * seconds`."""
        self._thread.join(PATIENCE * seconds)
        assert not self._thread.is_alive(), f"requests wait: {self.statuses} ended"
        return self.statuses

    async def _send_all(self, number: int) -> None:
        await asyncio.gather(*(self._send() for _ in range(number)))

    async def _send(self) -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: g\r\nConnection: close\r\n{self._header}\r\n"
            writer.write(f"{head}Content-Length: {len(self._body)}\r\n\r\n".encode() + self._body)
            answer = await reader.read()
            writer.close()
        except OSError:
            answer = b""
        head_bytes, _, body = answer.partition(b"\r\n\r\n")
        self.bodies.append(body)
        self.statuses[int(head_bytes.split()[1]) if head_bytes else 0] += 1

"""The clients of the engine process: its API processes.

Tracks which requests each client has, and whether it watches steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from fastgen.engine.messages import StepReport, TokenOutput


class Clients:
    """Divides reports among the clients of one engine.

    Args:
        num_clients: how many there are; they are numbered from 0.

    Attributes:
        present: numbers of the clients that have not gone.
    """

    def __init__(self, num_clients: int) -> None:
        self.present = list(range(num_clients))
        self._is_one = num_clients == 1  # then all requests are its own, and none is recorded
        self._watching: set[int] = set()
        self._owner: dict[str, int] = {}  # client by request

    @property
    def is_watched(self) -> bool:
        """Return whether a client watches."""
        return bool(self._watching)

    def open(self, request_id: str, client: int) -> None:
        """Record that a client has started a request."""
        if not self._is_one:
            self._owner[request_id] = client

    def close(self, request_id: str) -> None:
        """Forget a request, if it is known."""
        self._owner.pop(request_id, None)

    def watch(self, client: int, *, on: bool) -> None:
        """Record whether a client watches."""
        (self._watching.add if on else self._watching.discard)(client)

    def leave(self, client: int) -> list[str]:
        """Record that a client has gone; return its requests."""
        self.present.remove(client)
        self._watching.discard(client)
        requests = [request_id for request_id, owner in self._owner.items() if owner == client]
        for request_id in requests:
            self.close(request_id)
        return requests

    def split(self, report: StepReport) -> Iterator[tuple[int, StepReport]]:
        """Yield what each client gets of a report: its own outputs, and the trace if it watches."""
        if self._is_one:
            yield 0, report
            return
        outputs: dict[int, list[TokenOutput]] = {client: [] for client in self.present}
        for output in report.outputs:
            owner = self._owner.get(output.request_id)
            if owner is None:  # its client has gone or cancelled it
                continue
            if output.finish_reason is not None:
                self.close(output.request_id)
            outputs[owner].append(output)
        for client, own in outputs.items():
            trace = report.trace if client in self._watching else None
            yield client, msgspec.structs.replace(report, outputs=own, trace=trace)

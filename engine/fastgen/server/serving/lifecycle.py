"""The server's state: loading, serving, draining, or without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from fastgen.link.shared_counts import Count, Counts
from fastgen.server.http.api_error import DRAINING, APIError
from fastgen.server.serving.served_model import ServedModel

_LOADING_RETRY_SECONDS = 2
# Another replica can take the request at once.
_OTHER_REPLICA_RETRY_SECONDS = 1


class Lifecycle:
    """Tracks whether requests are accepted and how many are open.

    Args:
        counts: the shared counts, as this API process sees them; None if it is the only one.

    Attributes:
        num_open: number of open requests of this process.
    """

    def __init__(self, counts: Counts | None = None) -> None:
        self._counts = counts or Counts.of_only_process()
        self._stage = "starting"
        self._fraction = 0.0
        self._model: ServedModel | None = None
        self._draining = False
        self.num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def set_loading_progress(self, stage: str, fraction: float) -> None:
        """Record the loading stage and its completed fraction, 0 to 1."""
        self._stage, self._fraction = stage, fraction

    def begin_serving(self, model: ServedModel) -> None:
        """Accept requests from now on."""
        self._model = model
        self._counts.set(Count.SERVING, 1)

    @property
    def total_open(self) -> int:
        """Number of open requests of all API processes."""
        return self._counts.total(Count.OPEN)

    def begin_draining(self) -> None:
        """Reject requests on new connections from now on; open requests continue."""
        self._draining = True

    def check_connection(self, *, kept: bool) -> None:
        """Check that requests of a connection are accepted; `kept` if it was made before the drain.

        A client learns of the drain from the next response on a kept connection, so the request for that is served.

        Raises:
            APIError: 503 on a new connection while the server drains.
        """
        if self._draining and not kept:
            message = "the server is draining and accepts no requests on new connections; send the request again"
            raise APIError(503, message, code=DRAINING, retry_after=_OTHER_REPLICA_RETRY_SECONDS)

    def why_not_healthy(self) -> str | None:
        """Return why the process is unhealthy; None while the engine is alive or loading."""
        if self._model is not None and not self._model.engine.alive:
            return f"the engine is dead: {self._model.engine.exit_message}"
        return None

    def why_not_ready(self) -> str | None:
        """Return why the server is not ready for requests on new connections; None if it is."""
        if self._draining:
            return "draining"
        rejection = self._rejection()
        if rejection is not None:
            return rejection.message
        num_serving, num_processes = self._counts.total(Count.SERVING), self._counts.shared.num_processes
        return None if num_serving == num_processes else f"{num_serving} of {num_processes} API processes are ready"

    def model(self) -> ServedModel:
        """Return the served model.

        Raises:
            APIError: 503 if it cannot serve a request now.
        """
        rejection = self._rejection()
        if rejection is not None:
            raise rejection
        assert self._model is not None
        return self._model

    @contextmanager
    def open_request(self) -> Iterator[None]:
        """Count a request as open inside the `with` block."""
        self.num_open += 1
        self._counts.set(Count.OPEN, self.num_open)
        self._idle.clear()
        try:
            yield
        finally:
            self.num_open -= 1
            self._counts.set(Count.OPEN, self.num_open)
            if self.num_open == 0:
                self._idle.set()

    async def wait_idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    def _rejection(self) -> APIError | None:
        if self._model is None:
            message = f"{self._stage} {self._fraction:.0%}".replace("%", " %")
            return APIError(503, message, code="loading", retry_after=_LOADING_RETRY_SECONDS)
        dead, late = self.why_not_healthy(), self._model.engine.why_late
        if dead is not None:
            return APIError(503, dead, code="engine_dead")
        if late is not None:
            return APIError(503, late, code="engine_late", retry_after=_OTHER_REPLICA_RETRY_SECONDS)
        return None

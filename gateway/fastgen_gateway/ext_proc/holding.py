"""The tasks of held requests: each waits until the router releases its request."""

from __future__ import annotations

import asyncio
from typing import Final

from fastgen_gateway.routing.held_requests import Held
from fastgen_gateway.routing.refusal import Refusal
from fastgen_gateway.routing.router import Choice, Router

# Between looks for room, while requests are held.
_SECONDS: Final = 0.05

Outcome = Choice | Refusal


class Holding:
    """Releases held requests when replicas have room."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._outcomes: dict[Held, asyncio.Future[Outcome]] = {}
        self._some = asyncio.Event()

    def outcome(self, held: Held) -> asyncio.Future[Outcome]:
        """Return what will become of a held request. Call `abandon` unless it is awaited to its end."""
        self._outcomes[held] = asyncio.get_running_loop().create_future()
        self._some.set()
        return self._outcomes[held]

    def abandon(self, held: Held) -> None:
        """End the wait for a request whose client is gone."""
        self._router.abandon(held)
        outcome = self._outcomes.pop(held, None)
        if outcome is not None:
            outcome.cancel()

    def release(self) -> None:
        """Release the requests for which replicas have room now, and those that cannot be answered any more."""
        # A displaced request waits for its error although it is no longer held.
        if self._router.held.total.requests or self._router.held.displaced:
            for held, outcome in self._router.release():
                waiting = self._outcomes.pop(held, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(outcome)
                elif isinstance(outcome, Choice):
                    self._router.end(outcome)
        if not self._router.held.total.requests:
            self._some.clear()

    async def run(self) -> None:
        """Release requests until cancelled."""
        while True:
            await self._some.wait()
            self.release()
            await asyncio.sleep(_SECONDS)

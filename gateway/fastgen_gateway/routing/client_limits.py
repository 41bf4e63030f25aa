"""Limits of clients in tokens per minute and concurrent requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from fastgen_gateway.routing.client import Client
from fastgen_gateway.routing.refusal import Refusal

_MINUTE: Final = 60.0
# Bound of a client's debt, in minutes, whatever usage engines report.
_MOST_DEBT_MINUTES: Final = 10


@dataclass(slots=True)
class _Account:
    """What a client has left.

    Attributes:
        client: its limits.
        tokens: those that it may use at `time`; negative for a debt. They refill up to those of a minute.
        time: of the last change.
        requests: those that wait or run.
    """

    client: Client
    tokens: float
    time: float
    requests: int = 0


class ClientLimits:
    """Counts the requests and tokens of clients. Not thread-safe.

    A request is charged the estimated tokens of its prompt when it is admitted, but no more than its client has. When
    it has ended, `correct` charges the rest or refunds the excess. So the concurrent requests of a client may put it
    into debt, and its next request is admitted when the debt is paid.

    Args:
        clock: monotonic time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def set_clients(self, clients: Iterable[Client]) -> None:
        """Replace the clients and their limits. Those that stay keep what they have used."""
        now = self._clock()
        self._accounts = {client.name: self._account(client, now) for client in clients}

    def admit(self, client: Client, tokens: int) -> int | Refusal:
        """Count a request whose prompt has about `tokens`, or return the error for one beyond the limits.

        A prompt with more tokens than those of a minute is admitted once the client has all of these, and is charged no
        more: since the debt is bounded, a larger charge could be refunded without ever having been paid. Call `end` for
        a counted request.

        Returns:
            The tokens that it was charged.
        """
        account = self._accounts.get(client.name)
        if account is None:
            return 0
        most = client.concurrent_requests
        if most is not None and account.requests >= most:
            return _too_many_requests(client.name, most)
        taken = 0
        if client.tokens_per_minute is not None:
            self._refill(account, self._clock())
            taken = min(tokens, client.tokens_per_minute)
            missing = taken - account.tokens
            if missing > 0:
                seconds = max(1, math.ceil(missing / client.tokens_per_minute * _MINUTE))
                return _too_many_tokens(client.name, client.tokens_per_minute, seconds)
            account.tokens -= taken
        account.requests += 1
        return taken

    def end(self, client: Client) -> None:
        """Count the end of a request."""
        if (account := self._accounts.get(client.name)) is not None:
            account.requests = max(0, account.requests - 1)

    def correct(self, name: str, tokens: int) -> None:
        """Charge tokens that a client has used beyond the charge of a request; negative to refund them."""
        account = self._accounts.get(name)
        if account is None or (limit := account.client.tokens_per_minute) is None:
            return
        self._refill(account, self._clock())
        account.tokens = max(-float(limit) * _MOST_DEBT_MINUTES, min(float(limit), account.tokens - tokens))

    def num_requests(self) -> dict[str, int]:
        """Return the requests that wait or run, by the name of the client."""
        return {name: account.requests for name, account in self._accounts.items()}

    def _account(self, client: Client, now: float) -> _Account:
        tokens, before = float(client.tokens_per_minute or 0), self._accounts.get(client.name)
        if before is not None and before.client.tokens_per_minute is not None:
            self._refill(before, now)
            tokens = min(tokens, before.tokens)
        return _Account(client, tokens, now, 0 if before is None else before.requests)

    @staticmethod
    def _refill(account: _Account, now: float) -> None:
        limit = float(account.client.tokens_per_minute or 0)
        account.tokens = min(limit, account.tokens + (now - account.time) / _MINUTE * limit)
        account.time = now


def _too_many_requests(name: str, most: int) -> Refusal:
    message = f"{name} has {most} concurrent requests, its limit; wait until one has ended"
    return Refusal(429, "concurrent_requests_exceeded", message, retry_after=1)


def _too_many_tokens(name: str, limit: int, seconds: int) -> Refusal:
    message = f"{name} has used its limit of {limit} tokens per minute; try again in {seconds} s"
    return Refusal(429, "tokens_per_minute_exceeded", message, retry_after=seconds)

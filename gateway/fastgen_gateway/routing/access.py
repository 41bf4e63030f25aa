"""Access to the gateway: the API keys and limits of clients, and the keys that engines get."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fastgen_gateway.routing.client import ClientTable, GivenKey
from fastgen_gateway.routing.client_limits import ClientLimits
from fastgen_gateway.routing.refusal import Refusal, invalid_key
from fastgen_operator.kinds import Key


@dataclass(frozen=True, slots=True)
class Clients:
    """The clients, and the keys that engines get, by NAMESPACE.NAME of a deployment or by NAMESPACE."""

    table: ClientTable
    engine_keys: Mapping[str, str]


class Access:
    """Identifies clients. Until `set_clients` is called, requests need no key, and engines get the clients' keys.

    Args:
        clock: monotonic time in seconds.

    Attributes:
        limits: counts what clients use.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.limits = ClientLimits(clock)
        self._clients: Clients | None = None

    def set_clients(self, clients: Clients) -> None:
        """Replace the clients. Admitted requests continue."""
        self._clients = clients
        self.limits.set_clients(clients.table.clients.values())

    def identify(self, authorization: str | None) -> GivenKey | Refusal | None:
        """Return the key in an Authorization header, or the error for one that is not valid; None if none is needed."""
        if self._clients is None:
            return None
        return self._clients.table.identify(authorization or "") or invalid_key(authorization)

    def engine_key(self, deployment: Key) -> str | None:
        """Return the key that a deployment's engines get; None if they need none."""
        keys = {} if self._clients is None else self._clients.engine_keys
        return keys.get(".".join(deployment), keys.get(deployment[0]))

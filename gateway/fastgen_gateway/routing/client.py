"""Clients: programs with API keys at the gateway, and what each may use."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

_SCHEME = "bearer"


@dataclass(frozen=True, slots=True)
class Client:
    """A program that has API keys.

    Attributes:
        name: what logs and metrics call it.
        tokens_per_minute: limit of its prompts and outputs; None for none.
        concurrent_requests: limit of the requests that wait or run; None for none.
        priority: of its requests, lower is served first. A request may ask for a lower precedence only.
        namespaces: those whose models it may use; None for all.
    """

    name: str
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    priority: int = 0
    namespaces: frozenset[str] | None = None

    def may_use(self, namespace: str) -> bool:
        """Return whether it may use the models of a namespace."""
        return self.namespaces is None or namespace in self.namespaces


@dataclass(frozen=True, slots=True)
class GivenKey:
    """A valid API key of a request: its client, and its digest."""

    client: Client
    digest: bytes

    @property
    def salt(self) -> int:
        """The salt of this key's prefix hashes in the picker's index: keys share no prefixes."""
        return int.from_bytes(self.digest[:8])

    def cache_salt(self, given: str) -> str:
        """Return the salt under which an engine caches the prefixes of this key's requests.

        Engines get the gateway's key instead of this one, so they cannot separate the clients themselves. The salt
        cannot be computed without the key.

        Args:
            given: the salt in the request; empty for none.
        """
        return hmac.new(self.digest, given.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


class ClientTable:
    """The clients by the digests of their API keys.

    Raises:
        ValueError: two clients have the same key.
    """

    def __init__(self, keys: Iterable[tuple[str, Client]]) -> None:
        self._owners: dict[bytes, Client] = {}
        for key, client in keys:
            owner = self._owners.setdefault(_digest(key), client)
            if owner.name != client.name:
                raise ValueError(f"the clients {owner.name} and {client.name} have the same key; give each its own")
        self.clients = {client.name: client for client in self._owners.values()}

    def __len__(self) -> int:
        return len(self._owners)

    def identify(self, authorization: str) -> GivenKey | None:
        """Return the key in the value of an Authorization header; None if it is not valid.

        Takes constant time: digests of equal length are compared, always with all keys.
        """
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        found = [client for known, client in self._owners.items() if hmac.compare_digest(given, known)]
        return GivenKey(found[0], given) if found and scheme.lower() == _SCHEME else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()

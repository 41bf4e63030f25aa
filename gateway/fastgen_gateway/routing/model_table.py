"""Which FastGenDeployment answers for a model's name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from fastgen_gateway.routing.client import Client
from fastgen_operator.kinds import Key

# Lists of names that are kept: one for each set of namespaces that clients may use.
_MOST_LISTS: Final = 64


@dataclass(frozen=True, slots=True)
class Exposed:
    """A FastGenDeployment that the gateway serves.

    Attributes:
        model: the name under which its replicas serve their model.
        created: its creation time in RFC 3339, as the API server writes it: these texts sort by time.
        canary_percent: share of the requests for the canary's replicas; 0 for none.
    """

    namespace: str
    name: str
    model: str
    created: str
    canary_percent: int = 0

    @property
    def key(self) -> Key:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def address(self) -> str:
        """The name that only this deployment has: NAMESPACE/NAME."""
        return f"{self.namespace}/{self.name}"


class ModelTable:
    """Exposed deployments by the names that clients use.

    NAMESPACE/NAME always means the deployment of that name. Of several with the same model, the oldest one that the
    client may use answers for the model's name.
    """

    def __init__(self, deployments: Iterable[Exposed] = ()) -> None:
        by_age = sorted(deployments, key=lambda each: (each.created, each.key))
        self._by_address = {each.address: each for each in by_age}
        # The oldest one of each model, with its rank by age: of all namespaces, and of each.
        self._oldest: dict[str, Exposed] = {}
        self._oldest_of: dict[tuple[str, str], tuple[int, Exposed]] = {}
        for rank, each in enumerate(by_age):
            self._oldest.setdefault(each.model, each)
            self._oldest_of.setdefault((each.namespace, each.model), (rank, each))
        self._names: dict[frozenset[str] | None, Mapping[str, Exposed]] = {}

    def find(self, model: str, client: Client | None = None) -> Exposed | None:
        """Return the deployment for the name in a request; None if there is none, or none that the client may use.

        Args:
            model: the name.
            client: whose request it is; None if it needs no key.
        """
        named = self._by_address.get(model)
        if named is not None and _may_use(client, named):
            return named
        if client is None or client.namespaces is None:
            return self._oldest.get(model)
        found = (self._oldest_of.get((namespace, model)) for namespace in client.namespaces)
        return min((each for each in found if each is not None), default=(0, None), key=itemgetter(0))[1]

    def names(self, client: Client | None = None) -> Mapping[str, Exposed]:
        """Return a name for each deployment that the client may use: its model's, or else NAMESPACE/NAME. Sorted."""
        namespaces = None if client is None else client.namespaces
        known = self._names.get(namespaces)
        if known is None:
            if len(self._names) >= _MOST_LISTS:
                self._names.clear()
            known = self._names[namespaces] = dict(sorted(self._named(client), key=itemgetter(0)))
        return known

    def _named(self, client: Client | None) -> Iterator[tuple[str, Exposed]]:
        for exposed in self._by_address.values():
            if _may_use(client, exposed):
                yield (exposed.model if self.find(exposed.model, client) is exposed else exposed.address), exposed


def _may_use(client: Client | None, exposed: Exposed) -> bool:
    return client is None or client.may_use(exposed.namespace)

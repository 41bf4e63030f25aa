"""Which FastGenDeployment answers for a model's name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fastgen_gateway.routing.client import Client
from fastgen_operator.kinds import Key


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
        self._by_model = defaultdict[str, list[Exposed]](list)
        for each in by_age:
            self._by_model[each.model].append(each)

    def find(self, model: str, client: Client | None = None) -> Exposed | None:
        """Return the deployment for the name in a request; None if there is none, or none that the client may use.

        Args:
            model: the name.
            client: whose request it is; None if it needs no key.
        """
        named = self._by_address.get(model)
        if named is not None and _may_use(client, named):
            return named
        return next((each for each in self._by_model.get(model, ()) if _may_use(client, each)), None)

    def names(self, client: Client | None = None) -> Mapping[str, Exposed]:
        """Return a name for each deployment that the client may use: its model's, or else NAMESPACE/NAME."""
        return dict(self._named(client))

    def _named(self, client: Client | None) -> Iterator[tuple[str, Exposed]]:
        for exposed in self._by_address.values():
            if _may_use(client, exposed):
                yield (exposed.model if self.find(exposed.model, client) is exposed else exposed.address), exposed


def _may_use(client: Client | None, exposed: Exposed) -> bool:
    return client is None or client.may_use(exposed.namespace)

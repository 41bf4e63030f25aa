"""Keeps the router's deployments and endpoints as the API server has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Final

from fastgen_gateway.cluster.api_server import ApiServer
from fastgen_gateway.cluster.objects import ENDPOINT_SLICE, Endpoints, endpoints, exposed
from fastgen_gateway.cluster.reflector import Reflector
from fastgen_gateway.routing.model_table import Exposed
from fastgen_gateway.routing.router import Router
from fastgen_operator.kinds import FASTGEN, Key
from fastgen_operator.labels_and_annotations import OWNER_LABEL

# Updates of the router take at most this share of the time: with thousands of deployments, one takes long.
_SHARE: Final = 0.1


class ClusterView:
    """Watches FastGenDeployments and the EndpointSlices of their Services.

    Args:
        server: the API server.
        namespaces: those to watch; empty for all.
        router: takes what is read.
        changed: called after each change.
        failed: called with the kind after each failed list or watch.

    Attributes:
        listed: set once all first lists were read.
    """

    def __init__(
        self,
        server: ApiServer,
        namespaces: Sequence[str],
        router: Router,
        changed: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        self._router = router
        self._notify = changed
        self.listed = asyncio.Event()
        scopes = namespaces or (None,)
        self._deployments = [
            Reflector(server, FASTGEN, scope, None, exposed, self._changed, failed) for scope in scopes
        ]
        # The label of a Service is also on its slices.
        self._slices = [
            Reflector(server, ENDPOINT_SLICE, scope, OWNER_LABEL, endpoints, self._changed, failed) for scope in scopes
        ]
        self._reflectors: list[Reflector[Exposed] | Reflector[Endpoints]] = [*self._deployments, *self._slices]
        self._update_due: asyncio.TimerHandle | None = None
        self._next_update = 0.0

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for reflector in self._reflectors:
                group.create_task(reflector.run())

    def _changed(self) -> None:
        """Update the router soon: once for all changes that have arrived, at once unless the last update took long."""
        if self.listed.is_set():
            if self._update_due is None:
                delay = max(0.0, self._next_update - time.monotonic())
                self._update_due = asyncio.get_running_loop().call_later(delay, self._update)
        elif all(reflector.is_listed for reflector in self._reflectors):
            self._update()
            self.listed.set()

    def _update(self) -> None:
        began = time.monotonic()
        self._update_due = None
        deployments: list[Exposed] = [each for reflector in self._deployments for each in reflector.values()]
        slices: list[Endpoints] = [each for reflector in self._slices for each in reflector.values()]
        self._router.set_deployments(deployments)
        stable: dict[Key, dict[str, str]] = {each.key: {} for each in deployments}
        canary: dict[Key, dict[str, str]] = {each.key: {} for each in deployments}
        for each in slices:
            pods = canary if each.is_canary else stable
            if each.deployment in pods:
                # A pod with addresses of both families is in two slices. The order of slices changes, so take the lower
                # address: of a pod whose address changes, the router would forget load and prefixes.
                known = pods[each.deployment]
                for pod, address in each.addresses.items():
                    known[pod] = min(address, known.get(pod, address))
        names = {address: name for each in slices for address, name in each.pods.items()}
        for key, addresses in stable.items():
            self._router.set_endpoints(key, addresses.values(), names, canary[key].values())
        ended = time.monotonic()
        self._next_update = ended + (ended - began) * (1 / _SHARE - 1)
        self._notify()

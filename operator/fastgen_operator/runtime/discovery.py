"""Discovers what the cluster has: optional kinds, whose CRDs come and go, and the pods of the gateway."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import ENDPOINT_SLICE, INFERENCE_POOL, OPTIONAL_KINDS, POD, Kind
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.sources import Sources
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.objects.pod import Pod

logger = logging.getLogger(__name__)

# The label of the gateway's pods.
GATEWAY_SELECTOR: Final = "app.kubernetes.io/name=fastgen-gateway"


def gateway_pods(client: KubeClient, namespace: str) -> dict[str, str]:
    """Return the addresses of the gateway's pods by name. Pods that are being deleted may still hold requests.

    Raises:
        KubeError: the API server failed.
    """
    pods = _pods_of_gateway(client, namespace)
    return {pod.name: pod.address for pod in pods if pod.address is not None and not pod.has_ended}


def ready_pickers(client: KubeClient, namespace: str) -> tuple[str, ...]:
    """Return the addresses of the gateway's pods that are ready and stay, all of one family; sorted.

    Raises:
        KubeError: the API server failed.
    """
    pods = (pod for pod in _pods_of_gateway(client, namespace) if pod.is_ready and not pod.is_terminating)
    addresses = sorted(pod.address for pod in pods if pod.address is not None)
    return tuple(each for each in addresses if (":" in each) == (":" in addresses[0]))


def _pods_of_gateway(client: KubeClient, namespace: str) -> list[Pod]:
    _, items = client.list(POD, namespace, GATEWAY_SELECTOR)
    return [Pod(item) for item in items]


class Discovery:
    """The platform with the optional kinds that were discovered last, read from several threads.

    Args:
        platform: the part that is known without a request.
        sources: tells which kinds cannot be read now. An optional one is left alone meanwhile: its children are neither
            written nor deleted.
        gateway_namespace: namespace of the gateway's pods; None if there is no gateway.
    """

    def __init__(
        self, client: KubeClient, platform: Platform, sources: Sources, gateway_namespace: str | None = None
    ) -> None:
        self._client = client
        self._platform = platform
        self._sources = sources
        self._gateway_namespace = gateway_namespace
        self._pickers: tuple[str, ...] | None = None
        self._by_kinds: dict[tuple[frozenset[Kind], tuple[str, ...] | None], Platform] = {}

    def kinds(self) -> frozenset[Kind]:
        """Return the optional kinds as of the last `refresh`."""
        return self._platform.optional_kinds

    def listed_kinds(self) -> tuple[Kind, ...]:
        """Return the kinds that are listed, not watched: the optional ones, and EndpointSlices if there are pools."""
        return (*self.kinds(), *((ENDPOINT_SLICE,) if self._platform.can_have_pools else ()))

    def platform(self, namespace: str) -> Platform:
        """Return the platform of a namespace, with the optional kinds that can be read there.

        They are those that the last `refresh` found; none before the first one.
        """
        usable = frozenset(kind for kind in self.kinds() if not self._sources.fails(kind, namespace))
        pickers = self._pickers
        # The same object for the same kinds: settled resources compare it by identity.
        platform = replace(self._platform, optional_kinds=usable, pickers=pickers)
        return self._by_kinds.setdefault((usable, pickers), platform)

    def refresh(self) -> bool:
        """Discover the optional kinds; return whether they changed. A kind that cannot be looked up stays as it was."""
        before = self.kinds()
        found = frozenset(kind for kind in OPTIONAL_KINDS if self._exists(kind))
        if found == before:
            return False
        names = ", ".join(sorted(kind.name for kind in found))
        logger.info("optional kinds that the cluster serves: %s", names or "none")
        self._platform = replace(self._platform, optional_kinds=found)
        self._sources.forget(tuple(before - found))
        return True

    def refresh_pickers(self) -> bool:
        """Look for the pods of the gateway that can serve InferencePools; return whether they changed.

        If they cannot be listed, they stay as they were.
        """
        found = None
        if self._gateway_namespace is not None and self._platform.makes(INFERENCE_POOL):
            try:
                found = ready_pickers(self._client, self._gateway_namespace)
            except KubeError as error:
                logger.debug("listing the pods of the gateway: %s", error)
                return False
        if found == self._pickers:
            return False
        logger.info("pods of the gateway that serve InferencePools: %s", ", ".join(found or ()) or "none")
        self._pickers, self._by_kinds = found, {}
        return True

    def _exists(self, kind: Kind) -> bool:
        try:
            return kind.plural in self._client.plurals(kind.group, kind.version)
        except KubeError as error:
            logger.debug("looking up %s: %s", kind.plural, error)
            return kind in self.kinds()

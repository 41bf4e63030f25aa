"""Discovers what the cluster has: optional kinds, whose CRDs come and go, and the pods of the gateway."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Final

from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import OPTIONAL_KINDS, POD, Kind
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
    _, items = client.list(POD, namespace, GATEWAY_SELECTOR)
    pods = [Pod(item) for item in items]
    return {pod.name: pod.address for pod in pods if pod.address is not None and not pod.has_ended}


class Discovery:
    """The platform with the optional kinds that were discovered last, read from several threads.

    Args:
        platform: the part that is known without a request.
        sources: tells which kinds cannot be read now. An optional one is left alone meanwhile: its children are neither
            written nor deleted.
    """

    def __init__(self, client: KubeClient, platform: Platform, sources: Sources) -> None:
        self._client = client
        self._platform = platform
        self._sources = sources
        self._by_kinds: dict[frozenset[Kind], Platform] = {}

    def kinds(self) -> frozenset[Kind]:
        """Return the optional kinds as of the last `refresh`."""
        return self._platform.optional_kinds

    def platform(self, namespace: str) -> Platform:
        """Return the platform of a namespace, with the optional kinds that can be read there.

        They are those that the last `refresh` found; none before the first one.
        """
        usable = frozenset(kind for kind in self.kinds() if not self._sources.fails(kind, namespace))
        # The same object for the same kinds: settled resources compare it by identity.
        return self._by_kinds.setdefault(usable, replace(self._platform, optional_kinds=usable))

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

    def _exists(self, kind: Kind) -> bool:
        try:
            return kind.plural in self._client.plurals(kind.group, kind.version)
        except KubeError as error:
            logger.debug("looking up %s: %s", kind.plural, error)
            return kind in self.kinds()

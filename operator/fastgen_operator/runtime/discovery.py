"""Discovers which optional kinds the cluster serves: their CRDs can be installed or removed at any time."""

from __future__ import annotations

import logging
from dataclasses import replace

from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import OPTIONAL_KINDS, Kind
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError

logger = logging.getLogger(__name__)


class Discovery:
    """The platform with the optional kinds that were discovered last, read from several threads.

    Args:
        platform: the part that is known without a request.
    """

    def __init__(self, client: KubeClient, platform: Platform) -> None:
        self._client = client
        self._platform = platform

    def platform(self) -> Platform:
        """Return the platform as of the last `refresh`; without optional kinds before the first."""
        return self._platform

    def refresh(self) -> bool:
        """Discover the optional kinds; return whether they changed.

        Raises:
            KubeError: the API server failed; the platform stays as it was.
        """
        found = frozenset(kind for kind in OPTIONAL_KINDS if self._exists(kind))
        if found == self._platform.optional_kinds:
            return False
        names = ", ".join(sorted(kind.name for kind in found))
        logger.info("optional kinds that the cluster serves: %s", names or "none")
        self._platform = replace(self._platform, optional_kinds=found)
        return True

    def _exists(self, kind: Kind) -> bool:
        try:
            return kind.plural in self._client.plurals(kind.group, kind.version)
        except KubeError as error:
            raise KubeError(error.status, f"looking up {kind.plural}: {error}", error.retry_after) from error

"""Which optional kinds the cluster has now: their CRDs are installed and removed without a word to the operator."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Protocol

from fastgen_operator.children import Platform
from fastgen_operator.kinds import OPTIONAL_KINDS, Kind
from fastgen_operator.kube.transport import KubeError

logger = logging.getLogger(__name__)


class Catalogue(Protocol):
    """Knows what the API server serves."""

    def plurals(self, group: str, version: str) -> frozenset[str]:
        """The resources of that group and version; none where the cluster does not have it."""
        ...


class Discovery:
    """The platform as last looked up; read from several threads, refreshed from one.

    `platform` is what is known without asking the cluster.
    """

    def __init__(self, catalogue: Catalogue, platform: Platform) -> None:
        self._catalogue = catalogue
        self._platform = platform

    def platform(self) -> Platform:
        """The platform as of the last `refresh`; without optional kinds before the first."""
        return self._platform

    def refresh(self) -> bool:
        """Looks up the optional kinds; returns whether there are others than before.

        Raises:
            KubeError: the API server failed; what was known stays known.
        """
        found = frozenset(kind for kind in OPTIONAL_KINDS if self._exists(kind))
        if found == self._platform.optional_kinds:
            return False
        logger.info("optional kinds that the cluster has: %s", ", ".join(sorted(kind.name for kind in found)) or "none")
        self._platform = replace(self._platform, optional_kinds=found)
        return True

    def _exists(self, kind: Kind) -> bool:
        try:
            return kind.plural in self._catalogue.plurals(kind.group, kind.version)
        except KubeError as error:
            raise KubeError(error.status, f"looking up {kind.plural}: {error}", error.retry_after) from error

"""Lists all objects anew, to correct the informer cache and to check the watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from fastgen_operator.kinds import FASTGEN, OWNER_LABEL, Key, Kind, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.kube.watch_health import Watches, uid_of
from fastgen_operator.objects import version_of


@dataclass(frozen=True, slots=True)
class Relister:
    """Lists everything that the operator reads.

    Attributes:
        kinds: returns the kinds to list now, in addition to FastGenDeployments.
        scopes: the namespaces to list; (None,) for all.
    """

    client: KubeClient
    cache: InformerCache
    watches: Watches
    kinds: Callable[[], Iterable[Kind]]
    scopes: Sequence[str | None]
    # Found by a relist that failed later: its next lists find the cache corrected.
    _changed: set[Key] = field(default_factory=set)

    def relist(self) -> set[Key]:
        """List everything; return the resources for which the cache was wrong.

        Raises:
            KubeError: a list failed; the message names the kind. The next complete relist returns what this one found.
        """
        for kind in (FASTGEN, *self.kinds()):
            for namespace in self.scopes:
                versions: dict[str, int] = {}
                try:
                    version, objects = self.client.list(kind, namespace, "" if kind == FASTGEN else OWNER_LABEL)
                    found = self.cache.replace(kind, namespace, _record_versions(versions, objects), version)
                except KubeError as error:
                    raise KubeError(error.status, f"listing {kind.plural}: {error}", error.retry_after) from error
                self._changed.update(found)
                self.watches.listed(kind, namespace, versions)
        changed = set(self._changed)
        self._changed.clear()
        return changed


def _record_versions(versions: dict[str, int], objects: Iterable[Object]) -> Iterator[Object]:
    """Yield the objects; store the version of each in `versions`, by uid."""
    for obj in objects:
        versions[uid_of(obj)] = version_of(obj)
        yield obj

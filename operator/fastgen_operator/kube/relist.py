"""Lists all objects anew, to correct the informer cache and to check the watches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from fastgen_operator.kinds import FASTGEN, Key, Kind, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.sources import Source, Sources, describe
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.kube.watch_health import Watches, uid_of
from fastgen_operator.labels_and_annotations import listed_labels
from fastgen_operator.objects.stored import version_of

# Seconds before the first retry of a failed list, and the maximum; the backoff doubles in between.
_FIRST, _LONGEST = 1.0, 60.0
_MOST_DOUBLINGS: Final = 10


@dataclass(frozen=True, slots=True)
class Relister:
    """Lists the kinds of the informer cache, each kind and namespace on its own.

    Attributes:
        kinds: returns the kinds to list now, in addition to FastGenDeployments.
        scopes: the namespaces to list; (None,) for all.
        interval: seconds between two lists of the same objects.
        clock: monotonic seconds.
    """

    client: KubeClient
    cache: InformerCache
    watches: Watches
    sources: Sources
    kinds: Callable[[], Iterable[Kind]]
    scopes: Sequence[str | None]
    interval: float = 300.0
    clock: Callable[[], float] = time.monotonic
    _due: dict[Source, float] = field(default_factory=dict)
    _failures: dict[Source, int] = field(default_factory=dict)

    def relist(self) -> set[Key]:
        """List what is due; return the resources for which the cache was wrong.

        A list that fails is retried after a backoff.

        Raises:
            KubeError: nothing can be listed.
        """
        changed: set[Key] = set()
        failure: KubeError | None = None
        kinds = (FASTGEN, *self.kinds())
        # A copy: the lists of opening watches add sources from other threads.
        for source in tuple(self._due):
            if source[0] not in kinds:
                # Its CRD was removed. If it returns, it is listed at once.
                self._due.pop(source, None)
        for kind in kinds:
            for scope in self.scopes:
                if self._due.get((kind, scope), 0.0) > self.clock():
                    continue
                try:
                    changed |= self.list((kind, scope))[1]
                except KubeError as error:
                    failure = failure or error
        if failure is not None and self.sources.all_fail():
            raise failure
        return changed

    def list(self, source: Source, *, opens_watch: bool = False) -> tuple[str, set[Key]]:
        """List one kind in one namespace; return the list's version, and the resources for which the cache was wrong.

        Args:
            opens_watch: a watch reports the changes from this version on.

        Raises:
            KubeError: the list failed; the message names the kind.
        """
        kind, scope = source
        versions: dict[str, int] = {}
        try:
            version, objects = self.client.list(kind, scope, listed_labels(kind))
            changed = self.cache.replace(kind, scope, _record_versions(versions, objects), version)
        except Exception as failure:
            # Whatever is wrong with this list, the others go on.
            error = failure if isinstance(failure, KubeError) else KubeError(0, f"{type(failure).__name__}: {failure}")
            self.sources.failed(source, "list", str(error))
            failures = self._failures[source] = self._failures.get(source, 0) + 1
            backoff = min(_LONGEST, _FIRST * 2 ** min(failures - 1, _MOST_DOUBLINGS))
            self._due[source] = self.clock() + max(error.retry_after, min(self.interval, backoff))
            words = f"listing {describe(source)}: {error}"
            raise KubeError(error.status, words, error.retry_after, is_status=error.is_status) from failure
        self._failures.pop(source, None)
        self._due[source] = self.clock() + self.interval
        self.sources.succeeded(source, "list")
        if opens_watch:
            self.watches.opened(kind, scope, versions)
        else:
            self.watches.listed(kind, scope, versions)
        return version, changed


def _record_versions(versions: dict[str, int], objects: Iterable[Object]) -> Iterator[Object]:
    """Yield the objects; store the version of each in `versions`, by uid."""
    for obj in objects:
        versions[uid_of(obj)] = version_of(obj)
        yield obj

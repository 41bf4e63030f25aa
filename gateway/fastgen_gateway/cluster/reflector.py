"""Keep what matters of the objects of one kind up to date, by list and watch."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable
from typing import Final, Generic, TypeVar

import aiohttp

from fastgen_gateway.cluster.api_server import ApiError, ApiServer
from fastgen_operator.kinds import Key, Kind, Object

_FIRST_DELAY, _LONGEST_DELAY = 0.25, 15.0
# A watch that lasted this long resets the delay.
_LASTING: Final = 30.0
_UNUSABLE: Final = (ApiError, aiohttp.ClientError, OSError, TimeoutError, ValueError)
_FAULTY: Final = (LookupError, TypeError, ValueError, AttributeError)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Reflector(Generic[T]):
    """The objects of one kind in one namespace, or in all. What was read stays while the API server is away.

    Args:
        server: the API server.
        kind: what to read.
        namespace: None for all namespaces.
        selector: label selector; None for all objects.
        parse: returns what matters of an object, or None if it does not matter. It raises LookupError, TypeError,
            ValueError or AttributeError for a faulty object: it is logged, and what was known of it stays.
        changed: called after each change.
        failed: called after each failed list or watch.

    Attributes:
        is_listed: whether the first list was read.
    """

    def __init__(
        self,
        server: ApiServer,
        kind: Kind,
        namespace: str | None,
        selector: str | None,
        parse: Callable[[Object], T | None],
        changed: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        self._server, self._kind, self._selector = server, kind, selector
        self._path = kind.path(namespace)
        self._parse, self._changed, self._failed = parse, changed, failed
        self._objects: dict[Key, T] = {}
        self.is_listed = False

    def values(self) -> Collection[T]:
        """Return what matters of all objects."""
        return self._objects.values()

    async def run(self) -> None:
        """List and watch until cancelled. Failures are repeated after a pause, which grows up to 15 s."""
        version, delay = None, _FIRST_DELAY
        while True:
            began = time.monotonic()
            try:
                if version is None:
                    version = await self._list()
                async for kind_of_event, changed in self._server.watch(self._path, self._selector, version):
                    version = changed["metadata"]["resourceVersion"]
                    delay = _FIRST_DELAY
                    if kind_of_event != "BOOKMARK":
                        self._apply(kind_of_event, changed)
                await asyncio.sleep(_FIRST_DELAY)  # the API server ended it, after a minute or at once
            except (*_UNUSABLE, *_FAULTY) as error:
                self._failed(self._kind.name)
                if isinstance(error, ApiError) and error.is_expired:
                    version = None
                logger.warning("cannot read %s: %s: %s", self._path, type(error).__name__, error)
                if time.monotonic() - began > _LASTING:
                    delay = _FIRST_DELAY
                await asyncio.sleep(delay * random.uniform(0.5, 1.0))
                delay = min(_LONGEST_DELAY, 2 * delay)

    async def _list(self) -> str:
        version, listed = "", dict[Key, T]()
        async for found, objects in self._server.pages(self._path, self._selector):
            # Decoding a page takes long: requests are served meanwhile.
            listed |= await asyncio.to_thread(self._read_all, objects)
            version = found
        self._objects = listed
        self.is_listed = True
        self._changed()
        return version

    def _read_all(self, objects: Iterable[Object]) -> dict[Key, T]:
        read = map(self._read, objects)
        return {key: value for key, value in read if key is not None and value is not None}

    def _apply(self, event: str, changed: Object) -> None:
        key, value = self._read(changed)
        if key is None:
            return
        before = self._objects.pop(key, None)
        if value is not None and event != "DELETED":
            self._objects[key] = value
        # Most changes are of a status, which does not matter here.
        if self._objects.get(key) != before:
            self._changed()

    def _read(self, found: Object) -> tuple[Key | None, T | None]:
        """Return the key of an object and what matters of it; what was known of it if it is faulty."""
        try:
            key = found["metadata"]["namespace"], found["metadata"]["name"]
        except _FAULTY as error:
            logger.warning("ignored an object in %s: %s: %s", self._path, type(error).__name__, error)
            return None, None
        try:
            return key, self._parse(found)
        except _FAULTY as error:
            logger.warning("cannot read %s %s/%s: %s: %s", self._kind.name, *key, type(error).__name__, error)
            return key, self._objects.get(key)

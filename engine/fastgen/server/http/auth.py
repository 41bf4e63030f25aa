"""API keys: who may use the API. Keys are never logged, and never an argument of a process."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from fastgen.api_client.api_keys import keys_of_environment, keys_of_file
from fastgen.config import ConfigError
from fastgen.server.http.errors import APIError

log = logging.getLogger("fastgen.server")

# What the kubelet and Prometheus ask for, who have no key.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
# How stale the keys of a file may be. The kubelet itself takes longer to bring a changed secret to a pod.
_LOOK_SECONDS = 1.0


class KeyRing:
    """The keys that are valid now: of a file, which is read again when it changes, and of the environment.

    Raises:
        ConfigError: when a file is given that cannot be read or holds no key.
    """

    def __init__(
        self, path: str | None, environment: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = None if path is None else Path(path)
        self._clock = clock
        self._looked = clock()
        self._version: tuple[int, ...] | None = None
        self._of_environment = _digests(keys_of_environment(environment))
        self._of_file: tuple[bytes, ...] = ()
        if self._path is not None:
            try:
                self._of_file = self._read(self._path)
            except (OSError, ValueError) as error:
                raise ConfigError(f"--api-key-file {path}: {_words(error)}; give a file with one key a line") from None

    def __bool__(self) -> bool:
        """Are keys asked for at all?"""
        return self._path is not None or bool(self._of_environment)

    def allows(self, authorization: str) -> bool:
        """Whether the value of an Authorization header holds a valid key.

        The time it takes tells nothing of how much of a key is right, nor which one: digests of one length are
        compared, and all of them.
        """
        self._look()
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in (*self._of_file, *self._of_environment)]
        return any(matches) and scheme.lower() == "bearer"

    def _look(self) -> None:
        """Reads the file again where it has changed; one that has become unusable leaves the keys as they were."""
        now = self._clock()
        if self._path is None or now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        try:
            if _version(self._path) != self._version:
                self._of_file = self._read(self._path)
                log.info("read the API keys again: %d in the file", len(self._of_file))
        except (OSError, ValueError) as error:
            log.warning("--api-key-file: %s; the keys stay as they were", _words(error))

    def _read(self, path: Path) -> tuple[bytes, ...]:
        version = _version(path)
        digests = _digests(keys_of_file(path))
        if not digests:
            raise ValueError("holds no key")
        self._version = version
        return digests


class KeyCheck:
    """Lets a request through that has a valid key, or asks for what needs none; answers others with 401."""

    def __init__(self, app: ASGIApp, keys: KeyRing, refused: Callable[[APIError], object]) -> None:
        self._app = app
        self._keys = keys
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers it."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            authorization = Headers(scope=scope).get("authorization", "")
            if not self._keys.allows(authorization):
                wrong = "this API key is not valid" if authorization else "no API key: send Authorization: Bearer KEY"
                error = APIError(401, wrong, code="invalid_api_key")
                self._refused(error)
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _version(path: Path) -> tuple[int, ...]:
    # A Kubernetes secret is swapped by a link: another inode.
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(map(_digest, keys))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _words(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)

"""API key authentication. Keys are never logged and never passed as command-line arguments."""

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
from fastgen.server.http.api_error import APIError
from fastgen.server.http.request_context import current
from fastgen.settings import ConfigError

log = logging.getLogger("fastgen.server")

# The kubelet and Prometheus have no key.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
# Interval between checks of the key file. The kubelet takes longer to update a changed secret in a pod.
_RELOAD_SECONDS = 1.0


class KeyRing:
    """Valid API keys, from a file and from the environment. The file is read again when it changes.

    Raises:
        ConfigError: if the file cannot be read or contains no key.
    """

    def __init__(self, path: str | None, environment: Mapping[str, str]) -> None:
        self._path = None if path is None else Path(path)
        self._checked_at = time.monotonic()
        self._file_version: tuple[int, ...] | None = None
        self._environment_digests = _digests(keys_of_environment(environment))
        self._file_digests: tuple[bytes, ...] = ()
        if self._path is not None:
            try:
                self._file_digests = self._read(self._path)
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"--api-key-file {path}: {_reason(error)}; give a file with one key per line"
                ) from None

    def __bool__(self) -> bool:
        """Return whether requests need a key."""
        return self._path is not None or bool(self._environment_digests)

    def identify(self, authorization: str) -> str | None:
        """Return the digest of the valid key in the value of an Authorization header; None if it has none.

        Takes constant time: digests of equal length are compared, always with all keys.
        """
        self._reload()
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, known) for known in (*self._file_digests, *self._environment_digests)]
        return given.hex() if any(matches) and scheme.lower() == "bearer" else None

    def _reload(self) -> None:
        """Read the file again if it has changed; look at most once per second. Keep the old keys if it is unusable."""
        now = time.monotonic()
        if self._path is None or now - self._checked_at < _RELOAD_SECONDS:
            return
        self._checked_at = now
        try:
            if _version_of(self._path) != self._file_version:
                self._file_digests = self._read(self._path)
                log.info("reloaded the API keys: %d in the file", len(self._file_digests))
        except (OSError, ValueError) as error:
            log.warning("--api-key-file: %s; keeping the previous keys", _reason(error))

    def _read(self, path: Path) -> tuple[bytes, ...]:
        version = _version_of(path)
        digests = _digests(keys_of_file(path))
        if not digests:
            raise ValueError("contains no key")
        self._file_version = version
        return digests


class KeyCheck:
    """Middleware that rejects requests without a valid key with 401, except for paths that need none."""

    def __init__(
        self, app: ASGIApp, keys: KeyRing, on_rejection: Callable[[APIError], object], open_paths: frozenset[str]
    ) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = open_paths
        self._on_rejection = on_rejection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            authorization = Headers(scope=scope).get("authorization", "")
            current().key_digest = self._keys.identify(authorization)
            if current().key_digest is None:
                message = (
                    f"{'the API key is not valid' if authorization else 'no API key'}: send Authorization: Bearer KEY"
                )
                error = APIError(401, message, code="invalid_api_key")
                self._on_rejection(error)
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _version_of(path: Path) -> tuple[int, ...]:
    # Kubernetes updates a mounted secret by replacing a symbolic link, which changes the inode.
    status = path.stat()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(map(_digest, keys))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)

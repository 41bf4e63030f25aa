"""API keys and limits of clients, and the keys for engines, from files that change while the picker runs.

The kubelet mounts Secrets as folders with a file for each entry, and replaces them when the Secret changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec

from fastgen.api_client.api_keys import keys_of_file
from fastgen_gateway.routing.access import Clients
from fastgen_gateway.routing.client import Client, ClientTable

# Interval between checks of the files. The kubelet takes longer to update a changed Secret in a pod.
_SECONDS: Final = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientPaths:
    """Where keys and limits are.

    Attributes:
        keys: folder with a file for each client, named after it, with one API key per line.
        limits: JSON file with limits; None for none.
        engine_keys: folder with a file for each namespace (NAMESPACE) or deployment (NAMESPACE.NAME), with the key for
            its engines; None for none.
    """

    keys: Path
    limits: Path | None = None
    engine_keys: Path | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths that are set."""
        return tuple(path for path in (self.keys, self.limits, self.engine_keys) if path is not None)


class _Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Limits in the file. Absent fields take the defaults; 0 and an empty list mean no limit."""

    tokens_per_minute: Annotated[int, msgspec.Meta(ge=0)] | None = None
    concurrent_requests: Annotated[int, msgspec.Meta(ge=0)] | None = None
    # The range of an engine's priorities.
    priority: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    namespaces: list[str] | None = None


class _LimitsFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    defaults: _Limits = _Limits()
    clients: dict[str, _Limits] = {}

    def client(self, name: str) -> Client:
        own, default = self.clients.get(name, _Limits()), self.defaults

        def limit(field: str) -> Any:
            value = getattr(own, field)
            return getattr(default, field) if value is None else value

        return Client(
            name,
            limit("tokens_per_minute") or None,
            limit("concurrent_requests") or None,
            limit("priority") or 0,
            frozenset(limit("namespaces") or ()) or None,
        )


def read_clients(paths: ClientPaths) -> Clients:
    """Read all files.

    Raises:
        OSError, ValueError: one cannot be read, or is not valid; the message names it.
    """
    limits = _LimitsFile() if paths.limits is None else _limits(paths.limits)
    keys = [(key, limits.client(file.name)) for file in _entries(paths.keys) for key in _keys(file)]
    engine_keys = {} if paths.engine_keys is None else {file.name: _keys(file) for file in _entries(paths.engine_keys)}
    # A new key is added below the old one while engines do not know it yet.
    return Clients(ClientTable(keys), {name: found[0] for name, found in engine_keys.items() if found})


async def follow_clients(paths: ClientPaths, changed: Callable[[Clients], None]) -> None:
    """Read the files whenever they change, and call `changed`, until cancelled. Invalid files change nothing.

    An error is logged once. Invalid files are read again when they change, unreadable ones at every check.
    """
    version: object = None
    fault = ""
    while True:
        await asyncio.sleep(_SECONDS)
        try:
            found = _version(paths)
            if found == version:
                continue
            # A change during the read is seen at the next check.
            version = found
            clients = read_clients(paths)
        except (OSError, ValueError) as error:
            if str(error) != fault:
                logger.warning("cannot read the API keys: %s; keeping the previous ones", error)
            fault = str(error)
            if isinstance(error, OSError):
                version = None
            continue
        fault = ""
        changed(clients)
        logger.info("read %d API keys of %d clients", len(clients.table), len(clients.table.clients))


def _entries(folder: Path) -> list[Path]:
    """Return the files of the entries of a mounted Secret. The kubelet's own names begin with a dot."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _keys(file: Path) -> list[str]:
    try:
        return keys_of_file(file)
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from None


def _limits(file: Path) -> _LimitsFile:
    try:
        return msgspec.json.decode(file.read_bytes(), type=_LimitsFile)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file.name}: {error}") from None


def _version(paths: ClientPaths) -> object:
    """Return a value that changes with the files: the kubelet replaces a symbolic link, which changes the inodes."""
    files = [file for path in paths.paths for file in (_entries(path) if path.is_dir() else [path])]
    status = [file.stat() for file in files]
    return files, [(each.st_ino, each.st_mtime_ns, each.st_size) for each in status]

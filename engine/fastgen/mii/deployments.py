"""Registry of named servers on this machine: one file per server, in a private folder of the user."""

from __future__ import annotations

import fcntl
import json
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class DeploymentError(Exception):
    """A deployment cannot be found, started or used; the message has the remedy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One server process.

    Attributes:
        name: name of the deployment.
        url: base URL; empty until the server process has been started.
        pid: id of the server process; before that, of the process that starts it.
        began: start time of that process in ticks since boot. It detects a reused process id.
        drain_seconds: time that running requests get to finish after SIGTERM.
        log: path of the log file.
    """

    name: str
    url: str
    pid: int
    began: int
    drain_seconds: int
    log: str

    @property
    def alive(self) -> bool:
        """Return whether the process is running."""
        return process_began(self.pid) == self.began


def runtime_folder() -> Path:
    """Return the folder of the deployment files, which only this user can access; create it if missing.

    Raises:
        DeploymentError: the folder belongs to another user, or others can access it.
    """
    given = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(given) / "fastgen" if given else Path(tempfile.gettempdir()) / f"fastgen-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise DeploymentError(
            f"{folder}: others can access this folder: remove it, or set XDG_RUNTIME_DIR to a private folder"
        )
    return folder


def find(name: str) -> Deployment:
    """Return the deployment of this name, running or not.

    Raises:
        DeploymentError: no deployment has this name, the name is invalid, its file cannot be read, or as
            `runtime_folder`.
    """
    try:
        return Deployment(**json.loads(_file(name).read_text()))
    except FileNotFoundError:
        known = sorted(path.stem for path in runtime_folder().glob("*.json"))
        there = f"there are {', '.join(known)}" if known else "there is none on this machine"
        raise DeploymentError(f"deployment {name!r} is not known: {there}; start it with fastgen.serve") from None
    except (ValueError, TypeError):
        raise DeploymentError(f"{_file(name)}: cannot be read: remove it and start the deployment again") from None


def reserve(name: str) -> None:
    """Reserve a name for a deployment that this process starts; that of an ended deployment is free.

    Raises:
        DeploymentError: the name is in use or invalid, its file cannot be read, or as `runtime_folder`.
    """
    pid = os.getpid()
    began = process_began(pid)
    assert began is not None, "this process runs"
    with (runtime_folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # held until closed: two programs must not both find the name free
        if _file(name).exists() and (held := find(name)).alive:
            where = f"at {held.url} (process {held.pid})" if held.url else f"being started by process {held.pid}"
            raise DeploymentError(
                f'deployment {name!r} is in use, {where}: connect to it with fastgen.client("{name}"), end it with its '
                "terminate_server(), or choose another deployment_name"
            )
        note(Deployment(name=name, url="", pid=pid, began=began, drain_seconds=0, log=str(log_file(name))))


def note(deployment: Deployment) -> None:
    """Replace the record of this name atomically."""
    path = _file(deployment.name)
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps(asdict(deployment), indent=1))
    draft.replace(path)


def forget(name: str) -> None:
    """Release the name."""
    _file(name).unlink(missing_ok=True)


def log_file(name: str) -> Path:
    """Return the log file of this deployment."""
    return runtime_folder() / f"{name}.log"


def process_began(pid: int) -> int | None:
    """Return a process's start time in ticks since boot; None if it has ended or is a zombie."""
    try:
        # The command name in brackets may contain anything; the numbers follow the last bracket.
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if words[0] in "ZX" else int(words[19])


def _file(name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise DeploymentError(
            f"deployment name {name!r}: use at most 63 letters, digits, dots, dashes and underscores, with a letter or "
            "digit first"
        )
    return runtime_folder() / f"{name}.json"

"""Background programs, recorded in a folder so that a later run can find and stop them."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster.waiting import wait_for

# A larger heap between garbage collections takes a fifth of the processor time off the operator's tests. The limit
# bounds it: without one, an API server took 12 GB after the tests with the largest resources.
ENVIRONMENT = {"GOGC": "400", "GOMEMLIMIT": "4GiB"}


class Processes:
    """The background programs of one state folder.

    `FOLDER/pids/NAME` contains a process id, `FOLDER/logs/NAME.log` the output. An id is valid only while the process's
    command line names the folder: the kernel may have reused the id, and a zombie has an empty command line. So every
    program started here must name the folder in an argument.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def log(self, name: str) -> Path:
        """Return the log file of a program."""
        return self.folder / "logs" / f"{name}.log"

    def names(self) -> list[str]:
        """Return the names of all programs that were started and not stopped, running or not."""
        pids = self.folder / "pids"
        return sorted(path.name for path in pids.iterdir()) if pids.is_dir() else []

    def start(self, name: str, argv: Sequence[str | Path]) -> None:
        """Start a program in its own session, unless it runs.

        Raises ValueError if no argument names the folder, OSError if the program does not exist.
        """
        if self.pid(name) is not None:
            return
        words = [str(word) for word in argv]
        if not any(str(self.folder) in word for word in words):
            raise ValueError(f"{name}: no argument names {self.folder}, so it could not be told from another program")
        for folder in ("pids", "logs"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self.folder,
                env=os.environ | ENVIRONMENT,
            )
        self._children[name] = child
        (self.folder / "pids" / name).write_text(str(child.pid))

    def pid(self, name: str) -> int | None:
        """Return the process id of a running program, or None."""
        if (child := self._children.get(name)) is not None:
            # poll() also reaps a child. Its command line is still empty right after the start.
            return child.pid if child.poll() is None else None
        try:
            pid = int((self.folder / "pids" / name).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pid if names_folder(pid, self.folder) else None

    def check(self) -> None:
        """Raise RuntimeError with the end of the log if a program has exited by itself."""
        for name in self.names():
            if self.pid(name) is None:
                raise RuntimeError(f"{name} has exited:\n{self.log(name).read_text(errors='replace')[-3000:]}")

    def stop(self, name: str, *, patience: float) -> None:
        """Terminate the program, and kill it after `patience` seconds. Does nothing if it does not run."""
        for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 60.0)):
            pid = self.pid(name)
            if pid is None:
                break
            try:
                os.kill(pid, number)
                wait_for(f"{name} ends", lambda: self.pid(name) is None, seconds=seconds, every=0.02)
            except ProcessLookupError:
                break
            except TimeoutError:
                if number == signal.SIGKILL:
                    raise
        self._children.pop(name, None)
        (self.folder / "pids" / name).unlink(missing_ok=True)


def command_line(pid: int) -> list[str]:
    """Return the arguments of a process; none if it has exited, is a zombie or belongs to the kernel."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def names_folder(pid: int, folder: Path) -> bool:
    """Return whether an argument of the process contains the folder's path."""
    return any(str(folder) in word for word in command_line(pid))


def all_pids() -> list[int]:
    """Return the ids of all processes of this machine."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]

"""Programs that run in the background, each written down in a folder so that a later run can find and end it."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from cluster.waiting import wait_for


class Processes:
    """The background programs of one state folder.

    `FOLDER/pids/NAME` holds a process's id, `FOLDER/logs/NAME.log` what it writes. An id counts only while the
    command line behind it names the folder: it may have been given to another program since, and an ended process
    that nobody has collected has an empty one. So every program started here has to name the folder in an argument.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def log(self, name: str) -> Path:
        """Where the program's output goes."""
        return self.folder / "logs" / f"{name}.log"

    def names(self) -> list[str]:
        """The names of all programs that were started and not stopped, running or not."""
        pids = self.folder / "pids"
        return sorted(path.name for path in pids.iterdir()) if pids.is_dir() else []

    def start(self, name: str, argv: Sequence[str | Path]) -> None:
        """Starts a program in a session of its own, unless it runs. Raises ValueError for one that could not be found
        again, OSError for one that does not exist.
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
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd=self.folder
            )
        self._children[name] = child
        (self.folder / "pids" / name).write_text(str(child.pid))

    def pid(self, name: str) -> int | None:
        """The id of the running program, or None."""
        if (child := self._children.get(name)) is not None:
            # Its parent knows best, and collects it; a command line is still empty in the moment after the start.
            return child.pid if child.poll() is None else None
        try:
            pid = int((self.folder / "pids" / name).read_text())
        except (FileNotFoundError, ValueError):
            return None
        return pid if names_folder(pid, self.folder) else None

    def check(self) -> None:
        """Raises RuntimeError with the end of the log where a program that was started has ended by itself."""
        for name in self.names():
            if self.pid(name) is None:
                raise RuntimeError(f"{name} has ended:\n{self.log(name).read_text(errors='replace')[-3000:]}")

    def stop(self, name: str, *, patience: float) -> None:
        """Asks the program to end, and kills it where it has not within `patience` seconds. Harmless if it is gone."""
        for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
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
    """The arguments of a process; empty where it has ended, is a zombie or belongs to the kernel."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def names_folder(pid: int, folder: Path) -> bool:
    """Whether an argument of the process holds the folder's path."""
    return any(str(folder) in word for word in command_line(pid))


def all_pids() -> list[int]:
    """Every process of this machine."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]

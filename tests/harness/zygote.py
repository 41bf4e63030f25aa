"""Starts many operators quickly: one process imports the program, and each operator is a fork of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from kubernetes.config import kube_config

from support.waiting import eventually


class Zygote:
    """Forks operators, which are identified by pid."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pids: set[int] = set()

    def __enter__(self) -> Self:
        path = os.pathsep.join(part for part in sys.path if part)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pid in list(self._pids):
            self.kill(pid)
        self._process.communicate(timeout=10)

    def start(self, kubeconfig: Path, log: Path, arguments: Sequence[str]) -> int:
        """Start an operator and return its pid."""
        order = {"kubeconfig": str(kubeconfig), "log": str(log), "arguments": list(arguments)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            pid = int(self._process.stdout.readline())
            self._pids.add(pid)
        return pid

    def kill(self, pid: int) -> None:
        """Kill an operator as a crash would, and wait until it is gone. Does nothing if it has exited."""
        self._pids.discard(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{pid}").exists(), within=10, what=f"the end of {pid}", every=0.002)


def _serve() -> None:
    from fastgen_operator.main import main

    # Nothing waits for the children, so let the kernel reap them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(main, order)
        print(pid, flush=True)


def _become(main: object, order: dict[str, object]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(str(order["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    # The client reads $KUBECONFIG only when it is imported.
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = str(order["kubeconfig"])
    assert callable(main)
    try:
        main(order["arguments"])
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    _serve()

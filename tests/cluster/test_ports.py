"""Ports of programs that tests start: no two processes get the same one, although a program listens only later."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cluster.controlplane import free_ports

TAKER = """
import itertools, sys
from cluster import controlplane
controlplane._ports = itertools.count(int(sys.argv[1]) - controlplane._FIRST_PORT)
print(*controlplane.free_ports(3), flush=True)
sys.stdin.read()
"""


def test_another_process_gets_other_ports_from_the_same_place() -> None:
    ports = free_ports(3)
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": tests}
    command = [sys.executable, "-c", TAKER, str(ports[0])]
    with subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        theirs = [int(port) for port in other.stdout.readline().split()]
        assert len(theirs) == 3
        assert not set(theirs) & set(ports)

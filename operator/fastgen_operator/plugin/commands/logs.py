"""`kubectl fastgen logs`: the logs of all pods, each line prefixed with its pod."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from typing import Final

from fastgen_operator.kube.transport import KubeError
from fastgen_operator.objects.container import ENGINE_CONTAINER
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plugin.cluster import Cluster, PluginError
from fastgen_operator.plugin.screen import Screen, printable

# With --follow, the interval at which new pods are looked up.
_POLL_SECONDS: Final = 2.0
_COLOURS: Final = ("cyan", "green", "yellow")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("name", metavar="NAME", help="the FastGenDeployment")
    parser.add_argument("-f", "--follow", action="store_true", help="follow the logs, also of later starts")
    parser.add_argument("-p", "--previous", action="store_true", help="logs of the container before its last restart")
    parser.add_argument("-c", "--container", default=ENGINE_CONTAINER, help="container (default: %(default)s)")
    parser.add_argument("--tail", type=int, metavar="LINES", help="last lines of each pod; default: all")
    parser.add_argument("--timestamps", action="store_true", help="with the time of each line")


def run(options: argparse.Namespace, cluster: Cluster, screen: Screen) -> int:
    """Print the logs of all pods, a canary's included; return the exit code, 1 if no log could be read to its end.

    With --follow, it runs until interrupted.
    """
    cluster.resource(options.name)
    reader = _Reader(options, cluster, screen)
    pods = cluster.pods_and_canary(options.name)
    if not options.follow:
        if not pods:
            raise PluginError(f"{options.name} has no pods: see kubectl fastgen status {options.name}")
        read = [reader.read(pod) for pod in pods]
        return 0 if any(read) else 1
    # A log ends when its container ends: each start of a container is read once.
    seen: set[tuple[str, int]] = set()
    while True:
        for pod in pods:
            container = pod.container(options.container)
            start = (pod.uid, container.restarts)
            if start not in seen and (container.is_running or container.ended is not None):
                seen.add(start)
                threading.Thread(target=reader.read, args=(pod,), daemon=True).start()
        time.sleep(_POLL_SECONDS)
        pods = cluster.pods_and_canary(options.name)


class _Reader:
    def __init__(self, options: argparse.Namespace, cluster: Cluster, screen: Screen) -> None:
        self._cluster, self._screen = cluster, screen
        flags = ("follow", "previous", "timestamps")
        self._query = [("container", options.container), *((flag, "true") for flag in flags if getattr(options, flag))]
        if options.tail is not None:
            self._query.append(("tailLines", str(options.tail)))
        self._lock = threading.Lock()
        self._colours: dict[str, str] = {}

    def read(self, pod: Pod) -> bool:
        """Print the log of a pod; return whether it was read to its end. An error is printed, too."""
        name = f"{pod.name} canary" if pod.is_canary else pod.name
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        prefix = self._screen.paint(f"[{name}]", colour)
        has_lines = False
        try:
            for line in self._cluster.log(pod, self._query):
                with self._lock:  # write whole lines
                    self._screen.write([f"{prefix} {line}"])
                has_lines = True
        except (KubeError, PluginError) as error:
            what = "the log breaks off here" if has_lines else "the log cannot be read"
            with self._lock:
                print(printable(f"[{name}] {what}: {error}"), file=sys.stderr)
            return False
        return True

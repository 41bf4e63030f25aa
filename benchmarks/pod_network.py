"""A program that answers at all addresses of the simulated pods, in a network namespace of its own. Needs root.

The namespace has no name and no mount: it exists while the program runs, and the kernel ends the program with the
benchmark, however that ends. So nothing is left for the next run.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ipaddress import ip_network
from pathlib import Path

from cluster.commands import run

# Of the range for benchmarks (RFC 2544).
POD_ADDRESSES, LINK_ADDRESSES = "198.18.0.0/16", "198.19.0.0/30"
# The program gets this signal when its parent ends.
BOUND = ("setpriv", "--pdeathsig", "KILL", "--")


@contextmanager
def answering_at(
    program: Sequence[str], pods: str = POD_ADDRESSES, link: str = LINK_ADDRESSES
) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program such that it can be reached at all addresses of `pods`.

    Args:
        pods: network of the pods.
        link: network of two addresses, between this machine and the program.
    """
    here, there = ip_network(link).hosts()
    width = ip_network(link).prefixlen
    port = f"fgen{os.getpid() % 10**7}"
    with subprocess.Popen([*BOUND, "unshare", "--net", "--", *program]) as process:
        try:
            _wait_for_namespace(process)
            inside = ("nsenter", f"--net=/proc/{process.pid}/ns/net", "--")
            for command in (
                ("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(process.pid)),
                ("ip", "address", "add", f"{here}/{width}", "dev", port),
                ("ip", "link", "set", port, "up"),
                (*inside, "ip", "address", "add", f"{there}/{width}", "dev", "eth0"),
                (*inside, "ip", "link", "set", "eth0", "up"),
                (*inside, "ip", "link", "set", "lo", "up"),
                (*inside, "ip", "route", "add", "local", pods, "dev", "lo"),
                ("ip", "route", "add", pods, "via", str(there)),
            ):
                run(command)
            yield process
        finally:
            # With the device, its routes and addresses go. The kernel removes it only a moment after the program ended.
            subprocess.run(["ip", "link", "delete", port], check=False, stderr=subprocess.DEVNULL)
            process.kill()


def _wait_for_namespace(process: subprocess.Popen[bytes]) -> None:
    """Wait until the process has left this process's network namespace."""
    own = Path("/proc/self/ns/net").readlink()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{process.pid}/ns/net").readlink() == own:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args} got no network namespace: run this program as root")
        time.sleep(0.01)

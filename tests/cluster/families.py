"""The address families of a node: IPv4, IPv6, or both with either first."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cluster.commands import CommandError, run


@dataclass(frozen=True, slots=True)
class Family:
    """One address family, and the ranges and addresses that a cluster uses of it.

    Attributes:
        flag: of the program ip.
        everywhere: range of all addresses.
        listen: the address that stands for all of this family.
        forwarding: the kernel's switch for routing.
        elsewhere: an address outside this machine, for documentation.
    """

    flag: str
    pods: str
    services: str
    api: str
    dns: str
    everywhere: str
    listen: str
    forwarding: Path
    elsewhere: str

    def own_address(self) -> str:
        """Return the source address of the default route, at which pods can reach this machine.

        Raises RuntimeError if there is no default route.
        """
        try:
            words = run(["ip", self.flag, "-o", "route", "get", self.elsewhere]).split()
            return words[words.index("src") + 1]
        except (CommandError, ValueError):
            raise RuntimeError(
                f"this machine has no default route of IPv{self.flag[1:]}, so the node has no address; configure one"
            ) from None


V4 = Family(
    flag="-4",
    pods="10.244.0.0/24",
    services="10.96.0.0/16",
    api="10.96.0.1",
    dns="10.96.0.10",
    everywhere="0.0.0.0/0",
    listen="0.0.0.0",
    forwarding=Path("/proc/sys/net/ipv4/ip_forward"),
    elsewhere="192.0.2.254",
)
V6 = Family(
    flag="-6",
    pods="fd10:244::/64",
    services="fd10:96::/112",
    api="fd10:96::1",
    dns="fd10:96::a",
    everywhere="::/0",
    listen="::",
    forwarding=Path("/proc/sys/net/ipv6/conf/all/forwarding"),
    elsewhere="2001:db8::1",
)
Families = Sequence[Family]


def chosen(environment: Mapping[str, str] = os.environ) -> Families:
    """Return the families that $FASTGEN_BED_FAMILIES names, the cluster's own first: 4 (default), 6, 4,6 or 6,4."""
    by_name = {"4": V4, "6": V6}
    names = environment.get("FASTGEN_BED_FAMILIES", "4").split(",")
    try:
        return tuple(by_name[name] for name in names)
    except KeyError:
        raise RuntimeError(f"FASTGEN_BED_FAMILIES {','.join(names)}: must be 4, 6, 4,6 or 6,4") from None

"""HTTP server of the autoscaler's last decisions with their inputs.

`kubectl fastgen explain-scaling` reads them. It listens on the loopback interface of the pod, so that only a
port-forward reaches it: the right to read it is the right to forward ports of the operator's pods. Decisions contain
names of pods and figures, no addresses and no secrets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from fastgen.version import VERSION
from fastgen_operator.autoscale.journal import Journal, to_json
from fastgen_operator.kinds import Key
from fastgen_operator.runtime.json_server import JsonServer

PATH: Final = "/decisions"
_LOOPBACK: Final = "127.0.0.1"
# A page in the browser of somebody who forwards the port could have its own name resolve to this address.
_HOSTS: Final = (_LOOPBACK, "localhost")


class DecisionServer(JsonServer):
    """Serves `/decisions/NAMESPACE/NAME`. Raises OSError if the port is in use.

    Args:
        find: returns the last decisions about a resource; None if this operator has not decided on it.
    """

    def __init__(self, port: int, find: Callable[[Key], Journal | None]) -> None:
        def answer(path: str, host: str) -> tuple[int, object]:
            if host not in _HOSTS:
                return 403, {"error": f"use {_LOOPBACK} or localhost as the host, not {host}"}
            namespace, _, name = path.removeprefix(f"{PATH}/").partition("/")
            if not path.startswith(f"{PATH}/") or not name or "/" in name:
                return 404, {"error": f"no such path: {path}; use {PATH}/NAMESPACE/NAME"}
            journal = find((namespace, name))
            if journal is None:
                return 404, {"error": f"no decision about {namespace}/{name}"}
            return 200, {"version": VERSION, "journal": to_json(journal)}

        super().__init__(_LOOPBACK, port, answer, "decisions")

"""HTTP server for the probes."""

from __future__ import annotations

from collections.abc import Callable

from fastgen_operator.runtime.json_server import JsonServer
from fastgen_operator.runtime.liveness import Stalled

# Returns the body of a 200 response; raises Stalled for a 500 response with its message.
Check = Callable[[], dict[str, float]]


class HealthServer(JsonServer):
    """Serves one check per path. Raises OSError if the port is in use."""

    def __init__(self, address: str, port: int, checks: dict[str, Check]) -> None:
        def answer(path: str, _: str) -> tuple[int, object]:
            check = checks.get(path)
            if check is None:
                return 404, {"error": f"no such path: {path}"}
            try:
                return 200, check()
            except Stalled as error:
                return 500, {"error": str(error)}

        super().__init__(address, port, answer, "health")

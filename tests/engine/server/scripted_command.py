"""The `fastgen` command with the scripted engine: from the command line, and for `support.forking`.

If LOOP_PROBE names a file, `loop_probe` writes there how long the event loop was held. If SCRIPT_STOP_GATE names a
file, a server whose engine has failed answers until the file exists. SCRIPT_IDLE_SECONDS is how long idle connections
stay open during a drain.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import fastgen.commands.main
import fastgen.link.launch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    if "LOOP_PROBE" in os.environ:
        # A program that starts this file by its path, as the tests of MII do, cannot import the tests.
        from engine.server import loop_probe

        loop_probe.install(Path(os.environ["LOOP_PROBE"]))
    if arguments is not None:
        _wait_for_tests()
    fastgen.link.launch.WORKER = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")))
    return fastgen.commands.main.main(arguments)


def _wait_for_tests() -> None:
    """Lengthen the times after which a server goes on alone: a test, too, may be stopped for seconds."""
    from fastgen.link.client import EngineClient
    from fastgen.server import api_process
    from fastgen.server.serving import metrics_exchange

    metrics_exchange._TIMEOUT_SECONDS = 300.0
    api_process._IDLE_SECONDS = int(os.environ.get("SCRIPT_IDLE_SECONDS", api_process._IDLE_SECONDS))
    gate, stop = os.environ.get("SCRIPT_STOP_GATE"), EngineClient.stop

    async def stop_later(client: EngineClient) -> None:
        while gate is not None and not Path(gate).exists():
            await asyncio.sleep(0.01)
        await stop(client)

    EngineClient.stop = stop_later  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main())
else:
    # What `fastgen serve` imports.
    import fastgen.commands.serve
    import fastgen.server.main

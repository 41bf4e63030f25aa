"""The `fastgen` command with the scripted engine: from the command line, and for `support.forking`.

If LOOP_PROBE names a file, `loop_probe` writes there how long the event loop was held.
"""

from __future__ import annotations

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
    fastgen.link.launch.WORKER = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")))
    return fastgen.commands.main.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
else:
    # What `fastgen serve` imports.
    import fastgen.commands.serve
    import fastgen.server.main

"""The `fastgen` command with the scripted engine: from the command line, and for `support.forking`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import fastgen.commands.main
import fastgen.engine.launch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    fastgen.engine.launch.WORKER = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")))
    return fastgen.commands.main.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
else:
    # What `fastgen serve` imports.
    import fastgen.commands.serve
    import fastgen.server.main

"""The `fastgen` command with the scripted engine."""

import sys
from pathlib import Path

import fastgen.engine.launch

if __name__ == "__main__":
    fastgen.engine.launch.WORKER = (sys.executable, str(Path(__file__).with_name("scripted_engine.py")))
    from fastgen.commands.main import main

    sys.exit(main())

"""Runs the command `fastgen` for `python -m fastgen`."""

import sys

from fastgen.commands.main import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m fastgen` is the command `fastgen`."""

import sys

from fastgen.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m fastgen_operator.plugin` is `kubectl fastgen`."""

import sys

from fastgen_operator.plugin.main import main

sys.exit(main())

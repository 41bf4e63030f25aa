"""Exit codes of `fastgen serve`. The operator reads them to tell the causes apart."""

from __future__ import annotations

import signal
from typing import Final

# Any other failure.
FAILED: Final = 1
# A restart cannot help: an invalid setting, a model that cannot be served, or a machine without a usable GPU.
BAD_CONFIGURATION: Final = 2
# The GPU or its driver reported an error.
DEVICE_FAILED: Final = 3
# The engine had work and finished no step in time.
HUNG: Final = 4


def how_ended(code: int) -> str:
    """Return how a process with this exit code ended, for a message. Negative codes are signals."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"

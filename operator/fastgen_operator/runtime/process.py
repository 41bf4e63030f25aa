"""Settings of the operator's process.

The limit on open files, and how often Python looks for cyclic garbage.
"""

from __future__ import annotations

import gc
import resource
from typing import Final

# As many as there are ports of one address.
_MOST_FILES: Final = 65536
# New containers until Python looks for cycles among them, and how many such looks until it looks at older ones.
_NEW_CONTAINERS, _LOOKS = 50_000, 20


def raise_open_files_limit() -> int:
    """Raise the limit as far as this process may, and return the new one.

    Container runtimes often start with 1024. Each connection to a replica that is kept for the next scrape is an open
    file.
    """
    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Infinity is -1.
    wanted = _MOST_FILES if highest == resource.RLIM_INFINITY else min(_MOST_FILES, highest)
    if limit == resource.RLIM_INFINITY or limit >= wanted:
        return _MOST_FILES if limit == resource.RLIM_INFINITY else limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, highest))
    return wanted


def collect_garbage_less_often() -> None:
    """Let Python look for cyclic garbage after 50,000 new containers instead of 700.

    A list of 500 pods has 100,000, none of which is garbage: with Python's default, looking takes longer than parsing.
    Everything without cycles is freed at once, whatever the setting.
    """
    gc.set_threshold(_NEW_CONTAINERS, _LOOKS, _LOOKS)

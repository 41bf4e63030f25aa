"""Parts of the scheduler's messages about pods that it cannot schedule, on which conditions depend. Pure.

Source: k8s.io/kubernetes/pkg/scheduler/framework/plugins, equal in 1.34.2, 1.35.4, 1.36.3 and 1.37.2: volumebinding,
binder.go and volume_binding.go, and noderesources, fit.go. A test looks for these words in the scheduler that it runs.
"""

from __future__ import annotations

import re
from typing import Final

# The volume exists, but not in the zone or on the node.
NODE_CONFLICT: Final = "node(s) didn't match PersistentVolume's node affinity"
# The claim has no volume, and gets none.
VOLUME_MISSING: Final = (
    "pod has unbound immediate PersistentVolumeClaims",
    "node(s) didn't find available persistent volumes to bind",
    "node(s) did not have enough free storage",
    "node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)",
    # persistentvolumeclaim "NAME" not found, or is being deleted, or bound to non-existent persistentvolume "NAME"
    "persistentvolumeclaim ",
    # The volume was not provisioned in time on the node that the scheduler had chosen (WaitForFirstConsumer).
    "binding volumes: ",
)
INSUFFICIENT: Final = "Insufficient "


def is_about_volume(words: str) -> bool:
    """Return whether the scheduler's message says that a claim of the pod has no usable volume."""
    return any(part in words for part in VOLUME_MISSING)


def is_short_of(resource: str, words: str) -> bool:
    """Return whether the scheduler's message says that nodes have too little of the resource left."""
    # Names may contain dots, and a dot ends the list of reasons.
    return re.search(rf"{INSUFFICIENT}{re.escape(resource)}[,.;]?(\s|$)", words) is not None

"""Derive the target utilization from requests, speed and first-token target. Pure.

A Service sends requests to random replicas, so each replica has its own queue and needs the same headroom in a large
fleet as in a small one. In one first-token target T, a replica of utilization u gets on average u T seconds of
work, in requests of s seconds. If requests arrive independently and their work varies as much as its mean, the variance
of that work is 2 s u T. The utilization is the one at which the mean and a margin of `DEVIATIONS` standard deviations
fill T:

    u T + DEVIATIONS sqrt(2 s u T) = T

This is the square-root rule of staffing (Halfin and Whitt, 1981) for one replica. Long requests and tight targets need
more headroom, short ones less.
"""

from __future__ import annotations

import math
from typing import Final

from fastgen_operator.autoscale.measure.rates import RequestShape

# Margin in standard deviations. For chat requests on an 8B model it gives 70 %. In the simulator, about 99 % of them
# are then in time at a constant rate.
DEVIATIONS: Final = 0.6
# Bounds. Below the lower one, further replicas hardly shorten the wait.
LEAST, MOST = 0.5, 0.9


def derived_utilization(shape: RequestShape, tokens_per_second: float, first_token_seconds: float) -> float:
    """Return the target utilization, 0 to 1, rounded to whole percent against noise."""
    seconds = (shape.computed + shape.generated) / tokens_per_second
    margin = DEVIATIONS * math.sqrt(2 * seconds / first_token_seconds)
    root = (math.sqrt(margin * margin + 4) - margin) / 2
    return round(min(MOST, max(LEAST, root * root)), 2)

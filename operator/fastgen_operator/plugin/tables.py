"""The tables that `status` shows in a terminal and `dashboard` in a browser. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final

from fastgen_operator.plugin.overview import Overview
from fastgen_operator.plugin.screen import Cell, Row, age_of

_COLOURS: Final = {
    "True": "green", "False": "red", "Unknown": "yellow",
    "Ready": "green", "Starting": "cyan", "Draining": "cyan", "Straggler": "yellow", "Unschedulable": "yellow",
    "Failing": "red", "Lost": "red", "Ended": "dim",
}  # fmt: skip
# Of this condition, True is a warning.
_LIMIT: Final = "ScalingLimited"
_LIMIT_COLOURS: Final = {"True": "yellow", "False": "green"}


def coloured(word: str) -> Cell:
    """Return a condition's status or a pod's state in its colour."""
    return Cell(word, _COLOURS.get(word, ""))


def unready_first(fleet: Iterable[Overview]) -> list[Overview]:
    """Return the resources sorted by namespace and name, those that are not ready first."""
    return sorted(fleet, key=lambda each: (each.ready == "True", each.namespace, each.name))


def condition_table(found: Overview, now: datetime) -> list[Row]:
    """Return the header and a row for each condition, with its message in the last column."""
    rows: list[Row] = [("Condition", "Status", "Reason", "Since", "Message")]
    for each in found.conditions:
        colours = _LIMIT_COLOURS if each["type"] == _LIMIT else _COLOURS
        status = Cell(each["status"], colours.get(each["status"], ""))
        rows.append((each["type"], status, each["reason"], age_of(each["lastTransitionTime"], now), each["message"]))
    return rows


def pod_table(found: Overview, now: datetime) -> list[Row]:
    """Return the header and a row for each pod, with its message in the last column."""
    rows: list[Row] = [("Pod", "State", "Restarts", "Node", "Age", "Message")]
    for pod in found.pods:
        rows.append((pod.name, coloured(pod.state), str(pod.restarts), pod.node, age_of(pod.created, now), pod.message))
    return rows

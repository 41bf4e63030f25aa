"""The last decisions about a fleet with their inputs, as immutable values and as JSON.

They are kept in the leader's memory only, and share most of it with the autoscaler's state.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Final

import pydantic_core
from pydantic import TypeAdapter

from fastgen_operator.autoscale.decide import Case
from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.rehearsal.learning import Learning, Rehearsal

# Number of changes that are kept: as many as in status.autoscaling.history.
_CHANGES: Final = 5


@dataclass(frozen=True, slots=True)
class Entry:
    """A decision with its inputs, and its time in seconds since 1970."""

    time: float
    case: Case
    decision: Decision


@dataclass(frozen=True, slots=True)
class Journal:
    """The last decisions about one fleet.

    Attributes:
        changes: the last decisions that changed the number of replicas, oldest first.
        latest: the last decision, which may be one of `changes`; None before the first one.
        rehearsal, learning: the inputs and the result of the last rehearsal; None before the first one.
    """

    changes: tuple[Entry, ...] = ()
    latest: Entry | None = None
    rehearsal: Rehearsal | None = None
    learning: Learning | None = None

    def add(self, entry: Entry) -> Journal:
        """Return the journal after a new decision."""
        before = entry.case.fleet.replicas if self.latest is None else self.latest.decision.replicas
        changed = entry.decision.replicas != before
        changes = (*self.changes, entry)[-_CHANGES:] if changed else self.changes
        return replace(self, changes=changes, latest=entry)


def to_json(value: Journal | Decision | Learning) -> Any:
    """Return a journal, a decision or what was learned as JSON values. Infinity becomes a string."""
    return json.loads(pydantic_core.to_json(value, inf_nan_mode="strings"))


def journal_from_json(data: Any) -> Journal:
    """Return the journal of `to_json`; raise ValueError if it does not match, as from another version."""
    return TypeAdapter(Journal).validate_python(data)

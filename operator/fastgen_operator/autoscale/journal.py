"""The inputs of the last decisions about a fleet, as immutable values and as JSON.

Kept in the leader's memory only. Entries share what they have in common with the autoscaler's own state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from pydantic import TypeAdapter

from fastgen_operator.autoscale.decide import Case
from fastgen_operator.autoscale.decision import Decision

# Changes of the number of replicas that are kept: as many as status.autoscaling.history has.
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
        changes: those that changed the number of replicas, oldest first.
        latest: the last one, which may be one of them; None before the first one.
    """

    changes: tuple[Entry, ...] = ()
    latest: Entry | None = None

    def add(self, entry: Entry) -> Journal:
        """Return the journal with a new decision."""
        before = entry.case.fleet.replicas if self.latest is None else self.latest.decision.replicas
        if entry.decision.replicas == before:
            return Journal(self.changes, entry)
        return Journal((*self.changes, entry)[-_CHANGES:], entry)


def to_json(value: Journal | Decision) -> Any:
    """Return a journal or a decision as JSON values. Infinity, which JSON lacks, becomes a string."""
    adapter: TypeAdapter[Any] = _journals() if isinstance(value, Journal) else _decisions()
    return _strict(adapter.dump_python(value, mode="json", by_alias=True))


def journal_from_json(data: Any) -> Journal:
    """Return the journal of `to_json`, equal to the original.

    Raises:
        ValueError: another version of the operator wrote it.
    """
    return _journals().validate_python(data)


# Built on first use: most operators are never asked.
@cache
def _journals() -> TypeAdapter[Journal]:
    return TypeAdapter(Journal)


@cache
def _decisions() -> TypeAdapter[Decision]:
    return TypeAdapter(Decision)


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _strict(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_strict(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

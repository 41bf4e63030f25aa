"""What a router that sees all requests and answers knows: the requests of each pod that have not ended."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from benchmarks.autoscaling.fleet import Pod
from benchmarks.autoscaling.replica import Arrival

Note = TypeVar("Note")


class Unended(Generic[Note]):
    """The requests that were sent and have not ended, each with a note of the router."""

    def __init__(self) -> None:
        self._notes: dict[str, dict[Arrival, Note]] = {}

    def add(self, pod: Pod, arrival: Arrival, note: Note) -> None:
        """Note a request that is sent to a pod."""
        self._notes.setdefault(pod.name, {})[arrival] = note

    def end(self, pods: list[Pod], now: float) -> Iterator[Note]:
        """Forget the requests that ended by `now`, and yield their notes. Pods that are gone are forgotten."""
        for gone in self._notes.keys() - {pod.name for pod in pods}:
            del self._notes[gone]
        for pod in pods:
            assert pod.replica is not None
            pod.replica.run_until(now)
            notes = self._notes.setdefault(pod.name, {})
            yield from (notes.pop(arrival) for arrival in pod.replica.ended() if arrival in notes)

    def of(self, pod: Pod) -> list[Note]:
        """Return the notes of a pod's requests."""
        return list(self._notes.get(pod.name, {}).values())

"""Property test: after any interleaving of watch events, responses and lists, the cache equals the server."""

from __future__ import annotations

import copy
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen_operator.kinds import POD, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.labels_and_annotations import OWNER_LABEL


def pod(name: str, version: int, *, uid: str, owner: str) -> Object:
    labels = {OWNER_LABEL: owner}
    metadata = {"name": name, "namespace": "space", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


def versions(cache: InformerCache, owner: str) -> dict[str, str]:
    return {obj["metadata"]["name"]: obj["metadata"]["resourceVersion"] for obj in cache.owned(POD, ("space", owner))}


@dataclass
class Model:
    """A server of pods, and streams from it to a cache: ordered within a stream, unordered between streams."""

    rng: random.Random
    cache: InformerCache = field(default_factory=InformerCache)
    version: int = 0
    live: dict[str, Object] = field(default_factory=dict)
    watch: dict[str, deque[tuple[str | None, Object]]] = field(default_factory=dict)
    answers: list[Object] = field(default_factory=list)
    lists: deque[tuple[list[Object], str]] = field(default_factory=deque)

    def write(self, name: str) -> None:
        """The server commits a write; the response to a write of the operator arrives later."""
        self.version += 1
        uid = self.live[name]["metadata"]["uid"] if name in self.live else str(self.version)
        kind = "MODIFIED" if name in self.live else "ADDED"
        self.live[name] = pod(name, self.version, uid=uid, owner=self.rng.choice(["chat", "other"]))
        self._tell(kind, self.live[name])
        if self.rng.random() < 0.4:
            self.answers.append(copy.deepcopy(self.live[name]))

    def delete(self, name: str) -> None:
        if (gone := self.live.pop(name, None)) is not None:
            self.version += 1
            metadata = {**gone["metadata"], "resourceVersion": str(self.version)}
            self._tell("DELETED", {**gone, "metadata": metadata})

    def break_watch(self) -> None:
        """410 Gone: pending events are lost, and all objects are listed again."""
        self.watch.clear()
        for obj in self.live.values():
            self._tell(None, obj)

    def take_list(self) -> None:
        self.lists.append((copy.deepcopy(list(self.live.values())), str(self.version)))

    def deliver(self, *, twice: bool = False) -> bool:
        """Deliver one item of one stream to the cache; return whether there was one."""
        streams = [uid for uid, events in self.watch.items() if events]
        choices: list[Any] = [*streams, *(["answer"] if self.answers else []), *(["list"] if self.lists else [])]
        if not choices:
            return False
        chosen = self.rng.choice(choices)
        if chosen == "answer":
            self.cache.put(POD, self.answers.pop(self.rng.randrange(len(self.answers))))
        elif chosen == "list":
            objects, version = self.lists.popleft()
            self.cache.replace(POD, None, objects, version)
        else:
            kind, obj = self.watch[chosen].popleft()
            for _ in range(2 if twice else 1):
                if kind == "DELETED":
                    self.cache.remove(POD, obj)
                else:
                    self.cache.put(POD, obj)
        return True

    def _tell(self, kind: str | None, obj: Object) -> None:
        # kopf keeps the order of one uid only.
        self.watch.setdefault(obj["metadata"]["uid"], deque()).append((kind, copy.deepcopy(obj)))

    def seen(self) -> dict[str, dict[str, str]]:
        return {owner: versions(self.cache, owner) for owner in ("chat", "other")}

    def truth(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {"chat": {}, "other": {}}
        for name, obj in self.live.items():
            found[obj["metadata"]["labels"][OWNER_LABEL]][name] = obj["metadata"]["resourceVersion"]
        return found


ACTIONS = st.lists(
    st.sampled_from(["write", "write", "delete", "deliver", "deliver", "twice", "list", "break"]), max_size=60
)


@settings(max_examples=500, deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 10_000))
def test_after_any_order_of_updates_a_list_makes_the_cache_equal_to_the_server(actions: list[str], seed: int) -> None:
    model = _played(actions, seed)
    model.take_list()
    while model.deliver():
        pass
    assert model.seen() == model.truth()


@settings(max_examples=500, deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 10_000))
def test_without_a_broken_watch_no_list_is_needed(actions: list[str], seed: int) -> None:
    model = _played([action for action in actions if action not in ("break", "list")], seed)
    while model.deliver():
        pass
    assert model.seen() == model.truth()


def _played(actions: list[str], seed: int) -> Model:
    model = Model(random.Random(seed))
    for action in actions:
        name = model.rng.choice("abc")
        if action == "write":
            model.write(name)
        elif action == "delete":
            model.delete(name)
        elif action == "list":
            model.take_list()
        elif action == "break":
            model.break_watch()
        else:
            model.deliver(twice=action == "twice")
    return model

"""The mirror ends equal to the server, whatever the order in which it hears of things."""

from __future__ import annotations

import copy
import random
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgen_operator.apiserver import KubeError
from fastgen_operator.compact import compact
from fastgen_operator.drift import TEMPLATE_DIGEST, template_digest
from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, OWNER_LABEL, POD, REPLICA_SET, Kind, Object
from fastgen_operator.mirror import Mirror
from fastgen_operator.mirrored import MirroredCluster
from fastgen_operator.watches import Watches

KEY = ("space", "chat")


def pod(name: str, version: int, *, uid: str = "1", owner: str | None = "chat", namespace: str = "space") -> Object:
    labels = {} if owner is None else {OWNER_LABEL: owner}
    metadata = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


def versions(mirror: Mirror, owner: str = "chat") -> dict[str, str]:
    return {obj["metadata"]["name"]: obj["metadata"]["resourceVersion"] for obj in mirror.owned(POD, ("space", owner))}


def test_a_late_event_does_not_undo_what_a_write_returned() -> None:
    mirror = Mirror()
    mirror.put(POD, pod("a", 9))
    mirror.put(POD, pod("a", 7))
    assert versions(mirror) == {"a": "9"}
    mirror.put(POD, pod("a", 12))
    assert versions(mirror) == {"a": "12"}


def test_an_object_that_ended_does_not_come_back_by_a_late_answer_but_another_of_its_name_does() -> None:
    mirror = Mirror()
    mirror.put(POD, pod("a", 5))
    mirror.remove(POD, pod("a", 8))
    mirror.put(POD, pod("a", 5))
    assert versions(mirror) == {}
    mirror.put(POD, pod("a", 9, uid="2"))
    assert versions(mirror) == {"a": "9"}


def test_the_end_of_an_earlier_object_leaves_the_later_one_of_its_name() -> None:
    mirror = Mirror()
    mirror.put(POD, pod("a", 9, uid="2"))
    mirror.remove(POD, pod("a", 8, uid="1"))
    assert versions(mirror) == {"a": "9"}


def test_a_list_finds_what_vanished_and_names_the_resources_it_was_about() -> None:
    mirror = Mirror()
    for obj in (pod("a", 3), pod("b", 4), pod("c", 5, owner="other"), pod("d", 5, namespace="elsewhere")):
        mirror.put(POD, obj)
    wrong = mirror.replace(POD, "space", [pod("b", 4), pod("c", 6, owner="other")], "9")
    assert wrong == {("space", "chat"), ("space", "other")}
    assert (versions(mirror), versions(mirror, "other")) == ({"b": "4"}, {"c": "6"})
    assert mirror.get(POD, "elsewhere", "d") is not None, "another namespace was not listed"
    assert mirror.replace(POD, "space", [pod("b", 4), pod("c", 6, owner="other")], "10") == set()


def test_a_list_older_than_an_object_does_not_remove_it() -> None:
    mirror = Mirror()
    mirror.put(POD, pod("a", 12))
    assert mirror.replace(POD, None, [], "11") == set()
    assert versions(mirror) == {"a": "12"}


def test_an_object_that_changes_hands_is_found_under_its_new_owner_only() -> None:
    mirror = Mirror()
    mirror.put(POD, pod("a", 1))
    mirror.put(POD, pod("a", 2, owner="other"))
    assert (versions(mirror), versions(mirror, "other")) == ({}, {"a": "2"})
    mirror.put(POD, pod("a", 3, owner=None))
    assert versions(mirror, "other") == {}


def test_ends_are_forgotten_so_that_memory_is_bounded() -> None:
    mirror = Mirror()
    for number in range(100):
        mirror.put(POD, pod(f"p{number}", 2 * number + 1))
        mirror.remove(POD, pod(f"p{number}", 2 * number + 2))
    for version in ("300", "301"):
        mirror.replace(POD, None, [], version)
    assert mirror._shelf(POD)._ends == {}
    assert mirror.size() == 0
    assert mirror._shelf(POD).by_owner == {}


@dataclass
class Model:
    """A server of pods, and the streams between it and a mirror: each in its own order, among them any order."""

    rng: random.Random
    mirror: Mirror = field(default_factory=Mirror)
    version: int = 0
    live: dict[str, Object] = field(default_factory=dict)
    watch: dict[str, deque[tuple[str | None, Object]]] = field(default_factory=dict)
    answers: list[Object] = field(default_factory=list)
    lists: deque[tuple[list[Object], str]] = field(default_factory=deque)

    def write(self, name: str) -> None:
        """The server takes a write of anybody; ours is answered too, at some time."""
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
        """410 Gone: what was not read is lost, and what there is comes once more."""
        self.watch.clear()
        for obj in self.live.values():
            self._tell(None, obj)

    def take_list(self) -> None:
        self.lists.append((copy.deepcopy(list(self.live.values())), str(self.version)))

    def deliver(self, *, twice: bool = False) -> bool:
        """One thing of one stream reaches the mirror; whether there was one."""
        streams = [uid for uid, events in self.watch.items() if events]
        choices: list[Any] = [*streams, *(["answer"] if self.answers else []), *(["list"] if self.lists else [])]
        if not choices:
            return False
        chosen = self.rng.choice(choices)
        if chosen == "answer":
            self.mirror.put(POD, self.answers.pop(self.rng.randrange(len(self.answers))))
        elif chosen == "list":
            objects, version = self.lists.popleft()
            self.mirror.replace(POD, None, objects, version)
        else:
            kind, obj = self.watch[chosen].popleft()
            for _ in range(2 if twice else 1):
                if kind == "DELETED":
                    self.mirror.remove(POD, obj)
                else:
                    self.mirror.put(POD, obj)
        return True

    def _tell(self, kind: str | None, obj: Object) -> None:
        # kopf keeps the order of one uid only.
        self.watch.setdefault(obj["metadata"]["uid"], deque()).append((kind, copy.deepcopy(obj)))

    def seen(self) -> dict[str, dict[str, str]]:
        return {owner: versions(self.mirror, owner) for owner in ("chat", "other")}

    def truth(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {"chat": {}, "other": {}}
        for name, obj in self.live.items():
            found[obj["metadata"]["labels"][OWNER_LABEL]][name] = obj["metadata"]["resourceVersion"]
        return found


ACTIONS = st.lists(
    st.sampled_from(["write", "write", "delete", "deliver", "deliver", "twice", "list", "break"]), max_size=60
)


@settings(max_examples=400, deadline=None)
@given(actions=ACTIONS, seed=st.integers(0, 10_000))
def test_whatever_the_order_a_last_list_makes_the_mirror_equal_to_the_server(actions: list[str], seed: int) -> None:
    model = _played(actions, seed)
    model.take_list()
    while model.deliver():
        pass
    assert model.seen() == model.truth()


@settings(max_examples=400, deadline=None)
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


class OneDeployment:
    """A server that keeps one Deployment and counts what is asked of it."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.failing: Kind | None = None

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        self.requests.append(f"GET {kind.path(namespace, name)}")
        return None

    def list(self, kind: Kind, namespace: str | None, selector: str = "") -> tuple[str, Any]:
        del namespace
        if kind == self.failing:
            raise KubeError(403, "not for you")
        self.requests.append(f"LIST {kind.plural} {selector}".strip())
        return "10", iter([])

    def apply(self, kind: Kind, manifest: Object) -> Object:
        self.requests.append(f"PATCH {kind.plural}")
        return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": "11", "uid": "1"}}

    def delete(self, kind: Kind, child: Object) -> None:
        del child
        self.requests.append(f"DELETE {kind.plural}")

    def patch_status(self, resource: Object, status: dict[str, Any]) -> Object:
        metadata = {**resource["metadata"], "resourceVersion": "12"}
        return {**resource, "metadata": metadata, "status": status}

    def annotate(self, kind: Kind, obj: Object, annotations: dict[str, str]) -> Object | None:
        metadata = {**obj["metadata"], "annotations": annotations, "resourceVersion": "13"}
        return {"apiVersion": kind.api_version, "kind": kind.name, **obj, "metadata": metadata}

    def create_event(self, resource: Object, event: dict[str, Any]) -> str:
        raise NotImplementedError

    def count_event(self, resource: Object, name: str, count: int, time: str) -> None:
        raise NotImplementedError


def test_what_was_just_written_is_read_back_without_a_request() -> None:
    server = OneDeployment()
    cluster = MirroredCluster(server, Mirror(), lambda: (DEPLOYMENT,), (None,))
    cluster.relist(Watches(time.monotonic, (FASTGEN, DEPLOYMENT)))
    assert server.requests == ["LIST fastgendeployments", f"LIST deployments {OWNER_LABEL}"]
    manifest = {**pod("chat", 0), "kind": "Deployment"}
    live = cluster.apply(DEPLOYMENT, manifest)
    cluster.patch_status({"metadata": {"name": "chat", "namespace": "space", "resourceVersion": "3"}}, {"url": "x"})
    assert cluster.owned(DEPLOYMENT, KEY)[0]["metadata"] == live["metadata"]
    status = cluster.get(FASTGEN, *KEY)
    assert status is not None
    assert status["status"] == {"url": "x"}
    live = cluster.annotate(DEPLOYMENT, live, {"a": "b"}) or live
    assert cluster.owned(DEPLOYMENT, KEY)[0]["metadata"]["annotations"] == {"a": "b"}
    cluster.delete(DEPLOYMENT, live)
    assert cluster.owned(DEPLOYMENT, KEY) == []
    assert server.requests[2:] == ["PATCH deployments", "DELETE deployments"]


def test_a_list_that_fails_says_of_what() -> None:
    server = OneDeployment()
    server.failing = DEPLOYMENT
    with pytest.raises(KubeError, match="listing deployments: not for you"):
        MirroredCluster(server, Mirror(), lambda: (DEPLOYMENT,), (None,)).relist(
            Watches(time.monotonic, (FASTGEN, DEPLOYMENT))
        )


def test_a_pod_is_kept_without_its_template_and_a_replica_set_too() -> None:
    container = {"name": "engine", "image": "e", "resources": {"limits": {"memory": "2Gi"}}, "args": ["x"] * 50}
    full = pod("a", 1)
    full["metadata"] |= {"managedFields": [{"manager": "kubelet"}]}
    full |= {"spec": {"nodeName": "n", "containers": [container], "volumes": [{}]}, "status": {"phase": "Running"}}
    kept = compact(POD, full)
    assert "managedFields" not in kept["metadata"]
    assert kept["spec"] == {
        "nodeName": "n",
        "containers": [{"name": "engine", "image": "e", "resources": {"limits": {"memory": "2Gi"}}}],
    }
    assert kept["status"] == {"phase": "Running"}
    assert "managedFields" in full["metadata"], "the original is somebody else's"
    replica_set = {**pod("a", 1), "spec": {"replicas": 2, "template": {}}, "status": {"replicas": 2}}
    kept = compact(REPLICA_SET, replica_set)
    assert kept["spec"] == {"replicas": 2, TEMPLATE_DIGEST: template_digest(replica_set)}
    assert template_digest(kept) == template_digest(replica_set)
    template = {**pod("a", 1), "spec": {"template": {"spec": {"volumes": []}}}}
    assert compact(DEPLOYMENT, template)["spec"] == template["spec"], "drift is looked for in the whole child"

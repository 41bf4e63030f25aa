"""What the cache believes, and what a visit sees of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from fastgen_operator.digests import TEMPLATE_DIGEST, template_digest
from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, OWNER_LABEL, POD, REPLICA_SET, Kind, Object
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.cached_client import CachedClient
from fastgen_operator.kube.compact import compact
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.kube.watch_health import Watches

KEY = ("space", "chat")


def pod(name: str, version: int, *, uid: str = "1", owner: str | None = "chat", namespace: str = "space") -> Object:
    labels = {} if owner is None else {OWNER_LABEL: owner}
    metadata = {"name": name, "namespace": namespace, "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


def versions(cache: InformerCache, owner: str = "chat") -> dict[str, str]:
    return {obj["metadata"]["name"]: obj["metadata"]["resourceVersion"] for obj in cache.owned(POD, ("space", owner))}


def test_a_late_event_does_not_undo_what_a_write_returned() -> None:
    cache = InformerCache()
    cache.put(POD, pod("a", 9))
    cache.put(POD, pod("a", 7))
    assert versions(cache) == {"a": "9"}
    cache.put(POD, pod("a", 12))
    assert versions(cache) == {"a": "12"}


def test_an_object_that_ended_does_not_come_back_by_a_late_answer_but_another_of_its_name_does() -> None:
    cache = InformerCache()
    cache.put(POD, pod("a", 5))
    cache.remove(POD, pod("a", 8))
    cache.put(POD, pod("a", 5))
    assert versions(cache) == {}
    cache.put(POD, pod("a", 9, uid="2"))
    assert versions(cache) == {"a": "9"}


def test_the_end_of_an_earlier_object_leaves_the_later_one_of_its_name() -> None:
    cache = InformerCache()
    cache.put(POD, pod("a", 9, uid="2"))
    cache.remove(POD, pod("a", 8, uid="1"))
    assert versions(cache) == {"a": "9"}


def test_a_list_finds_what_vanished_and_names_the_resources_it_was_about() -> None:
    cache = InformerCache()
    for obj in (pod("a", 3), pod("b", 4), pod("c", 5, owner="other"), pod("d", 5, namespace="elsewhere")):
        cache.put(POD, obj)
    wrong = cache.replace(POD, "space", [pod("b", 4), pod("c", 6, owner="other")], "9")
    assert wrong == {("space", "chat"), ("space", "other")}
    assert (versions(cache), versions(cache, "other")) == ({"b": "4"}, {"c": "6"})
    assert cache.get(POD, "elsewhere", "d") is not None, "another namespace was not listed"
    assert cache.replace(POD, "space", [pod("b", 4), pod("c", 6, owner="other")], "10") == set()


def test_a_list_older_than_an_object_does_not_remove_it() -> None:
    cache = InformerCache()
    cache.put(POD, pod("a", 12))
    assert cache.replace(POD, None, [], "11") == set()
    assert versions(cache) == {"a": "12"}


def test_an_answer_that_comes_after_a_list_without_its_object_does_not_bring_it_back() -> None:
    cache = InformerCache()
    cache.replace(POD, "space", [], "9")
    cache.put(POD, pod("a", 7))
    cache.put(POD, pod("b", 7, namespace="elsewhere"))
    assert versions(cache) == {}
    assert cache.get(POD, "elsewhere", "b") is not None, "another namespace was not listed"
    cache.put(POD, pod("a", 10))
    assert versions(cache) == {"a": "10"}


def test_a_server_restored_from_a_backup_is_believed() -> None:
    cache = InformerCache()
    cache.put(POD, pod("a", 50))
    cache.put(POD, pod("b", 60))
    cache.replace(POD, None, [pod("a", 50), pod("b", 60)], "70")
    assert cache.replace(POD, None, [pod("a", 20)], "30") == {("space", "chat")}
    assert versions(cache) == {"a": "20"}
    cache.put(POD, pod("a", 31))
    assert versions(cache) == {"a": "31"}


def test_an_object_that_changes_hands_is_found_under_its_new_owner_only() -> None:
    cache = InformerCache()
    cache.put(POD, pod("a", 1))
    cache.put(POD, pod("a", 2, owner="other"))
    assert (versions(cache), versions(cache, "other")) == ({}, {"a": "2"})
    cache.put(POD, pod("a", 3, owner=None))
    assert versions(cache, "other") == {}


def test_ends_are_forgotten_so_that_memory_is_bounded() -> None:
    cache = InformerCache()
    for number in range(100):
        cache.put(POD, pod(f"p{number}", 2 * number + 1))
        cache.remove(POD, pod(f"p{number}", 2 * number + 2))
    cache.replace(POD, None, [], "300")
    assert cache._shelf(POD)._ends == {}
    assert cache.size() == 0
    assert cache._shelf(POD).by_owner == {}


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
    cluster = CachedClient(server, InformerCache(), lambda: (DEPLOYMENT,), (None,))
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
        CachedClient(server, InformerCache(), lambda: (DEPLOYMENT,), (None,)).relist(
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

"""The informer cache: updates in any order, and what a reconcile reads from it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, POD, REPLICA_SET, Key, Kind, Object
from fastgen_operator.kube import cache as compiled_module
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.client import KubeClient
from fastgen_operator.kube.compact import compact
from fastgen_operator.kube.relist import Relister
from fastgen_operator.kube.sources import Sources
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.kube.watch_health import Watches
from fastgen_operator.labels_and_annotations import OWNER_LABEL
from fastgen_operator.metrics import Metrics
from fastgen_operator.objects.deployment import TEMPLATE_DIGEST, template_digest

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


def test_a_late_response_does_not_restore_a_deleted_object_but_a_recreated_one_is_stored() -> None:
    cache = InformerCache()
    cache.put(POD, pod("a", 5))
    cache.remove(POD, pod("a", 8))
    cache.put(POD, pod("a", 5))
    assert versions(cache) == {}
    cache.put(POD, pod("a", 9, uid="2"))
    assert versions(cache) == {"a": "9"}


def test_a_late_deletion_does_not_remove_a_recreated_object() -> None:
    cache = InformerCache()
    cache.put(POD, pod("a", 9, uid="2"))
    cache.remove(POD, pod("a", 8, uid="1"))
    assert versions(cache) == {"a": "9"}


def test_a_list_finds_deleted_objects_and_returns_their_owners() -> None:
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


def test_a_response_older_than_a_list_does_not_restore_a_deleted_object() -> None:
    cache = InformerCache()
    cache.replace(POD, "space", [], "9")
    cache.put(POD, pod("a", 7))
    cache.put(POD, pod("b", 7, namespace="elsewhere"))
    assert versions(cache) == {}
    assert cache.get(POD, "elsewhere", "b") is not None, "another namespace was not listed"
    cache.put(POD, pod("a", 10))
    assert versions(cache) == {"a": "10"}


def test_versions_that_go_backwards_after_a_restore_are_accepted() -> None:
    cache = InformerCache()
    cache.put(POD, pod("a", 50))
    cache.put(POD, pod("b", 60))
    cache.put(POD, pod("c", 60, owner="gone"))
    cache.replace(POD, None, [pod("a", 50), pod("b", 60), pod("c", 60, owner="gone")], "70")
    assert cache.replace(POD, None, [pod("a", 20)], "30") == {("space", "chat"), ("space", "gone")}
    assert versions(cache, "gone") == {}
    assert versions(cache) == {"a": "20"}
    cache.put(POD, pod("a", 31))
    assert versions(cache) == {"a": "31"}


def test_a_relabelled_object_is_found_only_under_its_new_owner() -> None:
    cache = InformerCache()
    cache.put(POD, pod("a", 1))
    cache.put(POD, pod("a", 2, owner="other"))
    assert (versions(cache), versions(cache, "other")) == ({}, {"a": "2"})
    cache.put(POD, pod("a", 3, owner=None))
    assert versions(cache, "other") == {}


def test_recorded_deletions_are_dropped_so_that_memory_is_bounded() -> None:
    cache = InformerCache()
    for number in range(100):
        cache.put(POD, pod(f"p{number}", 2 * number + 1))
        cache.remove(POD, pod(f"p{number}", 2 * number + 2))
    cache.replace(POD, None, [], "300")
    assert cache._store(POD)._deleted == {}
    assert cache.size() == 0
    assert cache._store(POD).by_owner == {}


class OneDeployment:
    """An API server with one Deployment that records the requests."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.failing = ""

    def list(self, path: str, query: list[tuple[str, str]]) -> tuple[str, Iterator[Object]]:
        self.requests.append(f"GET {path} {dict(query).get('labelSelector', '')}".strip())
        if self.failing and path.endswith(self.failing):
            raise KubeError(403, "not for you")
        return "10", iter(())

    def request(self, method: str, path: str, query: Any = None, body: Any = None, content_type: str = "") -> Object:
        del query, content_type
        self.requests.append(f"{method} {path}")
        if method == "DELETE":
            return {"kind": "Status", "status": "Success"}
        found = {"name": "chat", "namespace": "space", "labels": {OWNER_LABEL: "chat"}}
        version = {"resourceVersion": str(10 + len(self.requests)), "uid": "1"}
        return {**(body or {}), "metadata": {**found, **(body or {}).get("metadata", {}), **version}}


def test_what_was_just_written_is_read_back_without_a_request() -> None:
    server: Any = OneDeployment()
    cache = InformerCache()
    client = KubeClient(server, cache, Metrics(), lambda: True)
    watches = Watches(time.monotonic, (FASTGEN, DEPLOYMENT))
    Relister(client, cache, watches, Sources((None,)), lambda: (DEPLOYMENT,), (None,)).relist()
    assert server.requests == [f"GET {FASTGEN.path(None)}", f"GET {DEPLOYMENT.path(None)} {OWNER_LABEL}"]
    manifest = {**pod("chat", 0), "kind": "Deployment"}
    live = client.apply(DEPLOYMENT, manifest, None)
    read = {"metadata": {"name": "chat", "namespace": "space", "uid": "1", "resourceVersion": "3"}}
    client.patch_status(read, {"url": "x"})
    assert cache.owned(DEPLOYMENT, KEY)[0]["metadata"] == live["metadata"]
    status = cache.get(FASTGEN, *KEY)
    assert status is not None
    assert status["status"] == {"url": "x"}
    live = client.annotate(DEPLOYMENT, live, {"fastgen.dev/a": "b", "a": "long"}) or live
    assert cache.owned(DEPLOYMENT, KEY)[0]["metadata"]["annotations"] == {"fastgen.dev/a": "b"}
    client.delete(DEPLOYMENT, live)
    assert cache.owned(DEPLOYMENT, KEY) == []
    assert [request.split()[0] for request in server.requests[2:]] == ["PATCH", "PATCH", "PATCH", "DELETE"]


def test_a_write_that_changes_nothing_corrects_the_cached_object_of_the_same_version() -> None:
    """After an upgrade of the CRD, the API server returns more fields of the same version."""
    server: Any = OneDeployment()
    server.request = lambda *_: pod("chat", 7) | {"status": {"url": "x"}}
    cache = InformerCache()
    client = KubeClient(server, cache, Metrics(), lambda: True)
    cache.replace(FASTGEN, None, [pod("chat", 7)], "9")
    client.patch_status(pod("chat", 7), {"url": "x"})
    found = cache.get(FASTGEN, *KEY)
    assert found is not None
    assert found["status"] == {"url": "x"}
    cache.put(FASTGEN, pod("chat", 8))
    client.patch_status(pod("chat", 7), {"url": "x"})
    assert cache.get(FASTGEN, *KEY) == compact(FASTGEN, pod("chat", 8)), "a newer one stays"


def test_a_list_that_fails_stops_no_other_and_is_retried_after_a_backoff() -> None:
    server: Any = OneDeployment()
    server.failing = "/fastgendeployments"
    cache, now = InformerCache(), [0.0]
    client = KubeClient(server, cache, Metrics(), lambda: True)
    watches, sources = Watches(time.monotonic, (FASTGEN, DEPLOYMENT)), Sources((None,))
    relister = Relister(client, cache, watches, sources, lambda: (DEPLOYMENT,), (None,), 300.0, lambda: now[0])
    cache.put(DEPLOYMENT, pod("chat", 1))
    assert relister.relist() == {KEY}, "the deleted Deployment was found"
    assert sources.first_failure() == "fastgendeployments: not for you"
    asked = []
    for second in range(300):
        now[0] = float(second)
        server.requests.clear()
        assert relister.relist() == set()
        asked += [second] * len(server.requests)
    assert asked == [1, 3, 7, 15, 31, 63, 123, 183, 243], "the one that fails, and no other"
    server.failing, now[0] = "", 303.0
    relister.relist()
    assert sources.first_failure() == ""


def test_a_list_with_an_item_that_is_no_object_stops_no_other() -> None:
    server: Any = OneDeployment()
    listed = server.list
    server.list = lambda path, query: ("10", iter(["no object"])) if "/deployments" in path else listed(path, query)
    cache, sources = InformerCache(), Sources((None,))
    client = KubeClient(server, cache, Metrics(), lambda: True)
    watches = Watches(time.monotonic, (FASTGEN, DEPLOYMENT, POD))
    kinds = (DEPLOYMENT, POD)
    Relister(client, cache, watches, sources, lambda: kinds, (None,)).relist()
    assert sources.first_failure().startswith("deployments: TypeError")
    assert server.requests == [*(f"GET {each}" for each in (FASTGEN.path(None), f"{POD.path(None)} {OWNER_LABEL}"))]


def test_an_error_is_raised_if_nothing_can_be_listed() -> None:
    server: Any = OneDeployment()
    server.failing = "s"
    cache = InformerCache()
    client = KubeClient(server, cache, Metrics(), lambda: True)
    watches = Watches(time.monotonic, (FASTGEN, DEPLOYMENT))
    relister = Relister(client, cache, watches, Sources((None,)), lambda: (DEPLOYMENT,), (None,))
    with pytest.raises(KubeError, match="listing fastgendeployments: not for you"):
        relister.relist()


def test_a_list_that_fails_at_a_later_page_changes_nothing() -> None:
    """The token of the next page expires, for example."""

    class Paged:
        def list(self, *_: Any) -> tuple[str, Iterator[Object]]:
            return "10", self.objects()

        def objects(self) -> Iterator[Object]:
            yield pod("new", 5)
            raise KubeError(410, "the provided continue parameter is too old")

    server: Any = Paged()
    cache = InformerCache()
    cache.put(FASTGEN, pod("chat", 1))
    client = KubeClient(server, cache, Metrics(), lambda: True)
    watches = Watches(time.monotonic, (FASTGEN,))
    with pytest.raises(KubeError, match="listing fastgendeployments: the provided continue"):
        Relister(client, cache, watches, Sources((None,)), lambda: (), (None,)).relist()
    assert cache.resources() == [KEY]
    assert watches.behind() == 0


def test_of_managed_fields_only_the_operators_entry_is_kept() -> None:
    ours = {"manager": "fastgen-operator", "operation": "Apply", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    deployment = pod("chat", 1)
    deployment["metadata"]["managedFields"] = [{"manager": "kubectl", "operation": "Apply"}, ours]
    assert compact(DEPLOYMENT, deployment)["metadata"]["managedFields"] == [ours]


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
    assert "managedFields" in full["metadata"], "the argument is not modified"
    image = {"name": "models", "image": {"reference": "registry.example/m:1"}}
    full["spec"]["volumes"] = [{"name": "tmp", "emptyDir": {}}, image]
    assert compact(POD, full)["spec"]["volumes"] == [image], "a failed pull is said to be that of a container"
    replica_set = {**pod("a", 1), "spec": {"replicas": 2, "template": {}}, "status": {"replicas": 2}}
    kept = compact(REPLICA_SET, replica_set)
    assert kept["spec"] == {"replicas": 2, TEMPLATE_DIGEST: template_digest(replica_set)}
    assert template_digest(kept) == template_digest(replica_set)
    template = {**pod("a", 1), "spec": {"template": {"spec": {"volumes": []}}}}
    kept = compact(DEPLOYMENT, template)["spec"]
    assert kept.pop(TEMPLATE_DIGEST) == template_digest(template)
    assert kept == template["spec"], "drift is looked for in the whole child"


def test_an_object_of_a_known_version_is_not_reduced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = InformerCache()
    cache.put(POD, pod("a", 3))
    cached = cache.get(POD, "space", "a")
    reduced: list[str] = []

    def counted(kind: Kind, obj: Object) -> Object:
        reduced.append(obj["metadata"]["name"])
        return compact(kind, obj)

    monkeypatch.setattr(compiled_module, "compact", counted)
    cache.put(POD, pod("a", 3))
    assert cache.replace(POD, None, [pod("a", 3), pod("b", 4)], "5") == {KEY}
    assert reduced == ["b"]
    assert cache.get(POD, "space", "a") is cached
    cache.put(POD, pod("a", 6))
    assert reduced == ["b", "a"]


def test_the_lists_of_opening_watches_do_not_disturb_the_relist() -> None:
    """They run in threads of their own."""

    class Empty:
        def list(self, *_: Any) -> tuple[str, Iterator[Object]]:
            return "10", iter(())

    server: Any = Empty()
    cache = InformerCache()
    client = KubeClient(server, cache, Metrics(), lambda: True)
    relister = Relister(client, cache, Watches(time.monotonic, ()), Sources((None,)), lambda: (), (None,))

    def open_watches() -> None:
        for number in range(20_000):
            relister.list((DEPLOYMENT, f"space-{number}"))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as threads:
            opening = threads.submit(open_watches)
            while not opening.done():
                relister.relist()
    finally:
        sys.setswitchinterval(before)
    opening.result()


def test_a_version_of_a_pod_is_read_once() -> None:
    cache = InformerCache()
    cache.put(POD, pod("b", 3))
    cache.put(POD, pod("a", 3))
    before = cache.pods(KEY)
    assert [each.name for each in before] == ["a", "b"]
    cache.put(POD, pod("a", 3))
    cache.put(POD, pod("b", 4))
    after = cache.pods(KEY)
    assert after[0] is before[0]
    assert after[1] is not before[1]
    cache.put(POD, pod("a", 5, owner="other"))
    cache.remove(POD, pod("b", 6))
    assert cache.pods(KEY) == []
    assert [each.name for each in cache.pods(("space", "other"))] == ["a"]


def exposed(name: str, created: int, version: int, *, namespace: str = "space", **fields: Any) -> Object:
    """Return a FastGenDeployment that the gateway routes to."""
    made = f"2026-01-01T00:00:{created:02}Z"
    metadata = {"name": name, "namespace": namespace, "resourceVersion": str(version), "creationTimestamp": made}
    spec = {"model": {"source": "file:///m", "servedName": "m"}, "gateway": {"expose": True}, **fields}
    return {"apiVersion": "fastgen.dev/v1alpha1", "kind": "FastGenDeployment", "metadata": metadata, "spec": spec}


def holder(cache: InformerCache, name: str = "a", namespace: str = "space") -> Key | None:
    resource = cache.get(FASTGEN, namespace, name)
    assert resource is not None
    return cache.holder(resource)


def test_the_oldest_exposed_resource_holds_the_name_of_its_model() -> None:
    cache = InformerCache()
    cache.put(FASTGEN, exposed("a", 5, 1))
    assert holder(cache) == ("space", "a")
    cache.put(FASTGEN, exposed("b", 4, 2, namespace="other"))
    assert holder(cache) == ("other", "b")
    # At the same time: by namespace and name, as the gateway does.
    cache.put(FASTGEN, exposed("c", 4, 3))
    assert holder(cache) == ("other", "b")
    cache.put(FASTGEN, exposed("b", 4, 4, namespace="other", gateway={"expose": False}))
    assert holder(cache) == ("space", "c")
    assert holder(cache, "b", "other") is None, "it is not exposed"
    cache.put(FASTGEN, exposed("c", 4, 5, model={"source": "file:///m", "servedName": "n"}))
    assert holder(cache) == ("space", "a")
    cache.put(FASTGEN, exposed("b", 4, 6, namespace="other"))
    cache.remove(FASTGEN, exposed("b", 4, 7, namespace="other"))
    assert holder(cache) == ("space", "a")


def test_a_resource_without_a_served_name_holds_its_own_and_one_that_says_nothing_holds_none() -> None:
    cache = InformerCache()
    cache.put(FASTGEN, exposed("m", 1, 1, model={"source": "file:///m"}))
    cache.put(FASTGEN, exposed("a", 2, 2))
    assert holder(cache) == ("space", "m")
    cache.put(FASTGEN, exposed("a", 2, 3, gateway={}))
    assert holder(cache) is None


def test_names_of_large_resources_and_of_other_operators_resources_count() -> None:
    cache = InformerCache(lambda resource: "operatorClass" not in resource["spec"])
    cache.put(FASTGEN, exposed("a", 9, 1))
    cache.put(FASTGEN, exposed("large", 5, 2, padding=[f"x{n}" for n in range(5000)]))
    assert holder(cache) == ("space", "large")
    cache.put(FASTGEN, exposed("classed", 4, 3, operatorClass="blue"))
    assert holder(cache) == ("space", "classed")
    cache.replace(FASTGEN, None, [exposed("a", 9, 1)], "9")
    assert holder(cache) == ("space", "a")

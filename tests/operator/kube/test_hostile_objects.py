"""Deep and large objects: decoded, reduced to a stub, packed, and listed in pages of limited size. Without a server."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from urllib3 import HTTPSConnectionPool
from urllib3.connection import HTTPConnection
from urllib3.exceptions import MaxRetryError, NewConnectionError, ReadTimeoutError

from fastgen_operator import decode as decode_module
from fastgen_operator.decode import decode, decode_event, decode_page
from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, POD, REPLICA_SET, Kind, Object
from fastgen_operator.kube import cache as compiled_module
from fastgen_operator.kube.cache import InformerCache
from fastgen_operator.kube.clock import ClusterClock
from fastgen_operator.kube.compact import LEVELS, compact, pack, unpack
from fastgen_operator.kube.transport import ApiServer, KubeError
from fastgen_operator.labels_and_annotations import OWNER_LABEL
from fastgen_operator.metrics import Metrics
from fastgen_operator.objects.stored import FAULT
from fastgen_operator.page_limit import PageLimit
from harness.hostile import deep, manifest
from harness.objects import deployment, stored

ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='{}[]",:\\a\n', max_size=8),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(alphabet='{"]\\', max_size=3), values),
    max_leaves=20,
)


def levels(value: Any) -> int:
    """Return the levels of nesting, without recursion."""
    most, rest = 0, [(value, 1)]
    while rest:
        item, level = rest.pop()
        if isinstance(item, dict | list):
            most = max(most, level)
            rest += [(child, level + 1) for child in (item.values() if isinstance(item, dict) else item)]
    return most


@pytest.mark.parametrize("shape", ["map", "list"])
@pytest.mark.parametrize("depth", [10, 100, 400, 700, 1000, 3000, 9000])
def test_json_of_any_depth_is_decoded_with_all_that_lies_less_deep(depth: int, shape: str) -> None:
    text = f'{{"before": ["{{["], "deep": {deep(depth, shape)}, "after": {{"x": "]\\"}}"}}}}'.encode()
    found = decode(text)
    assert (found["before"], found["after"]) == (["{["], {"x": ']"}'})
    assert levels(found["deep"]) == min(depth, levels(found["deep"]))
    assert levels(found["deep"]) > LEVELS or depth <= LEVELS
    event = decode_event(b'{"type":"ADDED","object":' + text + b"}")
    assert (event[0], event[1]["after"]) == ("ADDED", found["after"])
    page = b'{"metadata":{"resourceVersion":"7"},"items":[{"n":1},%b,{"n":2}]}' % text
    metadata, items = decode_page(page)
    assert metadata == {"resourceVersion": "7"}
    assert [item.get("n") for item in items] == [1, None, 2]


@given(ANY_JSON, st.integers(1, 4))
def test_only_what_is_nested_too_deeply_is_cut(value: Any, limit: int) -> None:
    def cut(part: Any, level: int) -> Any:
        if isinstance(part, dict | list) and level > limit:
            return None
        if isinstance(part, dict):
            return {name: cut(child, level + 1) for name, child in part.items()}
        return [cut(child, level + 1) for child in part] if isinstance(part, list) else part

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_module, "_DEPTH", limit)
        assert json.loads(decode_module._cut(json.dumps(value).encode())) == cut(value, 1)


def test_the_managed_fields_of_a_large_resource_are_dropped_before_it_is_decoded() -> None:
    managed = [{"manager": f"m{number}", "fieldsV1": {"f:spec": {}}} for number in range(5000)]
    obj = {"kind": "FastGenDeployment", "metadata": {"name": "chat", "managedFields": managed}, "spec": {"a": managed}}
    found = decode(json.dumps(obj).encode())
    assert found["metadata"] == {"name": "chat", "managedFields": []}
    assert found["spec"] == obj["spec"]
    other = {**obj, "kind": "Deployment"}
    assert decode(json.dumps(other).encode()) == other, "theirs are read"


def fgd(pod_spec: str, **metadata: Any) -> Object:
    obj: Object = decode(manifest("chat", pod_spec).encode())
    obj["metadata"] |= {"namespace": "space", "uid": "u", "resourceVersion": "5", "generation": 2, **metadata}
    return obj


@pytest.mark.parametrize("shape", ["map", "list"])
def test_a_resource_of_more_levels_than_the_limit_is_kept_as_a_stub_that_names_the_field(shape: str) -> None:
    # The resource, its spec, podTemplate and podTemplate.spec are four levels, the last of them in `deep`.
    assert FAULT not in compact(FASTGEN, fgd(deep(LEVELS - 3, shape)))
    for depth in (LEVELS - 2, 100, 300, 900, 9000):
        found = compact(FASTGEN, {**fgd(deep(depth, shape)), "status": {"url": "x"}})
        assert found[FAULT] == "spec.podTemplate.spec.a.…: nested more than 32 levels deep: flatten or remove it"
        assert found["status"] == {"url": "x"}, "or each reconcile would write it again"
        assert found["spec"] == {}
        assert found["metadata"]["generation"] == 2
        assert compact(FASTGEN, json.loads(json.dumps(found))) == found, "as kopf hands it on"


def test_a_large_resource_is_kept_as_a_stub_that_names_the_largest_field() -> None:
    found = compact(FASTGEN, fgd(json.dumps({"containers": [{"name": "x", "image": "y" * 300_000}]})))
    assert found[FAULT] == "spec.podTemplate.spec.containers.…: the object has 293 KiB, above 256 KiB: shorten it"


def test_what_the_operator_does_not_read_of_a_resource_does_not_count() -> None:
    managed = [{"manager": "x" * 300_000, "operation": "Apply", "fieldsV1": json.loads(deep(50))}]
    full = fgd("{}", annotations={"note": "x" * 200_000}, managedFields=managed, finalizers=["x" * 300_000])
    kept = compact(FASTGEN, full)
    assert FAULT not in kept
    assert kept["metadata"].keys() == {"name", "namespace", "uid", "resourceVersion", "generation", "annotations"}
    assert kept["metadata"]["annotations"] == {}


@pytest.mark.parametrize("kind", [POD, REPLICA_SET, DEPLOYMENT], ids=lambda kind: kind.name)
def test_a_stub_of_a_child_keeps_what_tells_its_owner(kind: Kind) -> None:
    owners = [{"uid": "a", "name": "x" * 2_000_000}, {"uid": "b", "controller": True}]
    labels = {OWNER_LABEL: "chat", "pod-template-hash": "h", "more": "x"}
    metadata = {"name": "a", "namespace": "s", "uid": "u", "resourceVersion": "1", "labels": labels}
    kept = compact(kind, {"metadata": {**metadata, "ownerReferences": owners}, "spec": {"template": {}}})
    assert "metadata.ownerReferences.0.name" in kept[FAULT]
    assert kept["metadata"]["ownerReferences"] == owners[1:]
    assert kept["metadata"]["labels"] == {OWNER_LABEL: "chat", "pod-template-hash": "h"}


def test_a_large_spec_is_cached_as_text_and_read_back_as_it_was() -> None:
    containers = [{"name": f"é{number}", "image": "x" * 40, "env": [{"name": "a"}]} for number in range(300)]
    resource = compact(FASTGEN, fgd(json.dumps({"containers": containers})))
    child = compact(DEPLOYMENT, deployment(stored(podTemplate={"spec": {"containers": containers}})))
    for kind, kept in ((FASTGEN, resource), (DEPLOYMENT, child)):
        packed = pack(kind, kept)
        assert len(str(packed)) < len(str(kept)) / 3
        assert unpack(packed) == kept
        assert packed["metadata"]["name"] == "chat"
    small = compact(FASTGEN, fgd("{}"))
    assert pack(FASTGEN, small) is small


def test_an_object_that_cannot_be_reduced_is_kept_as_a_stub_and_stops_no_list(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(kind: Kind, obj: Object) -> Object:
        if obj["metadata"]["name"] == "bad":
            raise TypeError("of a kind that nobody has foreseen")
        return compact(kind, obj)

    monkeypatch.setattr(compiled_module, "compact", broken)
    cache = InformerCache()
    with caplog.at_level(logging.CRITICAL):
        cache.replace(FASTGEN, None, [fgd("{}", name=name) for name in ("bad", "good")], "9")
        cache.put(FASTGEN, fgd("{}", name="bad", resourceVersion="10"))
    assert sorted(cache.resources()) == [("space", "bad"), ("space", "good")]
    bad = cache.get(FASTGEN, "space", "bad")
    assert bad is not None
    assert bad[FAULT] == "an unexpected value (TypeError: of a kind that nobody has foreseen): correct it"


def test_of_resources_of_other_classes_only_a_stub_is_kept_and_they_have_no_fault() -> None:
    cache = InformerCache(lambda resource: resource["spec"].get("operatorClass") == "blue")
    for name, chosen in (("ours", "blue"), ("theirs", "green"), ("plain", None)):
        obj = fgd(deep(100), name=name)
        obj["spec"] |= {} if chosen is None else {"operatorClass": chosen}
        cache.put(FASTGEN, obj)
    theirs = cache.get(FASTGEN, "space", "theirs") or {}
    assert theirs["spec"] == {"operatorClass": "green"}
    assert FAULT not in theirs
    assert "status" not in theirs
    assert (cache.get(FASTGEN, "space", "plain") or {})["spec"] == {}
    assert FAULT in (cache.get(FASTGEN, "space", "ours") or {})


class Pages(ApiServer):
    """An API server with objects of the given sizes in bytes."""

    def __init__(self, sizes: list[int], clock: ClusterClock | None = None) -> None:
        super().__init__(Any, Metrics(), 1.0, clock=clock)  # type: ignore[arg-type]
        self.sizes, self.limits, self.read = sizes, list[int](), 0

    def _send(self, *request: Any, most_bytes: int | None = None) -> bytes | None:
        query = dict(request[2])
        start, limit = int(query.get("continue", 0)), int(query["limit"])
        self.limits.append(limit)
        end = start + limit
        items = [{"n": start + place, "x": "x" * size} for place, size in enumerate(self.sizes[start:end])]
        metadata = {"resourceVersion": "7"} | ({"continue": str(end)} if end < len(self.sizes) else {})
        data = json.dumps({"metadata": metadata, "items": items}).encode()
        assert most_bytes is not None
        self.read += min(len(data), most_bytes)
        return data if len(data) <= most_bytes else None


@pytest.mark.parametrize(
    ("sizes", "most_pages"),
    [
        ([3000] * 5000, 13),
        ([1_400_000] * 60, 40),
        ([100] * 600 + [1_400_000] * 20 + [100] * 600, 32),
        ([], 1),
    ],
    ids=["pods", "large", "small-then-large", "none"],
)
def test_a_list_is_read_in_pages_that_follow_the_size_of_the_objects(sizes: list[int], most_pages: int) -> None:
    server = Pages(sizes)
    version, items = server.list("/path", [])
    assert version == "7"
    assert [item["n"] for item in items] == list(range(len(sizes)))
    assert len(server.limits) <= most_pages
    assert max(server.limits) <= 500
    assert server.read < 4 * sum(sizes) + (20 << 20), "not most pages are read for nothing"


def test_an_object_larger_than_a_page_fails_its_list_only() -> None:
    server = Pages([100, 20 << 20, 100])
    _, items = server.list("/path", [])
    with pytest.raises(KubeError, match="one object is larger than 8 MiB"):
        _all(items)


class SlowPages(Pages):
    """An API server that takes `each` seconds for an object and `base` for a page, which must arrive within 30."""

    def __init__(self, sizes: list[int], each: float, base: float = 0.0) -> None:
        self.now, self.each, self.base = 0.0, each, base
        super().__init__(sizes, ClusterClock(elapsed=lambda: self.now))

    def _send(self, *request: Any, most_bytes: int | None = None) -> bytes | None:
        answer = super()._send(*request, most_bytes=most_bytes)
        self.now += (seconds := min(30.0, self.base + self.each * self.limits[-1]))
        if seconds == 30.0:
            silence = ReadTimeoutError(HTTPSConnectionPool("localhost"), "/path", "Read timed out.")
            raise KubeError(0, "reaching the API server") from MaxRetryError(silence.pool, "/path", silence)
        return answer


@pytest.mark.parametrize("each", [0.1, 2.0, 10.0])
def test_a_server_that_is_too_slow_for_a_page_is_asked_for_smaller_ones(each: float) -> None:
    server = SlowPages([400_000] * 200, each)
    found: list[Any] = []
    failures = 0
    while not found:
        try:
            found = _all(server.list("/path", [])[1])
        except KubeError:
            failures += 1
    assert len(found) == 200
    assert failures <= 2
    server.each = 0.0
    _all(server.list("/path", [])[1])
    assert max(server.limits[-20:]) >= 8, "pages grow again when the server is faster"


@pytest.mark.parametrize(("first", "base"), [(20, 6.0), (20, 25.0), (1, 4.0)])
def test_pages_of_a_server_that_is_slow_whatever_their_size_do_not_shrink(first: int, base: float) -> None:
    """Otherwise a list would take so many requests that it expires before its end."""
    server = SlowPages([1000] * 200, 0.0, base)
    server._page_limits["/path"] = PageLimit(first)
    assert len(_all(server.list("/path", [])[1])) == 200
    assert len(server.limits) <= 20


def test_a_server_that_cannot_be_reached_does_not_make_pages_smaller() -> None:
    class Unreachable(Pages):
        def _send(self, *request: Any, most_bytes: int | None = None) -> bytes | None:
            super()._send(*request, most_bytes=most_bytes)
            refused = NewConnectionError(HTTPConnection("localhost"), "refused")
            raise KubeError(0, "reaching the API server") from refused

    server = Unreachable([100])
    for _ in range(3):
        with pytest.raises(KubeError):
            server.list("/path", [])
    assert len(set(server.limits)) == 1


def _all(items: Iterator[Any]) -> list[Any]:
    return list(items)

"""Where a download may run: nodes that could run a replica."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen_operator.children.download_placement import ANYWHERE, Placement, placement_of
from fastgen_operator.children.pod import build_pod
from fastgen_operator.kinds import Object
from harness.objects import desired_of, stored

GPU = "nvidia.com/gpu"
ONE_GPU: Object = {"engine": {"device": "cuda"}, "resources": {"gpu": {"count": 1}}}
LINUX = {"kubernetes.io/os": "linux"}
FULL_SIZE = {"cpu": "8", "memory": "32Gi"}


def node(name: str, *, labels: dict[str, str] | None = None, taints: Any = (), **allocatable: str) -> Object:
    has = {**FULL_SIZE, **{key.replace("gpu", GPU): value for key, value in allocatable.items()}}
    return {
        "metadata": {"name": name, "labels": {**LINUX, "kubernetes.io/hostname": f"host-{name}", **(labels or {})}},
        "spec": {"taints": list(taints)},
        "status": {"allocatable": has},
    }


def replica(**spec: Any) -> Object:
    found: Object = build_pod(desired_of(stored(**spec)))["spec"]
    return found


def taint(key: str, value: str = "", effect: str = "NoSchedule") -> Object:
    return {"key": key, "value": value, "effect": effect}


WITH, WITHOUT = node("a", gpu="2"), node("b")
SMALL = node("c", memory="1Gi")
TAINTED = node("t", gpu="2", taints=[taint(GPU, "present")])


SANDBOX = node("s", gpu="2", taints=[taint("sandbox.gke.io/runtime", "gvisor")])
CORDONED = node("o", gpu="2", taints=[taint("node.kubernetes.io/unschedulable")])
SANDBOXED: Object = {**ONE_GPU, "scheduling": {"runtimeClassName": "gvisor"}}


def affine(*terms: Object) -> Object:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": list(terms)}}
    return {"scheduling": {"affinity": {"nodeAffinity": required}}}


def needs(key: str, operator: str, *values: str) -> Object:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("spec", "nodes", "placement"),
    [
        (ONE_GPU, [WITH, WITHOUT], Placement(("host-a",))),
        (ONE_GPU, [WITH], ANYWHERE),
        ({}, [WITH, WITHOUT], ANYWHERE),
        # An autoscaler of the cluster adds a node for a pod that requests what no node has.
        (ONE_GPU, [WITHOUT], Placement(requests={GPU: "1"})),
        (ONE_GPU, [], Placement(requests={GPU: "1"})),
        ({}, [], ANYWHERE),
        # Not only GPUs.
        ({"resources": {"requests": {"memory": "8Gi"}}}, [WITHOUT, SMALL], Placement(("host-b",))),
        ({"resources": {"limits": {"memory": "8Gi"}}}, [WITHOUT, SMALL], Placement(("host-b",))),
        # Selectors.
        (
            {**ONE_GPU, "scheduling": {"nodeSelector": {"pool": "x"}}},
            [WITH, node("d", gpu="1", labels={"pool": "x"})],
            Placement(("host-d",)),
        ),
        ({**ONE_GPU, "scheduling": {"nodeSelector": {"pool": "x"}}}, [WITH], Placement(requests={GPU: "1"})),
        # Taints: only those that a replica tolerates, unless an admission plugin adds the toleration to replicas.
        (ONE_GPU, [WITH, TAINTED, WITHOUT], Placement(("host-a",))),
        (ONE_GPU, [TAINTED, WITHOUT], Placement(("host-t",), (GPU,))),
        (ONE_GPU, [TAINTED], Placement(tolerated=(GPU,))),
        (
            {**ONE_GPU, "scheduling": {"tolerations": [{"key": GPU, "operator": "Exists"}]}},
            [TAINTED, WITHOUT],
            Placement(("host-t",)),
        ),
        (ONE_GPU, [node("e", gpu="1", taints=[taint("other")])], Placement(requests={GPU: "1"})),
        # A RuntimeClass may add tolerations to both pods, but hardly of an extended resource or a cordoned node.
        (SANDBOXED, [WITH, SANDBOX, WITHOUT], Placement(("host-a", "host-s"))),
        (SANDBOXED, [TAINTED, WITHOUT], Placement(("host-t",), (GPU,))),
        (SANDBOXED, [CORDONED, WITHOUT], Placement(requests={GPU: "1"})),
        (
            ONE_GPU,
            [node("e", gpu="1", taints=[taint("o", effect="PreferNoSchedule")]), WITHOUT],
            Placement(("host-e",)),
        ),
    ],
)
def test_the_download_runs_where_a_replica_fits(spec: Object, nodes: list[Object], placement: Placement) -> None:
    assert placement_of(replica(**spec), nodes) == placement


@pytest.mark.parametrize(
    ("term", "matches"),
    [
        (needs("pool", "In", "x", "y"), True),
        (needs("pool", "In", "y"), False),
        (needs("pool", "NotIn", "y"), True),
        (needs("none", "NotIn", "y"), True),
        (needs("pool", "Exists"), True),
        (needs("none", "Exists"), False),
        (needs("none", "DoesNotExist"), True),
        (needs("size", "Gt", "3"), True),
        (needs("size", "Lt", "3"), False),
        (needs("pool", "Gt", "3"), False),
        ({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["a"]}]}, True),
        ({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["z"]}]}, False),
        ({}, False),
    ],
)
def test_required_node_affinity_is_evaluated_as_the_scheduler_does(term: Object, matches: bool) -> None:
    chosen, other = node("a", gpu="1", labels={"pool": "x", "size": "4"}), WITHOUT
    found = placement_of(replica(**ONE_GPU, **affine(term)), [chosen, other])
    assert found == (Placement(("host-a",)) if matches else Placement(requests={GPU: "1"}))


def test_the_pod_keeps_its_own_affinity_and_tolerations() -> None:
    term, other = needs("pool", "In", "x"), needs("pool", "In", "y")
    pod = {**replica(**affine(term, other)), "tolerations": [{"key": "mine"}]}
    placed = Placement(("h1", "h2"), (GPU,), {GPU: "1"}).place(pod)
    required = placed["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    only = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["h1", "h2"]}
    assert required["nodeSelectorTerms"] == [
        {"matchExpressions": [*each["matchExpressions"], only]} for each in (term, other)
    ]
    assert placed["tolerations"] == [{"key": "mine"}, {"key": GPU, "operator": "Exists"}]
    assert placed["containers"][0]["resources"]["limits"] == {GPU: "1"}
    assert ANYWHERE.place(pod) == pod

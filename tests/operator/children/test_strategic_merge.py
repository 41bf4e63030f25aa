"""Our strategic merge patch gives the same results as the API server's."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.controlplane import ControlPlane
from fastgen_operator.children.pod import build_pod
from fastgen_operator.children.strategic_merge import strategic_merge
from fastgen_operator.kinds import Object
from harness.objects import desired_of, stored
from harness.space import Space

SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SIDECAR = {"name": "proxy", "image": "proxy:1", "securityContext": SAFE}
PLAIN = build_pod(desired_of(stored()))["spec"]


def of_engine(**fields: Any) -> Object:
    return {"containers": [{"name": "engine", **fields}]}


# A patch, and the fields it changes in a pod with two containers.
POD = {
    "containers": [
        {"name": "a", "args": ["1"], "env": [{"name": "X", "value": "1"}]},
        {"name": "b", "ports": [{"containerPort": 1}]},
    ],
    "volumes": [{"name": "v", "emptyDir": {}}],
    "tolerations": [{"key": "old"}],
    "nodeSelector": {"disk": "fast"},
}
MERGES: dict[str, tuple[Object, Object]] = {
    "an empty patch": ({}, {}),
    "a scalar": ({"priority": 1}, {"priority": 1}),
    "a map": ({"nodeSelector": {"zone": "a"}}, {"nodeSelector": {"disk": "fast", "zone": "a"}}),
    "null in a map": ({"nodeSelector": {"disk": None, "zone": "a"}}, {"nodeSelector": {"zone": "a"}}),
    "a map replaced": ({"nodeSelector": {"$patch": "replace", "zone": "a"}}, {"nodeSelector": {"zone": "a"}}),
    "retained keys of a map": (
        {"nodeSelector": {"$retainKeys": ["zone"], "zone": "a"}},
        {"nodeSelector": {"zone": "a"}},
    ),
    "an atomic list": ({"tolerations": [{"key": "new"}]}, {"tolerations": [{"key": "new"}]}),
    "another source for a volume": (
        {"volumes": [{"name": "v", "secret": {"secretName": "s"}}]},
        {"volumes": [{"name": "v", "secret": {"secretName": "s"}}]},
    ),
    "a change of the same source": (
        {"volumes": [{"name": "v", "emptyDir": {"medium": "Memory"}}]},
        {"volumes": [{"name": "v", "emptyDir": {"medium": "Memory"}}]},
    ),
    "a deleted container": (
        {"containers": [{"name": "a", "$patch": "delete"}]},
        {"containers": [POD["containers"][1]]},  # type: ignore[index]
    ),
    "all containers replaced": (
        {"containers": [{"$patch": "replace"}, {"name": "c", "env": [{"name": "gone", "$patch": "delete"}]}]},
        {"containers": [{"name": "c", "env": []}]},
    ),
    "a nested list item": (
        {"containers": [{"name": "a", "env": [{"name": "Y", "value": "2"}, {"name": "X", "value": "3"}]}]},
        {
            "containers": [
                {"name": "a", "args": ["1"], "env": [{"name": "X", "value": "3"}, {"name": "Y", "value": "2"}]},
                {"name": "b", "ports": [{"containerPort": 1}]},
            ]
        },
    ),
    "an added container": (
        {"containers": [{"name": "c"}]},
        {"containers": [*POD["containers"], {"name": "c"}]},  # type: ignore[misc]
    ),
}


@pytest.mark.parametrize("case", MERGES)
def test_a_patch_is_merged_strategically(case: str) -> None:
    patch, changed = MERGES[case]
    before = copy.deepcopy((POD, patch))
    assert strategic_merge(POD, patch, "p") == {**POD, **changed}
    assert (POD, patch) == before, "an argument was changed"


NAMES = st.sampled_from(["a", "b", "c"])
SCALARS = st.sampled_from([0, 1, "", "x", True, None])
ITEMS = st.one_of(
    st.fixed_dictionaries({"name": NAMES}, optional={"value": SCALARS, "map": st.dictionaries(NAMES, SCALARS)}),
    st.fixed_dictionaries({"name": NAMES, "$patch": st.just("delete")}),
    st.just({"$patch": "replace"}),
)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "scalar": SCALARS,
        "map": st.one_of(st.none(), st.dictionaries(NAMES, SCALARS)),
        "env": st.lists(ITEMS, max_size=4),
        "volumes": st.lists(ITEMS, max_size=4),
        "list": st.lists(SCALARS, max_size=3),
        "$patch": st.sampled_from(["replace", "merge"]),
        "$retainKeys": st.lists(st.sampled_from(["env", "map"])),
    },
)


@given(FIELDS)
def test_an_empty_patch_changes_nothing_and_merging_is_idempotent(patch: Object) -> None:
    base: Object = {"env": [{"name": "a", "value": 1}], "map": {"b": 1}, "volumes": [{"name": "c", "map": {"a": 1}}]}
    assert strategic_merge(base, {}, "p") == base
    once = strategic_merge(base, patch, "p")
    assert _by_name(strategic_merge(once, patch, "p")) == _by_name(once)
    assert "$" not in json.dumps(once), "a directive remains"


def _by_name(fields: Object) -> Object:
    """Sort lists by merge key: items that a patch deletes and adds move to the end."""
    named = {
        name: sorted(fields[name], key=lambda item: str(item["name"]))
        for name in ("env", "volumes")
        if fields.get(name)
    }
    return {**fields, **named}


@pytest.mark.controlplane
def test_the_api_server_merges_to_the_same_result(plane: ControlPlane, space: Space) -> None:
    """Compare with a strategic merge patch of the same Deployment by the API server."""
    space.kubectl("label", "namespace", space.name, "pod-security.kubernetes.io/enforce=privileged", "--overwrite")
    labels = {"app": "x"}
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "x"},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": PLAIN},
        },
    }
    space.apply(deployment)
    patches: dict[str, Object] = {
        "a sidecar": {"containers": [SIDECAR]},
        "variables": of_engine(env=[{"name": "HOME", "value": "/x"}, {"name": "NEW", "value": "1"}]),
        "one variable less": of_engine(env=[{"name": "HOME", "$patch": "delete"}]),
        "only these variables": of_engine(env=[{"$patch": "replace"}, {"name": "NEW", "value": "1"}]),
        "another probe": of_engine(livenessProbe={"$patch": "replace", "tcpSocket": {"port": 8000}}),
        "a mount less": of_engine(volumeMounts=[{"mountPath": "/cache", "$patch": "delete"}]),
        "another volume": {
            "volumes": [{"name": "cache", "$retainKeys": ["name", "secret"], "secret": {"secretName": "s"}}]
        },
        "tolerations": {"tolerations": [{"key": "a", "operator": "Exists"}]},
    }
    for case, patch in patches.items():
        body = json.dumps({"spec": {"template": {"spec": patch}}})
        command = ("patch", "deployment/x", "--type=strategic", "--dry-run=server", "--output=json", "--patch", body)
        theirs = json.loads(space.kubectl(*command))["spec"]["template"]["spec"]
        deployment["spec"]["template"]["spec"] = strategic_merge(PLAIN, patch, "p")  # type: ignore[index]
        ours = json.loads(
            plane.kubectl(
                *("--namespace", space.name, "apply", "--server-side", "--force-conflicts", "--dry-run=server"),
                *("--output=json", "--filename", "-"),
                stdin=json.dumps({**deployment, "metadata": {"name": "y"}}),
            )
        )["spec"]["template"]["spec"]
        assert _in_order(ours) == _in_order(theirs), case


def _in_order(spec: Object) -> Object:
    """Sort keyed lists: the API server puts new items first, and the order has no meaning."""
    for container in (*spec["containers"], *spec.get("initContainers", ())):
        for name, key in (("env", "name"), ("volumeMounts", "mountPath"), ("ports", "containerPort")):
            container.get(name, []).sort(key=lambda item, key=key: item[key])
    for name in ("containers", "volumes", "initContainers"):
        spec.get(name, []).sort(key=lambda item: item["name"])
    return spec

"""Manifests of the children: command line, shutdown, probes, security."""

from __future__ import annotations

from typing import Any

import pytest

from fastgen_operator.children.model_volume import SAFE_TO_EVICT
from fastgen_operator.children.pod import build_pod
from fastgen_operator.children.service import endpoint_url
from fastgen_operator.kinds import DEPLOYMENT, SERVICE, Object
from harness.objects import UID, desired_of, manifest, pod_template, stored


def pod_of(**spec: Any) -> Object:
    found: Object = build_pod(desired_of(stored(**spec)))["spec"]
    return found


def container_of(**spec: Any) -> Object:
    container: Object = pod_of(**spec)["containers"][0]
    return container


def test_the_command_line_contains_every_setting() -> None:
    assert container_of()["args"] == [
        *("serve", "/models/tiny.gguf", "--port", "8000", "--served-model-name", "chat"),
        *("--device", "cpu", "--dtype", "auto", "--block-size", "64"),
        *("--memory-percent", "90", "--swap-space", "0Gi", "--max-queued-requests", "1024"),
        *("--drain-seconds", "60", "--prefix-caching"),
    ]


def test_optional_settings_and_extra_arguments_are_passed() -> None:
    engine = {
        "device": "cpu",
        "tensorParallel": 2,
        "maxSequences": 4,
        "maxModelLength": 99,
        "extraArgs": ["--chunking", "greedy"],
    }
    model = {"source": "file:///m", "servedName": "tiny"}
    words = container_of(engine=engine, model=model)["args"]
    assert words[words.index("--served-model-name") + 1] == "tiny"
    assert words[words.index("--tensor-parallel") + 1] == "2"
    assert words[words.index("--max-sequences") + 1] == "4"
    assert words[words.index("--max-model-length") + 1] == "99"
    assert words[-2:] == ["--chunking", "greedy"]


@pytest.mark.parametrize("drain", [0, 60, 600])
def test_the_grace_period_covers_endpoint_removal_drain_and_shutdown(drain: int) -> None:
    pod = pod_of(drainSeconds=drain)
    assert pod["terminationGracePeriodSeconds"] == 15 + drain + 15
    assert pod["containers"][0]["lifecycle"] == {"preStop": {"sleep": {"seconds": 15}}}


@pytest.mark.parametrize(("deadline", "threshold"), [(10, 5), (11, 6), (1800, 900)])
def test_the_startup_probe_allows_the_whole_startup_deadline(deadline: int, threshold: int) -> None:
    probe = container_of(startupDeadlineSeconds=deadline)["startupProbe"]
    assert (probe["failureThreshold"], probe["periodSeconds"]) == (threshold, 2)
    assert probe["httpGet"]["path"] == "/ready"


def test_readiness_and_liveness_probe_different_endpoints() -> None:
    container = container_of()
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["readinessProbe"]["failureThreshold"] == 2


def test_the_image_defaults_to_the_operators() -> None:
    assert container_of()["image"] == "engine:test"
    assert container_of(engine={"device": "cpu", "image": "mine:1"})["image"] == "mine:1"


def test_gpus_are_added_to_the_limits() -> None:
    resources = {"gpu": {"count": 2}, "requests": {"cpu": 1}, "limits": {"memory": "4Gi"}}
    assert container_of(resources=resources)["resources"] == {
        "requests": {"cpu": "1"},
        "limits": {"memory": "4Gi", "nvidia.com/gpu": "2"},
    }
    assert "resources" not in container_of()


@pytest.mark.parametrize(
    ("engine", "resources", "ranks", "shared"),
    [
        ({"device": "cpu"}, {}, None, "256Mi"),
        ({"device": "cpu", "tensorParallel": 2}, {}, "2", "256Mi"),
        ({"device": "cuda"}, {"gpu": {"count": 1}}, None, "256Mi"),
        ({"device": "cuda"}, {"gpu": {"count": 4}}, "4", "1Gi"),
        ({"device": "cuda", "tensorParallel": 4}, {"gpu": {"count": 4}}, "4", "1Gi"),
        ({"device": "cuda"}, {}, None, "256Mi"),  # a device is claimed
        ({"device": "cuda", "tensorParallel": 2}, {}, "2", "1Gi"),
    ],
)
def test_a_model_is_divided_among_the_gpus_of_its_pod(
    engine: dict[str, Any], resources: dict[str, Any], ranks: str | None, shared: str
) -> None:
    pod = pod_of(engine=engine, resources=resources)
    words = [*pod["containers"][0]["args"], "--tensor-parallel", None]
    assert words[words.index("--tensor-parallel") + 1] == ranks
    (volume,) = (each["emptyDir"] for each in pod["volumes"] if each["name"] == "shm")
    assert volume == {"medium": "Memory", "sizeLimit": shared}


def test_the_pod_is_restricted_and_writes_to_mounted_volumes_only() -> None:
    pod = pod_of()
    container = pod["containers"][0]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert set(mounts) == {"/tmp", "/cache", "/dev/shm"}
    assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
    for variable in container["env"]:
        assert variable["value"].startswith(("/tmp", "/cache")), variable


def test_spread_constraints_select_this_deployments_pods_of_one_template() -> None:
    constraint = pod_of(scheduling={"topologySpreadConstraints": [{"topologyKey": "zone"}]})[
        "topologySpreadConstraints"
    ][0]
    assert constraint["labelSelector"] == {"matchLabels": {"fastgen.dev/deployment": "chat"}}
    assert constraint["matchLabelKeys"] == ["pod-template-hash"]


def test_the_default_rollout_needs_no_spare_pod() -> None:
    deployment = manifest(DEPLOYMENT, stored())["spec"]
    assert deployment["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_children_are_owned_by_the_resource_and_have_a_stable_selector() -> None:
    deployment, service = manifest(DEPLOYMENT, stored()), manifest(SERVICE, stored())
    for child in (deployment, service):
        assert child["metadata"]["ownerReferences"][0]["uid"] == UID
        assert (child["metadata"]["name"], child["metadata"]["namespace"]) == ("chat", "space")
    selector = {"fastgen.dev/deployment": "chat"}
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == selector
    assert selector.items() <= deployment["spec"]["template"]["metadata"]["labels"].items()
    assert endpoint_url("space", "chat") == "http://chat.space.svc:8000/v1"


def test_pods_run_on_linux_unless_the_author_says_otherwise() -> None:
    assert pod_of(scheduling={"nodeSelector": {"disk": "fast"}})["nodeSelector"] == {
        "kubernetes.io/os": "linux",
        "disk": "fast",
    }
    assert pod_of(scheduling={"nodeSelector": {"kubernetes.io/os": "other"}})["nodeSelector"] == {
        "kubernetes.io/os": "other"
    }


def test_the_owner_of_a_volumes_files_is_changed_only_if_needed() -> None:
    assert pod_of()["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    assert pod_of(model={"source": "pvc://models/m"})["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


def test_scratch_space_is_bounded_and_does_not_hold_a_node() -> None:
    owner = stored(model={"source": "hf://a/b"}, podTemplate={"spec": {"volumes": [{"name": "own", "emptyDir": {}}]}})
    template = pod_template(owner)
    volumes = {volume["name"]: volume["emptyDir"] for volume in template["spec"]["volumes"]}
    assert all(volumes[name].get("sizeLimit") for name in ("tmp", "cache", "shm"))
    # Not the author's: it may have data that nothing else has.
    assert template["metadata"]["annotations"][SAFE_TO_EVICT] == "tmp,cache,shm,models"
    chosen = stored(podTemplate={"metadata": {"annotations": {SAFE_TO_EVICT: ""}}})
    assert pod_template(chosen)["metadata"]["annotations"] == {SAFE_TO_EVICT: ""}


def test_manifests_have_no_empty_fields() -> None:
    def check(value: Any, path: str) -> None:
        assert value not in (None, [], ""), path
        assert value != {} or path.endswith("emptyDir"), path
        for name, child in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        ):
            check(child, f"{path}.{name}")

    check(manifest(DEPLOYMENT, stored()), "deployment")

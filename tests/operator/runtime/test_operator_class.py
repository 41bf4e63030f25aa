"""Two releases of the chart in one cluster, each with a class: every operator handles its own resources only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.runtime.settings import Settings, parse_settings
from harness.chart import SYSTEM, install, operator_kubeconfig, uninstall
from harness.process import OperatorProcess
from harness.space import Space, resource
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

CHILDREN = "deployments,services,serviceaccounts,networkpolicies,poddisruptionbudgets"


@pytest.fixture
def operators(plane: ControlPlane, space: Space, tmp_path: Path) -> Iterator[dict[str | None, OperatorProcess]]:
    """The operators of the classes None and blue, both leaders, started with the arguments of the chart's releases."""
    plane.kubectl("delete", "leases", "--all", "--namespace", SYSTEM)
    started: dict[str | None, OperatorProcess] = {}
    blue = ("--set", "operatorClass=blue", "--set", "crd.install=false")
    for release, values in (("fastgen", ()), ("blue", blue)):
        pod = install(plane, *values, release=release)["spec"]["template"]["spec"]
        settings = parse_settings(pod["containers"][0]["args"])
        started[settings.operator_class] = OperatorProcess(
            operator_kubeconfig(plane, pod["serviceAccountName"]),
            tmp_path / f"{release}.log",
            ("--namespace", space.name, *class_arguments(settings)),
            election=("--lease-name", settings.lease, "--lease-namespace", SYSTEM),
        )
    try:
        for operator in started.values():
            operator.launch()
        for operator in started.values():
            eventually(lambda each=operator: each.is_ready() and each.leads(), within=120, what=f"a leader {operator}")
        yield started
    finally:
        for operator in started.values():
            operator.abandon()
        uninstall(plane, *blue, release="blue")


def class_arguments(settings: Settings) -> tuple[str, ...]:
    """Return the arguments of a release with an engine image of its own, which tells whose Deployment it is."""
    if settings.operator_class is None:
        return ("--engine-image", "engine:plain")
    return ("--engine-image", f"engine:{settings.operator_class}", "--operator-class", settings.operator_class)


def image(space: Space, name: str) -> str:
    """Return the image of the resource's Deployment; empty if there is none."""
    with suppress(KubeError):
        return str(space.get("deployment", name)["spec"]["template"]["spec"]["containers"][0]["image"])
    return ""


def wait_image(space: Space, name: str, expected: str) -> None:
    eventually(lambda: image(space, name) == expected, within=30, what=f"the image {expected} of {name}", every=0.1)


def handled(operator: OperatorProcess) -> set[str]:
    """Return the names of the resources of which the operator exports metrics."""
    return {labels.split("/")[0] for name, labels in operator.metrics() if name == "fastgen_operator_desired_replicas"}


def test_each_operator_handles_its_class_and_a_class_without_an_operator_stays_untouched(
    space: Space, operators: dict[str | None, OperatorProcess]
) -> None:
    plain, blue = operators[None], operators["blue"]
    for name, fields in (("plain", {}), ("blue", {"operatorClass": "blue"}), ("green", {"operatorClass": "green"})):
        space.apply(resource(name, **fields))
    wait_image(space, "plain", "engine:plain")
    wait_image(space, "blue", "engine:blue")
    for name in ("plain", "blue"):
        space.finish_rollout(name)
        space.wait_condition("Ready", "True", "AllReplicasReady", name)
    before = {name: space.settled(name) for name in ("plain", "blue")}
    for operator in operators.values():
        operator.let_resyncs_pass(3)
    assert {name: space.versions(name) for name in before} == before, "they do not fight"
    assert (handled(plain), handled(blue)) == ({"plain"}, {"blue"})
    assert space.get("fgd", "green")["status"] == {"observedGeneration": 0}, "the default"
    assert {child["metadata"]["name"] for child in space.items(CHILDREN)} - {"default"} == {"plain", "blue"}


def test_a_changed_class_hands_the_resource_over_without_a_fight_and_back(
    space: Space, operators: dict[str | None, OperatorProcess]
) -> None:
    plain, blue = operators[None], operators["blue"]
    space.apply(resource(engine={"device": "cpu", "image": "engine:own"}))
    space.finish_rollout()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    kinds = ("Deployment", "Service", "ServiceAccount")
    before = {kind: space.settled()[kind] for kind in kinds}
    for round_trip, (owner, other) in enumerate(((blue, plain), (plain, blue), (blue, plain))):
        space.patch("fgd/chat", {"spec": {"operatorClass": "blue" if owner is blue else None}})
        generation = space.get("fgd", "chat")["metadata"]["generation"]
        space.wait_condition("Ready", "True", "AllReplicasReady")
        eventually(lambda who=owner: handled(who) == {"chat"}, within=20, what="the new operator", every=0.1)
        eventually(lambda who=other: handled(who) == set(), within=20, what="the old operator to let go", every=0.1)

        def observed(expected: int = generation) -> bool:
            return bool(space.get("fgd", "chat")["status"]["observedGeneration"] == expected)

        eventually(observed, within=20, what=f"the status of hand-over {round_trip}", every=0.1)
    after = space.settled()
    assert {kind: after[kind] for kind in kinds} == before, "equal settings: no child was written"
    # The pod template follows the new operator's settings, once.
    space.patch("fgd/chat", {"spec": {"engine": {"image": None}}})
    wait_image(space, "chat", "engine:blue")
    space.patch("fgd/chat", {"spec": {"operatorClass": None}})
    wait_image(space, "chat", "engine:plain")
    space.finish_rollout()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    plain.let_resyncs_pass(3)
    assert image(space, "chat") == "engine:plain"
    assert "Contended" not in plain.log.read_text() + blue.log.read_text()

"""Models as images, on API servers with and without image volumes. In 1.34 they are off by default."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.controlplane import ControlPlane
from cluster.programs import ensure_programs
from fastgen_operator.kinds import DEPLOYMENT
from fastgen_operator.status.conditions.progressing import is_refused
from harness.chart import SYSTEM, install, operator_kubeconfig
from harness.process import OperatorProcess
from harness.space import Space, resource
from harness.thief import POD_SPEC, changed, deployment, dry, thief_of
from support.namespace import Object
from support.waiting import eventually

pytestmark = pytest.mark.controlplane

IMAGE = f"registry.example:5000/models/smollm2:1@sha256:{'0' * 64}"
MODEL: Object = {"source": f"oci://{IMAGE}#/smollm2.gguf"}


@pytest.fixture(scope="module")
def modern() -> Iterator[ControlPlane]:
    """A control plane with image volumes and the chart."""
    with ControlPlane(ensure_programs(), gates=["ImageVolume"]) as started:
        started.kubectl("create", "namespace", SYSTEM)
        install(started)
        started.wait_for_crds("fastgendeployments.fastgen.dev")
        yield started


@pytest.fixture
def modern_space(modern: ControlPlane, request: pytest.FixtureRequest) -> Iterator[Space]:
    """A new namespace there."""
    fresh = Space(modern, request.node.name[-50:].replace("_", "-").strip("-"))
    fresh.create()
    yield fresh
    fresh.delete()


@pytest.fixture
def modern_operator(modern: ControlPlane, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator there."""
    process = OperatorProcess(operator_kubeconfig(modern), tmp_path / "log")
    process.start()
    yield process
    assert process.stop() == 0


@pytest.mark.usefixtures("operator")
def test_an_api_server_without_image_volumes_is_reported_and_the_pods_stay(space: Space) -> None:
    before = space.serve()
    space.patch("fgd/chat", {"spec": {"model": MODEL, "replicas": 2}})
    condition = space.wait_condition("Ready", "False", "ImageVolumesDisabled")
    assert f"would drop the volume models with the image {IMAGE}, because its feature gate" in condition["message"]
    assert "the pods stay unchanged" in condition["message"]
    space.make_ready(count=2)
    assert space.get("deployment", "chat")["spec"]["template"] == before
    space.patch("fgd/chat", {"spec": {"model": {"source": "file:///models/tiny.gguf"}}})
    space.wait_condition("Ready", "True", "AllReplicasReady")


@pytest.mark.usefixtures("operator")
def test_without_image_volumes_no_pod_is_created_for_a_new_resource(space: Space) -> None:
    space.apply(resource(model=MODEL))
    space.wait_condition("Progressing", "False", "ImageVolumesDisabled")
    assert is_refused(space.get("fgd", "chat")), "it yields to resources that can be written"
    assert space.get("service", "chat"), "what does not depend on it"
    assert space.items("deployments") == []


def test_the_image_is_a_volume_of_the_pods_and_its_failed_pull_is_reported(
    modern_space: Space, modern_operator: OperatorProcess
) -> None:
    space = modern_space
    space.apply(resource(model=MODEL))
    (pod,) = space.wait_pods(1)
    (volume,) = [each for each in pod["spec"]["volumes"] if each["name"] == "models"]
    assert volume["image"] == {"reference": IMAGE, "pullPolicy": "IfNotPresent"}
    words = f'Back-off pulling image "{IMAGE}": ErrImagePull: not found'
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": words}}
    space.set_pod(pod, ready=False, container={"state": waiting})
    condition = space.wait_condition("Ready", "False", "ImagePullBackOff")
    assert f"the image {IMAGE} of the volume models cannot be pulled: {words}" in condition["message"]
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    assert space.condition("ModelCached")["reason"] == "NotNeeded"
    settled, writes = space.settled(), modern_operator.writes()
    modern_operator.let_resyncs_pass(3)
    assert (space.settled(), modern_operator.writes()) == (settled, writes)


def test_the_operators_credentials_mount_no_other_image(modern: ControlPlane, modern_space: Space) -> None:
    thief = thief_of(modern)
    modern_space.apply(resource(model=MODEL))
    owner = modern_space.get("fgd", "chat")
    asked = deployment(owner)
    (place,) = [n for n, each in enumerate(asked["spec"]["template"]["spec"]["volumes"]) if each["name"] == "models"]
    other = changed(asked, (*POD_SPEC, "volumes", place, "image", "reference"), "registry.example/other:1")
    # The policies see the FastGenDeployment a little later.
    eventually(lambda: "does not name a volume" in dry(thief, DEPLOYMENT, other), within=20, what="the policies")
    assert dry(thief, DEPLOYMENT, asked) == ""

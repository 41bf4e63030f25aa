"""What keeps a pod's containers from being created stands only in its Events, and is in the status."""

from __future__ import annotations

import pytest

from cluster.controlplane import ControlPlane
from harness.adverse import bury, node, record, schedule
from harness.space import Space, resource
from support.namespace import Object

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]

LATER = "2026-01-01T00:01:00Z"
NO_SECRET = 'MountVolume.SetUp failed for volume "api-keys" : secret "nope" not found'
VAGUE = "Unable to attach or mount volumes: unmounted volumes=[api-keys]: timed out waiting for the condition"
ELSEWHERE = 'Multi-Attach error for volume "pvc-1" Volume is already used by pod(s) chat-0'
CREATING: Object = {"ready": False, "state": {"waiting": {"reason": "ContainerCreating"}}}
ONE_GPU: Object = {"engine": {"device": "cuda"}, "resources": {"gpu": {"count": 1}}}


def stuck(space: Space) -> Object:
    """Create a resource whose only pod is on the node without containers, and return the pod."""
    space.apply(resource(apiKeySecretName="nope", **ONE_GPU))
    space.wait_pods(1)
    schedule(space, "stuck")
    (pod,) = space.pods()
    space.set_pod(pod, ready=False, container=CREATING)
    return pod


def test_missing_secrets_and_volumes_on_other_nodes_are_named_until_they_are_there(
    space: Space, plane: ControlPlane
) -> None:
    with node(plane, "stuck"):
        pod = stuck(space)
        record(space, pod, "FailedMount", NO_SECRET)
        record(space, pod, "FailedMount", VAGUE)
        condition = space.wait_condition("Ready", "False", "FailedMount")
        words = f"pod {pod['metadata']['name']} on node stuck: a volume cannot be mounted: {NO_SECRET}"
        assert condition["message"] == words
        assert words in space.condition("Available")["message"]
        record(space, pod, "FailedAttachVolume", ELSEWHERE, count=1)
        condition = space.wait_condition("Ready", "False", "FailedAttachVolume")
        assert ELSEWHERE in condition["message"]
        record(space, pod, "Pulling", "Pulling image", time=LATER)
        space.wait_condition("Progressing", "True", "RollingOut")
        assert "starts on node stuck" in space.condition("Available")["message"]
        space.kubectl("delete", "fgd", "chat")
        space.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")
        bury(space)

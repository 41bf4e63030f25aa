"""Fields that spec.podTemplate removes, through client-side apply, which drops nulls."""

from __future__ import annotations

import pytest

from harness.space import Space, resource
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]

GONE = {"$patch": "delete"}
# A scalar, a map, an entry of a map, and a field of a list item.
REMOVAL = {
    "enableServiceLinks": GONE,
    "securityContext": {"fsGroupChangePolicy": GONE},
    "nodeSelector": {"kubernetes.io/os": GONE},
    "containers": [{"name": "engine", "livenessProbe": GONE, "resources": {"limits": {"cpu": GONE}}}],
}


def test_a_removal_survives_kubectl_apply_and_ends_with_it(space: Space) -> None:
    limits = {"resources": {"limits": {"cpu": 1, "memory": "1Gi"}}}
    space.apply(resource(**limits))
    space.wait_pods(1)
    before = space.template()["spec"]
    removing = resource(**limits, podTemplate={"spec": REMOVAL})
    for _ in range(2):
        # The second time after an edit of another field: a three-way merge would drop nulls here.
        space.apply(removing)
        removing["spec"]["drainSeconds"] = 7

    def removed() -> bool:
        spec = space.template()["spec"]
        return "livenessProbe" not in spec["containers"][0] and spec["terminationGracePeriodSeconds"] == 37

    space.apply(removing)
    eventually(removed, within=20, what="the removal")
    after = space.template()["spec"]
    assert "nodeSelector" not in after
    assert "fsGroupChangePolicy" not in after["securityContext"]
    assert after["containers"][0]["resources"]["limits"] == {"memory": "1Gi"}
    assert "enableServiceLinks" not in after
    space.apply(resource(**limits))
    eventually(lambda: space.template()["spec"] == before, within=20, what="the former template")
    said = space.apply(resource(**limits))
    assert "unchanged" in said


def test_a_gpu_pod_may_claim_its_device_and_requests_no_extended_resource(space: Space) -> None:
    claim = {"name": "gpu", "resourceClaimTemplateName": "one-gpu"}
    engine = {"name": "engine", "resources": {"claims": [{"name": "gpu"}]}}
    patch = {"spec": {"resourceClaims": [claim], "containers": [engine]}}
    space.apply(resource(engine={"device": "cuda"}, podTemplate=patch))
    space.wait_pods(1)
    spec = space.template()["spec"]
    assert spec["resourceClaims"] == [claim]
    assert spec["containers"][0]["resources"] == {"claims": [{"name": "gpu"}]}

"""What the API server says beyond its limits on concurrent requests, in its own words."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.kinds import SERVICE_ACCOUNT
from fastgen_operator.kube.transport import ApiServer, KubeError
from harness.probes import wait_rights
from harness.space import Space
from harness.user import server_of
from harness.webhook import validating
from support.namespace import Object
from support.waiting import eventually

pytestmark = pytest.mark.controlplane

USER = "starved"
GROUP = "flowcontrol.apiserver.k8s.io"
# One request at a time; others are rejected.
LEVEL: Object = {
    **{"apiVersion": f"{GROUP}/v1", "kind": "PriorityLevelConfiguration", "metadata": {"name": USER}},
    "spec": {
        "type": "Limited",
        "limited": {
            "nominalConcurrencyShares": 0,
            "lendablePercent": 0,
            "borrowingLimitPercent": 0,
            "limitResponse": {"type": "Reject"},
        },
    },
}
RULE: Object = {"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"], "clusterScope": True}
SCHEMA: Object = {
    **{"apiVersion": f"{GROUP}/v1", "kind": "FlowSchema", "metadata": {"name": USER}},
    "spec": {
        "matchingPrecedence": 3,
        "priorityLevelConfiguration": {"name": USER},
        "rules": [{"subjects": [{"kind": "User", "user": {"name": USER}}], "resourceRules": [RULE]}],
    },
}


@pytest.fixture
def server(plane: ControlPlane) -> Iterator[ApiServer]:
    """The API server as a user with a limit of one concurrent request."""
    for obj in (LEVEL, SCHEMA):
        plane.kubectl("create", "--filename", "-", stdin=json.dumps(obj))
    plane.kubectl("create", "clusterrolebinding", USER, "--clusterrole=cluster-admin", f"--user={USER}")
    server = server_of(str(plane.kubeconfig_for(USER, USER)))
    wait_rights(server, "", [{"apiGroups": [""], "resources": ["serviceaccounts"], "verbs": ["create"]}])
    yield server
    plane.kubectl("delete", "flowschema,prioritylevelconfiguration,clusterrolebinding", USER)


def test_a_request_beyond_the_limits_is_an_overload(server: ApiServer, space: Space, tmp_path: Path) -> None:
    """Requests are concurrent for certain: a webhook holds each for a moment."""
    account: Object = {"metadata": {"name": "x", "namespace": space.name}}
    path, query = SERVICE_ACCOUNT.path(space.name), [("dryRun", "All")]

    def ask(_: int) -> KubeError | None:
        try:
            server.request("POST", path, query, account, "application/json")
        except KubeError as error:
            return error
        return None

    def allow_slowly(_: Object) -> Object:
        time.sleep(0.5)
        return {"allowed": True}

    def rejections() -> list[KubeError]:
        with ThreadPoolExecutor(6) as threads:
            return [error for error in threads.map(ask, range(6)) if error is not None]

    with validating(space, tmp_path, allow_slowly):
        rejected = eventually(rejections, within=30, what="a rejected request") or []
    assert {error.status for error in rejected} == {429}
    assert [str(error) for error in rejected if not error.is_overload or error.is_answer] == []
    assert min(error.retry_after for error in rejected) >= 1

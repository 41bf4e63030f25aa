"""The operator and a model on nodes with IPv6: alone, first, and beside IPv4."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.bed import Bed, close_bed, open_bed
from cluster.demo import install
from cluster.families import chosen
from cluster.node import state_folder
from support.deployments import ServedNamespace, chat, manifest
from support.waiting import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="a node needs root"),
    pytest.mark.skipif(
        state_folder().exists(), reason="a node already runs on this machine and uses the ports; run `make down` first"
    ),
]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@pytest.fixture(params=["6", "6,4", "4,6"])
def bed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    """A node with these address families, and the operator on it."""
    monkeypatch.setenv("FASTGEN_BED_FAMILIES", request.param)
    try:
        for family in chosen():
            family.own_address()
    except RuntimeError as error:
        pytest.skip(str(error))
    opened = open_bed(say)
    try:
        if opened.kind != "native":
            pytest.skip("only a node on this machine has families to choose")
        install(opened)
        yield opened
    finally:
        close_bed(say)


def test_a_model_is_served_scraped_and_reached_on_all_families(bed: Bed) -> None:
    families = chosen()
    space = ServedNamespace(bed, "families")
    space.create()
    space.apply(manifest("chat", autoscaling={"minReplicas": 1, "maxReplicas": 2}))
    space.wait_condition("Ready", "True")
    (pod,) = space.pods()
    addresses = [each["ip"] for each in pod["status"]["podIPs"]]
    assert [f"-{ipaddress.ip_address(each).version}" for each in addresses] == [each.flag for each in families]
    for address in addresses:
        host = f"[{address}]" if ":" in address else address
        assert httpx.get(f"http://{host}:8000/ready").status_code == 200, address
    with space.url("chat") as url:
        eventually(lambda: httpx.get(f"{url}/ready").status_code == 200, within=30, what="the Service")
        assert "Berlin" in chat(url)
    # The operator's scrapes reach the pods: a decision rests on them.
    condition = eventually(lambda: space.condition("ScalingActive"), within=60, what="a decision")
    assert condition is not None
    space.wait_condition("ScalingActive", "True", "Active")
    (operator,) = json.loads(bed.kubectl("-n", "fastgen-system", "get", "pods", "--output=json"))["items"]
    for each in operator["status"]["podIPs"]:
        host = f"[{each['ip']}]" if ":" in each["ip"] else each["ip"]
        assert httpx.get(f"http://{host}:8081/healthz").status_code == 200
        assert "fastgen_operator_leader" in httpx.get(f"http://{host}:8080/metrics").text
    plugin = [str(Path(sys.executable).with_name("kubectl-fastgen")), "status", "chat", "--namespace=families"]
    environment = {**os.environ, "KUBECONFIG": str(bed.kubeconfig), "PATH": f"{bed.programs}:{os.environ['PATH']}"}
    said = subprocess.run(plugin, env=environment, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "chat" in said.stdout

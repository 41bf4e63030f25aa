"""The release on a real node: its own test, and what a deployment serves while the release is removed and replaced."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
import yaml

from cluster.bed import Bed
from cluster.commands import run
from cluster.demo import CRD, NAME, RELEASE, SPACE, SYSTEM, free_lease, install, resources, uninstall_release
from cluster.endpoint import service_url
from cluster.images import REPOSITORY
from support.deployments import ServedNamespace, manifest
from support.traffic import traffic
from support.waiting import eventually

pytestmark = pytest.mark.cluster

INSTALL = REPOSITORY / "install.yaml"


def test_helm_test_applies_a_resource_and_reads_it_back(bed: Bed) -> None:
    output = bed.helm("test", RELEASE, "--namespace", SYSTEM, "--timeout=600s")
    assert "Succeeded" in output
    assert bed.kubectl("get", "fgd", "--namespace", SYSTEM, "--output=name") == ""


def names(namespace: ServedNamespace) -> set[str]:
    return {pod["metadata"]["name"] for pod in namespace.pods()}


@contextmanager
def installed_without_helm(bed: Bed) -> Iterator[None]:
    """Apply install.yaml with the bed's images. At the end remove everything but the namespace and the CRD."""
    text = INSTALL.read_text()
    for default, image in (("engine", bed.engine_image), ("operator", bed.operator_image)):
        text, replaced = re.subn(rf"(?<=[ =])fastgen-{default}:\d\S+", image, text)
        assert replaced == 1
    objects = [made for made in yaml.safe_load_all(text) if made]
    kept = ("Namespace", "CustomResourceDefinition")
    removed = yaml.safe_dump_all([made for made in objects if made["kind"] not in kept])
    bed.kubectl("apply", "--server-side", "--force-conflicts", "--filename", "-", stdin=text)
    try:
        bed.kubectl(
            *("--namespace", SYSTEM, "rollout", "status", f"deployment/{RELEASE}-operator", "--timeout=600s"),
        )
        yield
    finally:
        bed.kubectl("delete", "--wait", "--filename", "-", stdin=removed)
        free_lease(bed)


def test_a_deployment_serves_while_the_release_is_removed_and_installed_in_other_ways(
    bed: Bed, namespace: ServedNamespace
) -> None:
    namespace.apply(manifest("chat"))
    namespace.wait_condition("Ready", "True", "AllReplicasReady")
    (pod,) = namespace.pods()
    try:
        with traffic(namespace, bed.engine_image, "chat", "smollm2", clients=1, seconds=0) as stream:
            uninstall_release(bed)
            assert bed.kubectl("get", "crd", CRD, "--output=name")
            stream.flows_on()
            with installed_without_helm(bed):
                namespace.kubectl("scale", "fgd/chat", "--replicas=2")
                namespace.wait_condition("Ready", "True", "AllReplicasReady")
                stream.flows_on()
            assert pod["metadata"]["name"] in names(namespace), "the pod was replaced"
            install(bed, "other", "--take-ownership")
            namespace.kubectl("scale", "fgd/chat", "--replicas=1")
            namespace.wait_condition("Ready", "True", "AllReplicasReady")
            uninstall_release(bed, "other")
            stream.stop()
            assert stream.failures() == []
    finally:
        install(bed, RELEASE, "--take-ownership")
        # With its namespace, it would be deleted after its pods, and the next test waits for the end of all resources.
        namespace.kubectl("delete", "fgd", "--all", "--wait=false")


def test_the_demo_runs_on_the_cluster_of_a_kubeconfig_and_keeps_what_others_deployed(
    bed: Bed, namespace: ServedNamespace
) -> None:
    external = {
        "PYTHONPATH": str(REPOSITORY / "tests"),
        "FASTGEN_KUBECONFIG": str(bed.kubeconfig),
        "FASTGEN_ENGINE_IMAGE": bed.engine_image,
        "FASTGEN_OPERATOR_IMAGE": bed.operator_image,
    }

    def demo(command: str) -> str:
        return run([sys.executable, "-m", "cluster", command], environment={**os.environ, **external})

    if NAME in bed.kubectl("get", "fgd", "--namespace", SPACE, "--output=name"):
        pytest.skip(f"the demo {SPACE}/{NAME} of `make up` runs in this cluster, and this test would delete it")
    # The namespaces of earlier tests may still be on their way out.
    eventually(lambda: not resources(bed), within=120, what="a cluster without other FastGenDeployments")
    namespace.apply(manifest("chat", replicas=0))
    up = demo("up")
    assert "Berlin" in up
    assert "port-forward" in up
    assert "Page: http://127.0.0.1:8000/ui\nAsk something there, and switch Long prompts on" in up
    with service_url(bed, SPACE, NAME) as url:
        assert httpx.get(f"{url}/ui", timeout=60).headers["Content-Type"].startswith("text/html")
    down = demo("down")
    assert f"{namespace.name}/chat" in down
    assert resources(bed) == [f"{namespace.name}/chat"]
    namespace.kubectl("delete", "fgd/chat")
    demo("down")
    assert bed.kubectl("get", "crd", CRD, "--ignore-not-found", "--output=name") == ""
    install(bed)

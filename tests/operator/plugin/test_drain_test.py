"""What counts as a lost request. The pods are servers on this machine; no cluster."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import pytest

from fastgen_operator.objects.pod import Pod
from fastgen_operator.plugin.cluster import Cluster, PluginError, UsageError
from fastgen_operator.plugin.commands.drain_test import add_arguments, run
from fastgen_operator.plugin.main import _Parser
from fastgen_operator.plugin.screen import Screen
from support.namespace import Object

PIECE = b'data: {"choices": [{"text": "a"}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error": {"message": "the engine died"}}\n\n'
# From a proxy, or cut.
BROKEN = b'data: {"choices": [{"te\n\n'
WORDS = b'data: {"error": "overloaded"}\n\n'


ENDINGS = {"complete": PIECE + DONE, "error": ERROR, "cut": PIECE, "broken": BROKEN, "words": WORDS}


class Pods:
    """A cluster of two pods. An evicted one first ends its streams as `ending` says, and then is gone."""

    namespace = "space"

    def __init__(self, ending: str) -> None:
        self.names, self.ending = ["a", "b"], ending
        # Whether the eviction was asked for: until then, streams of pod b stay open. Whether it was granted.
        self.asked, self.evicted = threading.Event(), threading.Event()
        self.complete = 0  # requests at the other pods since then
        self.headers: set[str | None] = set()
        pods = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert (body["model"], body["max_tokens"], body["stream"]) == ("served", 5, True)
                pods.headers.add(self.headers["Authorization"])
                pod = self.headers["X-Pod"]
                leaving = pod == "b" and pods.evicted.is_set()
                self.send_response(503 if leaving else 200)
                self.end_headers()
                if leaving:
                    return
                self.wfile.write(PIECE)
                self.wfile.flush()
                if pod == "b":
                    pods.asked.wait(60)
                ending = pods.ending if pod == "b" and pods.evicted.is_set() else "complete"
                self.wfile.write(ENDINGS[ending])
                pods.complete += pod != "b" and pods.evicted.is_set()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def resource(self, name: str) -> Object:
        return {"spec": {"model": {"servedName": "served"}}, "metadata": {"name": name}}

    def pods(self, _: str) -> list[Pod]:
        if self.complete >= 4:
            self.names = ["a", "c"]
        condition = {"type": "Ready", "status": "True"}
        metadata = {"namespace": "space", "creationTimestamp": ""}
        return [
            Pod(
                {"metadata": {**metadata, "name": name, "uid": name}, "spec": {}, "status": {"conditions": [condition]}}
            )
            for name in self.names
        ]

    def evict(self, pod: Pod) -> None:
        if self.ending == "refused":
            self.asked.set()
            raise PluginError("evicting pod b: Cannot evict pod as it would violate the pod's disruption budget.")
        assert pod.name == "b"
        self.evicted.set()
        self.asked.set()

    def connection(self, _: str, pod: str, port: int, timeout: float) -> http.client.HTTPConnection:
        assert port == 8000
        if pod not in self.names:
            raise PluginError(f"pod {pod} does not run")

        class Connection(http.client.HTTPConnection):
            def request(self, method: str, url: str, body: Any = None, headers: Any = None, **_: Any) -> None:
                super().request(method, url, body, {**headers, "X-Pod": pod})

        return Connection("127.0.0.1", self.server.server_address[1], timeout=timeout)


@pytest.fixture
def pods(request: pytest.FixtureRequest) -> Iterator[Pods]:
    made = Pods(request.param)
    yield made
    made.server.shutdown()
    made.server.server_close()


def drain_test(pods: Pods, *flags: str) -> int:
    parser = _Parser()
    add_arguments(parser)
    options = parser.parse_args(["chat", "--tokens", "5", *flags])
    return run(options, cast(Cluster, pods), Screen())


@pytest.mark.parametrize(
    ("pods", "message"),
    [
        ("complete", ""),
        ("cut", "lost on pod b: the stream ended early, after 2 events"),
        ("error", "lost on pod b: error in the stream: the engine died"),
        ("words", "lost on pod b: error in the stream: overloaded"),
        (
            "broken",
            'lost on pod b: error in the stream: an event is not a JSON object: {"choices": [{"te',
        ),
    ],
    indirect=["pods"],
)
def test_a_stream_that_does_not_end_completely_is_lost_and_a_refused_request_is_not(
    pods: Pods, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGEN_API_KEY", "secret")
    assert drain_test(pods, "--yes", "-o", "json") == bool(message)
    said = capsys.readouterr().out
    found = json.loads(said)
    assert (found["evicted"], found["replacement"]) == ("b", ["c"])
    assert found["openStreams"] >= 1
    assert bool(found["requests"]["lost"]) == bool(message)
    assert all(f"lost on pod {each['pod']}: {each['message']}" == message for each in found["lost"])
    assert found["requests"]["complete"] >= 3
    assert pods.headers == {"Bearer secret"}
    assert "secret" not in said


@pytest.mark.parametrize("pods", ["refused"], indirect=True)
def test_nothing_is_evicted_without_consent_or_against_the_budget(pods: Pods) -> None:
    with pytest.raises(PluginError, match="confirm it with --yes"):
        drain_test(pods)
    with pytest.raises(PluginError, match="--pod x: not one of the ready pods a, b"):
        drain_test(pods, "--pod", "x", "--yes")
    with pytest.raises(PluginError, match="disruption budget"):
        drain_test(pods, "--yes")
    assert not pods.evicted.is_set()
    pods.names = []
    with pytest.raises(PluginError, match="no pod of chat is ready: see kubectl fastgen status chat"):
        drain_test(pods, "--yes")


@pytest.mark.parametrize("pods", ["complete"], indirect=True)
def test_a_key_that_no_client_can_send_is_reported_before_anything_is_evicted(
    pods: Pods, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGEN_API_KEY", "geh\u00e4im")
    with pytest.raises(UsageError, match="FASTGEN_API_KEY: key 1 has a character other than printable ASCII"):
        drain_test(pods, "--yes")
    assert not pods.evicted.is_set()

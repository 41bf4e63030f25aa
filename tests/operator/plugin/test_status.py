"""Output of `kubectl fastgen status`, and its error messages for wrong calls. Needs no cluster."""

from __future__ import annotations

import json
import re
import threading
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.controlplane import free_ports
from fastgen.commands import main as fastgen
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plugin.cluster import open_cluster
from fastgen_operator.plugin.commands.dashboard import serve
from fastgen_operator.plugin.commands.status import fleet_table, one_screen
from fastgen_operator.plugin.main import main
from fastgen_operator.plugin.overview import overview_of
from fastgen_operator.plugin.reference import PAGE_PATH, commands_page
from fastgen_operator.plugin.screen import Screen, age
from fastgen_operator.runtime.http_servers import JsonServer
from fastgen_operator.status.reasons import remedy
from harness.objects import stored
from harness.process import client
from support.namespace import Object

NOW = datetime(2026, 1, 2, tzinfo=UTC)
START = "2026-01-01T00:00:00Z"
ROOT = Path(__file__).parents[3]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def condition(kind: str, status: str, reason: str, message: str = "") -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": START}


def chat(**status: Any) -> Object:
    """Return a resource with three replicas, of which one has no GPU and one is slow."""
    obj = stored(autoscaling={"minReplicas": 1, "maxReplicas": 4})
    obj["metadata"]["creationTimestamp"] = START
    no_gpu = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    full = {
        "observedGeneration": 1,
        **{"desiredReplicas": 3, "replicas": 4, "readyReplicas": 2, "updatedReplicas": 3, "url": "http://chat.space"},
        "supply": {
            **{"ready": 2, "starting": 0, "unschedulable": 1, "failing": 1, "lost": 0, "draining": 0},
            "pods": [{"name": "c", "state": "Failing", "message": "FailedMount: no Secret keys"}],
        },
        "capacity": {"tokensPerSecond": 7000, "tokenBudget": 512, "source": "StepModel"},
        "stragglers": ["b", "d"],
        "model": {"family": "gpt_oss", "parameters": 20914757184, "bytes": 13761300984, "maxModelLength": 131072},
        "autoscaling": {
            "desiredReplicas": 3,
            "message": "3 replicas: 10,000 tokens/s arrive; rounded up",
            "demandTokensPerSecond": 10500,
            "history": [
                {"time": START, "fromReplicas": 1, "toReplicas": 3, "reason": "DemandGrew", "message": "uses 150 %"}
            ],
        },
        "conditions": [
            condition("Ready", "False", "InsufficientGPU", no_gpu),
            condition("PodsScheduled", "False", "InsufficientGPU", no_gpu),
            condition("Available", "False", "InsufficientGPU", no_gpu),
            condition("ScalingLimited", "True", "TooManyReplicas", "requires more than maxReplicas, 4"),
            condition("ReplicasUniform", "False", "Stragglers", "slow: pod b, d; check its GPU"),
            condition("ModelCached", "True", "Cached"),
        ],
        **status,
    }
    return {**obj, "status": full}


def pod(name: str, *, node: str = "gpu-1", ready: bool = False, **metadata: Any) -> Object:
    conditions = [
        {"type": "Ready", "status": str(ready), "lastTransitionTime": START},
        {"type": "ContainersReady", "status": str(ready), "lastTransitionTime": START},
        {"type": "PodScheduled", "status": str(bool(node)), "lastTransitionTime": START, "reason": "Unschedulable"},
    ]
    if not node:
        conditions[2]["message"] = "no GPU is free"
    return {
        "metadata": {"name": name, "namespace": "space", "creationTimestamp": START, **metadata},
        "spec": {"nodeName": node},
        "status": {"phase": "Running", "conditions": conditions},
    }


PODS = [
    pod("a", ready=True), pod("b", ready=True), pod("c"), pod("e", node=""),
    pod("f", ready=True, deletionTimestamp="2026-01-01T23:59:50Z"),
    pod("g", ready=True, deletionTimestamp="2026-01-01T23:00:00Z"),
]  # fmt: skip


def test_the_screen_has_the_pods_with_states_the_load_the_decisions_and_the_remedies() -> None:
    found = overview_of(chat(), [*map(Pod, PODS)], NOW)
    states = {each.name: each.state for each in found.pods}
    assert states == {
        **{"a": "Ready", "b": "Straggler", "c": "Failing", "e": "Unschedulable", "f": "Draining", "g": "Lost"}
    }
    assert {each.name: each.message for each in found.pods}["c"] == "FailedMount: no Secret keys"
    assert found.load.utilization == pytest.approx(10500 / 7000 / 2)
    # One cause is told once. Ready repeats it, and what is well needs nothing.
    assert [(each.type, each.reason) for each in found.problems] == [
        ("PodsScheduled, Available", "InsufficientGPU"),
        ("ScalingLimited", "TooManyReplicas"),
        ("ReplicasUniform", "Stragglers"),
    ]
    text = "\n".join(one_screen(found, Screen(StringIO()), NOW))
    for words in (
        *("space/chat   not ready: InsufficientGPU", "2 ready of 3 desired", "chooses from 1 to 4"),
        *("2 ready, 1 unschedulable, 1 failing", "10,500 tokens/s arrive, a replica computes 7,000", "75% of the 2"),
        "Serves:    gpt_oss, 20,915 M parameters, 12.8 GiB, up to 131,072 tokens",
        *("24h ago     1 -> 3   DemandGrew", "uses 150 %", "-> Wait for a terminating pod. Otherwise free or add"),
    ):
        assert words in text
    assert re.search(r"^e +Unschedulable +0 +- +24h +no GPU is free$", text, re.MULTILINE)
    assert "\x1b" not in text
    assert "\x1b[31mFailing\x1b[0m" in "\n".join(one_screen(found, Screen(Terminal(), {}), NOW))
    assert "\x1b" not in "\n".join(one_screen(found, Screen(Terminal(), {"NO_COLOR": "1"}), NOW))
    assert json.loads(json.dumps(found.to_json()))["load"]["utilization"] == pytest.approx(0.75)


def test_all_stragglers_are_shown_and_no_pod_whose_name_is_a_word_of_the_message() -> None:
    names = [f"slow-{n}" for n in range(8)]
    pods = [Pod(pod(name, ready=True)) for name in (*names, "check")]
    found = overview_of(chat(stragglers=names), pods, NOW)
    assert [each.name for each in found.pods if each.state == "Straggler"] == names


def test_a_resource_without_a_status_is_shown_and_an_outdated_one_is_a_problem() -> None:
    evil = chat(conditions=[condition("Ready", "False", "CrashLoopBackOff", "its last line: \x1b]0;evil\x07 \x9b2J")])
    text = "\n".join(one_screen(overview_of(evil, [], NOW), Screen(StringIO()), NOW))
    assert "its last line:  ]0;evil   2J" in text, "a pod's log can command the terminal"
    bare = chat()
    del bare["status"]
    found = overview_of(bare, [], NOW)
    assert "no conditions: no operator has handled the resource yet" in one_screen(found, Screen(StringIO()), NOW)
    assert [each.reason for each in found.problems] == ["Outdated"]
    assert overview_of(chat(observedGeneration=0), [], NOW).problems[0].reason == "Outdated"


def test_the_fleet_is_a_table_with_those_first_that_are_not_ready() -> None:
    ready = chat(conditions=[condition("Ready", "True", "AllReplicasReady")])
    ready["metadata"] = {**ready["metadata"], "name": "a-ready-one"}
    fleet = [overview_of(each, [], NOW) for each in (ready, chat())]
    lines = fleet_table(fleet, Screen(StringIO()), NOW)
    assert [line.split()[1:6] for line in lines[1:]] == [
        ["chat", "False", "InsufficientGPU", "2/3", "75%"],
        ["a-ready-one", "True", "AllReplicasReady", "2/3", "75%"],
    ]
    assert len({line.index("file:///") for line in lines[1:]}) == 1, "the columns are not aligned"


def test_the_reference_is_generated_and_a_finding_has_its_remedy_in_plain_text() -> None:
    assert (ROOT / PAGE_PATH).read_text() == commands_page(), "run make generate"
    assert remedy("ScalingLimited", "TooManyReplicas", "True").startswith("Increase `maxReplicas`")
    assert remedy("ScalingLimited", "WithinBounds", "False") == ""
    assert remedy("ScalingActive", "HoldAfterRestart", "False") == ""
    assert remedy("Available", "NotObserved", "Unknown") == remedy("Progressing", "NotObserved", "Unknown") != ""
    assert "](" not in remedy("ScalingLimited", "VolumeOnOneNode", "True")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-5, "0s"), (119, "119s"), (120, "2m"), (3600 * 3 + 1200, "3h20m"), (3600 * 9, "9h"), (86400 * 3, "3d")],
)
def test_ages_are_shown_as_by_kubectl(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


def kubeconfig(folder: Path, server: str) -> Path:
    path = folder / "kubeconfig"
    context = {"cluster": "c", "user": "u", "namespace": "prod"}
    content = {
        **{"apiVersion": "v1", "kind": "Config", "current-context": "here"},
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "here", "context": context}],
    }
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture
def without_crd(tmp_path: Path) -> Iterator[Path]:
    """The kubeconfig of an API server that knows no FastGenDeployments."""
    missing = {"kind": "Status", "status": "Failure", "code": 404, "message": "the server could not find the resource"}
    server = JsonServer("127.0.0.1", 0, lambda _, __: (404, missing), "api")
    server.start()
    yield kubeconfig(tmp_path, f"http://127.0.0.1:{server.port}")
    server.stop()


def said_by(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[object, str]:
    """Return exit code and the only line, which is an error."""
    try:
        code: object = main(arguments)
    except SystemExit as error:
        code = error.code
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return code, line


def test_a_wrong_call_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = str(kubeconfig(tmp_path, "http://127.0.0.1:1"))
    for arguments, words in {
        ("status", "--context", "there", "--kubeconfig", config): 'no context "there" in the kubeconfig: it has here',
        ("status", "--kubeconfig", str(tmp_path / "none")): "no usable kubeconfig: ",
        ("status", "pod/chat", "--kubeconfig", config): "pod/chat: give the name of a FastGenDeployment",
        ("status", "chat", "-A", "--kubeconfig", config): "exclude each other",
        ("top", "chat", "-o", "json", "--kubeconfig", config): "--output json requires --once",
        ("logs", "--kubeconfig", config): "the following arguments are required: NAME",
        ("--kubeconfig", config, "statsu"): "invalid choice: 'statsu'",
    }.items():
        code, line = said_by(capsys, *arguments)
        assert (code, words in line) == (2, True), line
    (tmp_path / "broken").write_text("a: [")
    assert said_by(capsys, "status", "--kubeconfig", str(tmp_path / "broken"))[0] == 2


def test_kubectl_finds_the_plugin_by_its_name() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["kubectl-fastgen"] == f"{main.__module__}:{main.__name__}"


def test_no_cluster_and_no_crd_are_one_line_and_exit_code_1(
    without_crd: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (("status", "chat"), ("status",), ("top", "chat"), ("-n", "other", "logs", "chat")):
        code, line = said_by(capsys, *arguments, "--kubeconfig", str(without_crd))
        assert code == 1
        assert "has no resource fastgendeployments.fastgen.dev: install the chart" in line
    (port,) = free_ports(1)
    code, line = said_by(capsys, "status", "--kubeconfig", str(kubeconfig(tmp_path, f"http://127.0.0.1:{port}")))
    assert code == 1
    assert (
        line == f"error: the API server http://127.0.0.1:{port} of context here cannot be reached: Connection refused"
    )


def test_a_server_that_is_no_api_server_is_not_called_unreachable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>Sign in</html>")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        code, line = said_by(capsys, "status", "--kubeconfig", str(kubeconfig(tmp_path, url)))
        server.shutdown()
    assert (code, "cannot be reached" in line) == (1, False)
    assert line.endswith("returned a body that is not JSON: check the server address of the context")


def test_fastgen_top_hands_a_deployment_over_to_the_plugin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda _, command: calls.append(command))
    fastgen.main(["top", "fgd/chat", "--once", "--interval", "0.5", "-n", "prod", "--context", "here"])
    flags = ["--interval", "0.5", "--namespace", "prod", "--context", "here", "--once"]
    assert [command[1:] for command in calls] == [["-m", "fastgen_operator.plugin", "top", "chat", *flags]]
    assert fastgen.main(["top", "http://127.0.0.1:1", "-n", "prod"]) == 2
    assert "--namespace requires fgd/NAME instead of a URL" in capsys.readouterr().err
    monkeypatch.setattr("fastgen.commands.top._PLUGIN_MODULES", ("not_installed",))
    assert fastgen.main(["top", "fgd/chat"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said == ["fastgen: error: top fgd/NAME requires the kubectl plugin: install fastgen[operator]"]


def test_the_dashboard_runs_no_script_but_its_own_and_answers_on_this_machine_only(tmp_path: Path) -> None:
    resources = [chat(), chat(conditions=[condition("Ready", "True", "AllReplicasReady", "<script>alert(1)</script>")])]
    resources[1]["metadata"] = {**resources[1]["metadata"], "name": "other"}
    answers = {"/apis/fastgen.dev/v1alpha1/fastgendeployments": resources, "/api/v1/namespaces/space/pods": PODS}
    version = {"resourceVersion": "1"}
    api = JsonServer(
        "127.0.0.1", 0, lambda path, _: (200, {"metadata": version, "items": answers.get(path, [])}), "api"
    )
    api.start()
    cluster = open_cluster(str(kubeconfig(tmp_path, f"http://127.0.0.1:{api.port}")), None, None)
    pages = serve(cluster, None, 0)
    threading.Thread(target=pages.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    url = f"http://127.0.0.1:{pages.server_address[1]}"
    try:
        fleet = client().get(f"{url}/")
        assert fleet.status_code == 200
        assert fleet.text.index("/fgd/space/chat") < fleet.text.index("/fgd/space/other")
        for words in ("2 of 3", "75%", "1 → 3, ", "InsufficientGPU, TooManyReplicas, Stragglers"):
            assert words in fleet.text
        one = client().get(f"{url}/fgd/space/chat").text
        for words in ("Straggler", "FailedMount: no Secret keys", "free or add GPUs", "uses 150 %", "is being deleted"):
            assert words in one
        other = client().get(f"{url}/fgd/space/other").text
        policy = fleet.headers["Content-Security-Policy"]
        (nonce,) = re.findall(r"script-src 'nonce-(\S+)';", policy)
        assert re.findall(r"<script[^>]*>", fleet.text) == [f'<script nonce="{nonce}">']
        assert other.count("<script") == 1
        assert "&lt;script&gt;" in other
        assert nonce not in other, "the nonce can be known in advance"
        assert "default-src 'none'" in policy
        assert not re.search(r"https?://|src=", fleet.text + one), "the page needs something from elsewhere"
        assert client().get(f"{url}/fgd/space/none").status_code == 404
        assert client().get(f"{url}/", headers={"Host": "evil.example"}).status_code == 403
        api.stop()
        gone = client().get(f"{url}/")
        assert (gone.status_code, "cannot be reached: Connection refused" in gone.text) == (502, True)
    finally:
        pages.shutdown()
        pages.server_close()

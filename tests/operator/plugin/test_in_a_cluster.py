"""`kubectl fastgen` against a real API server and operator, with a kubelet that forwards ports and serves logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.controlplane import ControlPlane
from engine.server.serving import Serving, serving
from fastgen_operator.kinds import FASTGEN, POD
from fastgen_operator.plugin.main import main
from harness.chart import SYSTEM
from harness.engines import FakeEngine
from harness.fluid import PROMPT_RATE
from harness.kubelet import Kubelet
from harness.loopback import LOOPBACK
from harness.probes import wait_rights
from harness.process import OperatorProcess
from harness.space import Space, resource
from harness.user import server_of
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]

CPU: Object = {"device": "cpu", "interTokenTarget": 200}


@pytest.fixture
def kubelet(plane: ControlPlane, space: Space) -> Iterator[Kubelet]:
    with Kubelet(plane, space.name[-40:].strip("-")) as started:
        yield started


class Plugin:
    """Runs the plugin as the administrator or another user."""

    def __init__(self, space: Space, capsys: pytest.CaptureFixture[str]) -> None:
        self._space, self._capsys = space, capsys

    def __call__(self, *arguments: str, user: Path | None = None) -> tuple[int, str, str]:
        """Return exit code, standard output and standard error."""
        kubeconfig = str(user or self._space.cluster.kubeconfig)
        code = main([*arguments, "-n", self._space.name, "--kubeconfig", kubeconfig])
        said = self._capsys.readouterr()
        return code, said.out, said.err

    def json(self, *arguments: str) -> Any:
        code, out, err = self(*arguments, "-o", "json")
        assert code == 0, err
        return json.loads(out)


@pytest.fixture
def plugin(space: Space, capsys: pytest.CaptureFixture[str]) -> Plugin:
    return Plugin(space, capsys)


def user_with(space: Space, name: str, role: str) -> Path:
    """Return the kubeconfig of a user with a role of the cluster in the namespace."""
    space.kubectl("create", "rolebinding", f"{name}-{role}", f"--clusterrole={role}", f"--user={name}")
    kubeconfig = space.cluster.kubeconfig_for(name, name)
    # Also until the cluster's own role contains the rule of the chart.
    rule: Object = {"apiGroups": [FASTGEN.group], "resources": [FASTGEN.plural], "verbs": ["list"]}
    wait_rights(server_of(str(kubeconfig)), space.name, [rule])
    return kubeconfig


def test_a_decision_is_repeated_from_its_recorded_inputs(
    space: Space, kubelet: Kubelet, plugin: Plugin, operator: OperatorProcess, plane: ControlPlane
) -> None:
    autoscaling = {"minReplicas": 2, "maxReplicas": 4, "scaleDown": {"stabilizationSeconds": 3}}
    space.apply(resource(engine=CPU, autoscaling=autoscaling))
    engines = []
    for pod in space.wait_pods(2):
        engines.append(FakeEngine(next(LOOPBACK), prompt_rate=0.3 * PROMPT_RATE).start())
        kubelet.run(space, pod, engines[-1].address)
    try:
        space.wait_condition("ScalingActive", "True", "Active")
        eventually(lambda: space.get("fgd", "chat")["status"].get("capacity"), within=20, what="the capacity")
        for engine in engines:
            engine.backlog = 60_000
        eventually(
            lambda: space.get("fgd", "chat")["status"]["autoscaling"].get("history"), within=20, what="more replicas"
        )
        with operator_pod(plane, kubelet, operator.decisions_port):
            # The change, and a later decision that changes nothing.
            eventually(
                lambda: len(plugin.json("explain-scaling", "chat", "--all")["decisions"]) > 1,
                within=20,
                what="the next decision",
            )
            code, out, err = plugin("explain-scaling", "fgd/chat")
            assert (code, err) == (0, "")
            found = plugin.json("explain-scaling", "chat", "--all")
            editor = user_with(space, "editor", "edit")
            refused = plugin("explain-scaling", "chat", user=editor)
    finally:
        for engine in engines:
            engine.close()
    assert out.count("equal to the recorded decision") == 2
    for words in ("2 -> ", "BacklogTooLong", "bounds 2 to 4", "mean of the last requests: 500 prompt tokens", "solves"):
        assert words in out
    scaled = found["decisions"][0]
    assert scaled["isEqual"] is True
    assert scaled["replayed"] == scaled["decision"]
    history = space.get("fgd", "chat")["status"]["autoscaling"]["history"][-1]
    assert (history["fromReplicas"], scaled["decision"]["replicas"]) == (2, history["toReplicas"])
    assert len(scaled["case"]["fleet"]["ready"]) == 2
    assert set(kubelet.forwarded) == {"operator"}
    # Decisions of all namespaces: the right is one in the operator's namespace, which editors of others lack.
    assert refused[0] == 1
    assert f'cannot list resource "pods" in API group "" in the namespace "{SYSTEM}"' in refused[2]


def operator_pod(plane: ControlPlane, kubelet: Kubelet, port: int) -> ExitStack:
    """A pod with the labels of the operator's, whose port for decisions is the one of the running operator."""
    container = {
        "name": "operator",
        "image": "operator:test",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    restricted = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "operator", "labels": {"app.kubernetes.io/name": "fastgen-operator"}},
        "spec": {"nodeName": kubelet.node, "securityContext": restricted, "containers": [container]},
    }
    kubelet.ports["operator", 8082] = ("127.0.0.1", port)
    system = Space(plane, SYSTEM)
    system.apply(pod)
    system.patch("pod/operator", {"status": {"phase": "Running"}}, "status")
    stack = ExitStack()
    stack.callback(plane.kubectl, "-n", SYSTEM, "delete", "pod", "operator", "--force", "--grace-period=0")
    return stack


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Serving]]:
    """Start servers with the scripted engine, each at port 8000 of its own address."""
    with ExitStack() as stack:

        def start() -> Serving:
            folder, options = tmp_path_factory.mktemp("server"), ("--served-model-name", "chat")
            environment = {"SCRIPT_STEP_SECONDS": "0.02"}
            return stack.enter_context(
                serving(folder, *options, host=next(LOOPBACK), port=8000, environment=environment)
            )

        yield start


def test_top_and_logs_show_all_pods_and_a_drain_test_loses_no_request(
    space: Space, kubelet: Kubelet, plugin: Plugin, servers: Callable[[], Serving]
) -> None:
    behind = [servers(), servers()]
    space.apply(resource(replicas=2))
    running: dict[str, Serving] = {}
    for pod, server in zip(space.wait_pods(2), behind, strict=True):
        server.wait_status("/ready", 200)
        running[pod["metadata"]["name"]] = server
        kubelet.run(space, pod, server.host)
    space.finish_rollout(count=2)
    names = sorted(running)

    # Logs.
    kubelet.logs = {(names[0], "engine"): ["one", "two"], (names[0], "engine/previous"): ["crashed"]}
    viewer, editor = user_with(space, "viewer", "view"), user_with(space, "editor", "edit")
    code, out, err = plugin("logs", "chat", "--tail", "1", user=viewer)
    assert (code, out) == (0, f"[{names[0]}] two\n")
    assert err == f"[{names[1]}] the log cannot be read: container engine of pod {names[1]} has no such log\n"
    with following(space) as lines:
        assert [next(lines), next(lines)] == [f"[{names[0]}] one\n", f"[{names[0]}] two\n"]
        kubelet.logs[names[0], "engine"].append("three")
        assert next(lines) == f"[{names[0]}] three\n"
    assert plugin("logs", "chat", "--previous")[1] == f"[{names[0]}] crashed\n"

    # Users without rights, and wrong names.
    stranger = space.cluster.kubeconfig_for("stranger", "stranger")
    for arguments in (("status", "chat"), ("status", "-A"), ("logs", "chat"), ("drain-test", "chat", "--yes")):
        code, out, err = plugin(*arguments, user=stranger)
        assert (code, out, len(err.splitlines())) == (1, "", 1)
        assert 'User "stranger" cannot' in err
    assert plugin("status", "cha")[2].endswith(f'"cha" in namespace "{space.name}": did you mean chat?\n')
    assert plugin("status", "zebra", user=viewer)[2].endswith(": it has chat\n")
    found = plugin.json("status", "chat")
    assert {each["name"]: (each["state"], each["node"]) for each in found["pods"]} == dict.fromkeys(
        names, ("Ready", kubelet.node)
    )

    # Top, for one that may forward ports, and for one that may not.
    code, out, err = plugin("top", "chat", "--once", "--interval", "0.1", user=viewer)
    assert (code, out) == (1, "")
    assert 'cannot get resource "pods/portforward"' in err
    assert len(err.splitlines()) == 1
    for server in behind:
        body = {"prompt": "a b c", "max_tokens": 400}
        threading.Thread(target=server.post, args=("/v1/completions", body), daemon=True).start()

    def both_generate() -> Any:
        shown = plugin.json("top", "chat", "--once", "--interval", "0.5")
        return shown if all(pod["decode_tokens"] > 0 for pod in shown["pods"].values()) else None

    found = eventually(both_generate, within=20, what="tokens of both pods")
    assert sorted(found["pods"]) == names
    assert found["all"]["running"] == sum(each["running"] for each in found["pods"].values())
    assert found["all"]["decode_tokens"] == pytest.approx(
        sum(each["decode_tokens"] for each in found["pods"].values()), rel=0.5
    )
    assert found["all"]["inter_token"][0] > 0
    code, out, _ = plugin("top", "chat", "--once", "--interval", "0.1", user=editor)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[3:6]] == [*names, "all"]

    # The restart of a pod under load.
    victim = names[0]
    with kubelet_at_work(space, kubelet, running, servers):
        found = plugin.json("drain-test", "chat", "--pod", victim, "--tokens", "40", "--yes")
    assert found["evicted"] == victim
    assert found["openStreams"] >= 1
    assert found["requests"]["complete"] > 4
    assert (found["requests"]["lost"], found["lost"]) == (0, [])
    assert len(found["replacement"]) == 1


@contextmanager
def following(space: Space) -> Iterator[Iterator[str]]:
    """Run `kubectl-fastgen logs --follow` as a program, yield its output lines, and interrupt it at the end."""
    flags = ("-n", space.name, "--kubeconfig", str(space.cluster.kubeconfig))
    command = [sys.executable, "-m", "fastgen_operator.plugin", "logs", "chat", "--follow", *flags]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield iter(process.stdout)
            process.send_signal(signal.SIGINT)
            assert process.wait(100) == 130
        finally:
            process.kill()


@contextmanager
def kubelet_at_work(
    space: Space, kubelet: Kubelet, running: dict[str, Serving], servers: Callable[[], Serving]
) -> Iterator[None]:
    """Stop the servers of deleted pods, and start one for the new pod."""
    spare = servers()
    done = threading.Event()

    def work() -> None:
        while not done.wait(0.1):
            for pod in space.items("pods", labels="fastgen.dev/deployment=chat"):
                name = pod["metadata"]["name"]
                if pod["metadata"].get("deletionTimestamp") and name in running:
                    server = running.pop(name)
                    server.signal(signal.SIGTERM)
                    server.wait_exit()
                    body = {"gracePeriodSeconds": 0}
                    path = POD.path(space.name, name)
                    space.server.request("DELETE", path, body=body, content_type="application/json")
                elif not pod["metadata"].get("deletionTimestamp") and name not in running:
                    spare.wait_status("/ready", 200)
                    running[name] = spare
                    kubelet.run(space, pod, spare.host)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        done.set()
        worker.join()

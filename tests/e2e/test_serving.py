"""Serving end to end: creation, container restart, rollout, scaling and deletion."""

from __future__ import annotations

import httpx
import pytest
from openai import OpenAI

from fastgen_operator.plugin import main as plugin
from support.deployments import ServedNamespace, chat, manifest, metric
from support.waiting import eventually

pytestmark = [pytest.mark.cluster]


def test_a_new_resource_becomes_ready_and_serves_through_its_service(served: ServedNamespace) -> None:
    served.wait_condition("Ready", "True")
    status = served.get("fgd", "chat")["status"]
    assert status["url"] == f"http://chat.{served.name}.svc:8000/v1"
    assert status["readyReplicas"] == 1
    with served.url("chat") as url:
        eventually(lambda: httpx.get(f"{url}/ready").status_code == 200, within=30, what="the Service")
        assert "Berlin" in chat(url)
        client = OpenAI(base_url=f"{url}/v1", api_key="unused")
        stream = client.completions.create(
            model="smollm2", prompt="1, 2, 3,", max_tokens=12, temperature=0, stream=True
        )
        pieces = [event.choices[0].text for event in stream if event.choices]
        assert "4, 5, 6" in "".join(pieces)
        assert len(pieces) > 5, "the response was not streamed token by token"


def test_the_plugin_reads_logs_and_metrics_through_the_kubelet(
    served: ServedNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    served.wait_condition("Ready", "True")
    pod = served.pods("chat")[0]["metadata"]["name"]
    flags = ("-n", served.name, "--kubeconfig", str(served.cluster.kubeconfig))
    assert plugin.main(["logs", "fgd/chat", *flags]) == 0
    assert f"[{pod}] " in capsys.readouterr().out
    assert plugin.main(["top", "chat", "--once", "--interval", "0.5", *flags]) == 0
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[3:5]] == [[pod, "Ready"], ["all", "0"]]
    assert plugin.main(["status", "chat", *flags]) == 0
    assert f"{served.name}/chat   ready: AllReplicasReady" in capsys.readouterr().out


def test_a_killed_engine_restarts_and_ready_becomes_false_then_true(served: ServedNamespace) -> None:
    served.wait_condition("Ready", "True")
    pod = served.pods("chat")[0]["metadata"]["name"]
    kill_engine = (
        "import os, pathlib, signal\n"
        "for p in pathlib.Path('/proc').glob('[0-9]*'):\n"
        "    if b'fastgen.engine.process' in (p / 'cmdline').read_bytes() and int(p.name) != os.getpid():\n"
        "        os.kill(int(p.name), signal.SIGKILL)\n"
    )
    served.kubectl("exec", pod, "--", "python", "-c", kill_engine)
    went = served.wait_condition("Ready", "False")
    assert went["message"]
    served.wait_condition("Ready", "True")
    status = served.pods("chat")[0]["status"]["containerStatuses"][0]
    assert status["restartCount"] == 1
    assert status["lastState"]["terminated"]["exitCode"] != 0
    with served.url("chat") as url:
        assert "Berlin" in eventually(lambda: chat(url), within=30, what="a response after the restart")


def test_a_new_token_budget_replaces_the_pod(served: ServedNamespace) -> None:
    served.wait_condition("Ready", "True")
    old = served.pods("chat")[0]["metadata"]["name"]
    patch = '{"spec": {"engine": {"tokenBudget": 64}}}'
    served.kubectl("patch", "fgd", "chat", "--type", "merge", "--patch", patch)
    served.wait_condition("Ready", "True")
    eventually(
        lambda: old not in [pod["metadata"]["name"] for pod in served.pods("chat")],
        within=60,
        what="the end of the old pod",
    )
    with served.url("chat") as url:
        # The previous pod still serves for a moment while it ends.
        eventually(lambda: metric(url, "fastgen_token_budget") == 64, within=60, what="the new token budget")
        assert "Berlin" in chat(url)


def test_kubectl_scale_changes_the_number_of_ready_pods(served: ServedNamespace) -> None:
    served.wait_condition("Ready", "True")
    served.kubectl("scale", "fgd/chat", "--replicas=2")
    served.wait_condition("Ready", "True")
    status = served.get("fgd", "chat")["status"]
    assert (status["replicas"], status["readyReplicas"], len(served.pods("chat"))) == (2, 2, 2)
    served.kubectl("scale", "fgd/chat", "--replicas=1")
    eventually(lambda: len(served.pods("chat")) == 1, within=90, what="one pod")
    assert served.get("fgd", "chat")["spec"]["replicas"] == 1


def test_deletion_removes_all_children(namespace: ServedNamespace) -> None:
    def objects() -> list[str]:
        kinds = "fgd,deployments,replicasets,pods,services,endpointslices,secrets,persistentvolumeclaims"
        return [f"{o['kind']}/{o['metadata']['name']}" for o in namespace.items(kinds)]

    before = objects()
    namespace.apply(manifest("chat"))
    eventually(lambda: namespace.pods("chat") and len(objects()) >= len(before) + 5, within=60, what="the children")
    namespace.kubectl("delete", "fgd", "chat")
    eventually(lambda: objects() == before, within=120, what="the deletion of the resource's children")

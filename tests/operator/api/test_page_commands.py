"""The commands for kubectl in the documentation, run as they are printed, from the repository's folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from chart_files.files import ROOT
from cluster.controlplane import ControlPlane
from fastgen_operator.api.crd import custom_resource_definition
from fastgen_operator.plugin.main import parser
from harness.process import OperatorProcess
from harness.space import Space
from support.pages import blocks, commands, documents

# Why a command is not run here, by a pattern of the command.
NOT_RUN = {
    r"kubectl fastgen .*": "tests/operator/plugin runs the plugin, and a test below parses the arguments",
    r"kubectl (-n \S+ )?logs .*|kubectl port-forward .*|kubectl (taint node|cordon) .*": "there is no node",
    r"kubectl apply -f chat.yaml": "tests/e2e/test_quickstart.py runs it with the page's file",
    r"kubectl apply --server-side -f install.yaml": "tests/chart/test_api_server.py applies it",
    r"kubectl delete crd .*": "the API server is shared",
    r"kubectl rollout resume .*": "the Deployment is not paused",
    r"kubectl (rollout undo|edit deployment|apply --server-side|apply --dry-run=server --as=alice)": "only named",
}
PLACEHOLDERS = {"NAMESPACE": "{namespace}", "NAME": "chat", "=N": "=1"}
PAGES_OF_THE_PAST = "docs/decisions/"


def reason_not_run(command: str) -> str | None:
    """Return the pattern in `NOT_RUN` that matches a command, if any."""
    return next((pattern for pattern in NOT_RUN if re.fullmatch(pattern, command)), None)


def printed() -> list[tuple[str, str]]:
    """Return place and text of all commands for kubectl."""
    return [(place, text) for place, text in commands("kubectl") if not place.startswith(PAGES_OF_THE_PAST)]


def test_each_reason_not_to_run_a_command_applies_to_one() -> None:
    assert {reason_not_run(command) for _, command in printed()} - {None} == set(NOT_RUN)


def test_the_plugin_accepts_the_arguments_of_its_commands() -> None:
    found = [text.replace("[NAME]", "NAME") for _, text in printed() if text.startswith("kubectl fastgen ")]
    used = {parser().parse_args(shlex.split(text)[2:]).run.__module__.rpartition(".")[2] for text in found}
    assert used == {"status", "explain_scaling", "logs", "top", "drain_test", "dashboard", "what_if"}


def test_the_readme_shows_the_columns_of_kubectl_get() -> None:
    (version,) = custom_resource_definition()["spec"]["versions"]
    columns = [each["name"] for each in version["additionalPrinterColumns"] if not each.get("priority")]
    (shown,) = [text for _, text in blocks("console") if "kubectl get fgd\n" in text]
    header, row = shown.partition("kubectl get fgd\n")[2].splitlines()[:2]
    assert header.split() == ["NAME", *(column.upper() for column in columns)]
    assert len(row.split()) == len(header.split())


def test_pages_that_create_a_secret_name_it_in_the_resource() -> None:
    created = {
        (place.partition(":")[0], found[1])
        for place, command in printed()
        if (found := re.match(r"kubectl create secret generic (\S+)", command))
    }
    named = {
        (place.partition(":")[0], secret)
        for place, made in documents()
        if made.get("kind") == "FastGenDeployment" and (secret := made["spec"]["model"].get("secretName"))
    }
    assert created
    assert created <= named


@pytest.mark.controlplane
def test_the_commands_for_kubectl_succeed(
    plane: ControlPlane, operator: OperatorProcess, space: Space, tmp_path: Path
) -> None:
    del operator
    kubeconfig = yaml.safe_load(plane.kubeconfig.read_text())
    for context in kubeconfig["contexts"]:
        context["context"]["namespace"] = space.name
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    environment = {
        **os.environ,
        "KUBECONFIG": str(tmp_path / "kubeconfig"),
        "PATH": f"{plane.programs}:{os.environ['PATH']}",
    }
    space.serve(replicas=1, autoscaling={"mode": "DryRun", "minReplicas": 1, "maxReplicas": 8})
    run = dict.fromkeys(command for _, command in printed() if reason_not_run(command) is None)
    assert len(run) > 15
    for command in run:
        words = command.partition(" | ")[0]
        for placeholder, value in PLACEHOLDERS.items():
            words = re.sub(rf"(?<![A-Z]){placeholder}\b", value.format(namespace=space.name), words)
        done = subprocess.run(
            ["bash", "-c", words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"

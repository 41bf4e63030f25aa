"""The commands of the quick start, run as they are printed on the cluster of a kubeconfig."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from cluster.bed import Bed
from cluster.demo import install, uninstall_release
from cluster.images import REPOSITORY
from e2e.conftest import ON_THE_NODE
from support.deployments import MODEL, ServedNamespace
from support.pages import blocks

pytestmark = [pytest.mark.cluster]

PAGE = "docs/quickstart.md"
HEADINGS = ("## On your cluster", "## Without Kubernetes")


def of_the_cluster(language: str) -> list[str]:
    """Return the blocks of a language under the heading `On your cluster`."""
    lines = (REPOSITORY / PAGE).read_text().splitlines()
    first, end = (lines.index(heading) for heading in HEADINGS)
    places = {place: text for place, text in blocks(language) if place.startswith(f"{PAGE}:")}
    return [text for place, text in places.items() if first < int(place.partition(":")[2]) < end]


@pytest.fixture
def shell(bed: Bed, namespace: ServedNamespace, tmp_path: Path) -> dict[str, str]:
    """The environment of a user of the bed's cluster, with a kubeconfig whose namespace is the test's."""
    config = yaml.safe_load(bed.kubeconfig.read_text())
    for context in config["contexts"]:
        context["context"]["namespace"] = namespace.name
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    return {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": f"{bed.programs}:{os.environ['PATH']}"}


def bash(script: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a script until its first error, end what it leaves behind, and return what it wrote. Fails with that text."""
    process = subprocess.Popen(
        ["bash", "-euxo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=(output := folder / "output").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        status = process.wait(1500)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
    text = output.read_text()
    assert status == 0, text
    return text


def test_the_commands_for_a_cluster_of_ones_own_end_with_an_answer(
    bed: Bed, shell: dict[str, str], tmp_path: Path
) -> None:
    _, *commands = of_the_cluster("sh")  # the first one builds and pushes the images
    (resource,) = of_the_cluster("yaml")
    # What a registry and the model hub would provide.
    script = "\n".join(commands)
    images = f"--set operator.image={bed.operator_image} --set engine.image={bed.engine_image}"
    replaced = {
        "--set imageRegistry=REGISTRY": images,
        # Without an end, a small model may go on for minutes, and sampled tokens differ.
        '{"model": "chat", ': '{"model": "chat", "temperature": 0, "max_tokens": 64, ',
        # The forwarding starts in the background.
        "curl ": "curl --silent --show-error --fail --retry 20 --retry-delay 1 --retry-connrefused ",
    }
    for printed, here in replaced.items():
        assert script.count(printed) == 1, printed
        script = script.replace(printed, here)
    made = yaml.safe_load(resource)
    assert made["spec"]["model"]["source"].startswith("hf://")
    made["spec"]["model"]["source"] = MODEL
    (tmp_path / "chat.yaml").write_text(yaml.safe_dump(made))
    (tmp_path / "charts").symlink_to(REPOSITORY / "charts")
    uninstall_release(bed)
    try:
        output = bash(script, tmp_path, shell)
    finally:
        install(bed)
    assert "Succeeded" in output, "helm test"
    assert "Berlin" in output


def test_half_of_the_files_or_more_run_on_the_cluster_of_a_kubeconfig(bed: Bed, namespace: ServedNamespace) -> None:
    assert namespace.cluster is bed
    assert bed.kind == "external"
    with pytest.raises(RuntimeError, match="push it to a registry that the cluster of FASTGEN_KUBECONFIG pulls from"):
        bed.build_image("operator")
    files = {path.name for path in Path(__file__).parent.glob("test_*.py")}
    assert ON_THE_NODE.keys() < files
    assert len(ON_THE_NODE) <= len(files) / 2

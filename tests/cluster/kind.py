"""A cluster of kind, where docker answers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from cluster.commands import CommandError, run

VERSION = "v0.30.0"
CLUSTER = "fastgen"
GPUS = 8
Say = Callable[[str], None]


def docker_answers() -> bool:
    """Whether there is a docker daemon to talk to: its client alone is not enough."""
    try:
        run(["docker", "version", "--format={{.Server.Version}}"], timeout=20)
    except (CommandError, OSError, subprocess.TimeoutExpired):
        return False
    return True


def ensure_kind(say: Say) -> Path:
    """kind from PATH, or built from its Go module into the user's cache. Raises RuntimeError where neither can be."""
    if found := shutil.which("kind"):
        return Path(found)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "fastgen" / f"kind-{VERSION}"
    if not (folder / "kind").exists():
        if shutil.which("go") is None:
            raise RuntimeError("docker answers but there is neither kind nor go; install one of them")
        say(f"building kind {VERSION} from its Go module (once)")
        folder.mkdir(parents=True, exist_ok=True)
        run(["go", "install", f"sigs.k8s.io/kind@{VERSION}"], environment={**os.environ, "GOBIN": str(folder)})
    return folder / "kind"


def up(kind: Path, kubectl: Path, kubeconfig: Path, say: Say) -> None:
    """Creates the cluster if it is not there, writes its kubeconfig, and advertises GPUs that the scheduler counts."""
    if CLUSTER not in run([kind, "get", "clusters"]).split():
        say("creating a cluster with kind")
        run([kind, "create", "cluster", f"--name={CLUSTER}", f"--kubeconfig={kubeconfig}", "--wait=180s"], timeout=900)
    kubeconfig.parent.mkdir(parents=True, exist_ok=True)
    kubeconfig.write_text(run([kind, "get", "kubeconfig", f"--name={CLUSTER}"]))
    gpus = json.dumps({"status": {"capacity": {"nvidia.com/gpu": str(GPUS)}}})
    node = f"{CLUSTER}-control-plane"
    config = f"--kubeconfig={kubeconfig}"
    run([kubectl, config, "patch", "node", node, "--subresource=status", "--type=merge", f"--patch={gpus}"])


def down(kind: Path) -> None:
    """Deletes the cluster, if it is there."""
    run([kind, "delete", "cluster", f"--name={CLUSTER}"])


def load_archive(kind: Path, archive: Path) -> None:
    """Makes the image of a docker-archive usable by pods."""
    run([kind, "load", "image-archive", f"--name={CLUSTER}", archive], timeout=1800)


def load_image(kind: Path, name: str) -> None:
    """Makes an image of the docker daemon usable by pods."""
    run([kind, "load", "docker-image", f"--name={CLUSTER}", name], timeout=1800)

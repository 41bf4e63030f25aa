"""A kind cluster, for machines with docker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from cluster.caches import cache_folder
from cluster.commands import CommandError, run

VERSION = "v0.30.0"
CLUSTER = "fastgen"
GPUS = 1
Say = Callable[[str], None]


def docker_answers() -> bool:
    """Return whether a docker daemon is reachable; the client alone is not enough."""
    try:
        run(["docker", "version", "--format={{.Server.Version}}"], timeout=20)
    except (CommandError, OSError, subprocess.TimeoutExpired):
        return False
    return True


def ensure_kind(say: Say) -> Path:
    """Return kind from PATH, or build it into the user's cache. Raises RuntimeError if neither works."""
    if found := shutil.which("kind"):
        return Path(found)
    folder = cache_folder(f"kind-{VERSION}")
    if not (folder / "kind").exists():
        if shutil.which("go") is None:
            raise RuntimeError("docker is available but neither kind nor go is installed; install one of them")
        say(f"building kind {VERSION} from its Go module (once)")
        folder.mkdir(parents=True, exist_ok=True)
        run(["go", "install", f"sigs.k8s.io/kind@{VERSION}"], environment={**os.environ, "GOBIN": str(folder)})
    return folder / "kind"


def up(kind: Path, kubectl: Path, kubeconfig: Path, say: Say) -> None:
    """Create the cluster if it does not exist, write its kubeconfig, and advertise fake GPUs for the scheduler."""
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
    """Delete the cluster if it exists."""
    run([kind, "delete", "cluster", f"--name={CLUSTER}"])


def load_archive(kind: Path, archive: Path) -> None:
    """Load the image of a docker-archive into the cluster."""
    run([kind, "load", "image-archive", f"--name={CLUSTER}", archive], timeout=1800)


def load_image(kind: Path, name: str) -> None:
    """Load an image of the docker daemon into the cluster."""
    run([kind, "load", "docker-image", f"--name={CLUSTER}", name], timeout=1800)

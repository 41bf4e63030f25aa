"""Switches the node's simulated GPUs on and off, and breaks them. See `cluster.simulated_gpu.sitecustomize`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.caches import cache_folder
from support.files import replace_text

# What torch says after a GPU has failed.
CUDA_ERROR = "CUDA error: an illegal memory access was encountered\nSearch for `cudaErrorIllegalAddress'"


def folder() -> Path:
    """Return the folder of this machine that every container sees, in the user's cache. Create it if necessary."""
    gpus = cache_folder("bed-gpus")
    gpus.mkdir(parents=True, exist_ok=True)
    return gpus


def switch_off() -> None:
    """Let no pod find a GPU, whatever an earlier run left behind."""
    for path in folder().iterdir():
        path.unlink()


@contextmanager
def simulated_gpus() -> Iterator[None]:
    """Let pods that start inside the `with` block find a GPU if they ask for one."""
    (folder() / "present").touch()
    try:
        yield
    finally:
        switch_off()


def fail(pod: str) -> None:
    """Let the next step on the pod's GPU end with CUDA_ERROR. The GPU works again after a restart of the container."""
    replace_text(folder() / pod, CUDA_ERROR)


def hang(pod: str) -> None:
    """Let the next step on the pod's GPU never end. The GPU works again after a restart of the container."""
    replace_text(folder() / pod, "hang")

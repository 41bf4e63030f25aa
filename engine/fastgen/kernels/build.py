"""Compiles all CPU kernels ahead of time into a folder: `python -m fastgen.kernels.build FOLDER`.

An image sets `FASTGEN_KERNEL_CACHE` to that folder, so that its engines start without compiling. An engine that starts
without compiled kernels runs this program beside loading the weights, on another core.

A folder says by an empty file, `built-KEY`, that it holds everything that this code needs on this kind of CPU.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from fastgen.kernels import environment


def is_built(folder: Path) -> bool:
    """Does `folder` hold the kernels of this very code for this CPU?"""
    return (folder / _marker()).exists()


def start() -> subprocess.Popen[bytes] | None:
    """Starts compiling into numba's folder in another process; None where nothing is to be done or none can be kept."""
    folder = os.environ.get("NUMBA_CACHE_DIR")
    if folder is None or "numba" in sys.modules or is_built(Path(folder)):
        return None
    # Its output is of no use: what fails there is compiled, and fails aloud, in the engine itself.
    return subprocess.Popen(
        [sys.executable, "-m", "fastgen.kernels.build", folder],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def build(folder: Path) -> None:
    """Compiles into `folder`; importing the modules does it."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    os.environ.pop(environment.PREBUILT, None)
    for module in ("decode", "elementwise"):
        importlib.import_module(f"fastgen.kernels.{module}")
    (folder / _marker()).touch()


def _marker() -> str:
    """`built-` and a hash of all that compiled code depends on."""
    from llvmlite import binding  # type: ignore[import-untyped]

    parts = [
        *(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))),
        str(Path(__file__).parent),  # numba keeps code by the place of its source
        version("numba"),
        version("llvmlite"),
        platform.python_version(),
        os.environ.get("NUMBA_CPU_NAME") or binding.get_host_cpu_name(),
        os.environ.get("NUMBA_CPU_FEATURES") or binding.get_host_cpu_features().flatten(),
    ]
    return "built-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def main() -> int:
    """Runs the program; returns its exit code."""
    if len(sys.argv) != 2:
        print("usage: python -m fastgen.kernels.build FOLDER", file=sys.stderr)
        return 2
    build(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

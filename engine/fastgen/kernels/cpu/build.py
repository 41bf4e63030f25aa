"""Compile all CPU kernels ahead of time into a folder: `python -m fastgen.kernels.cpu.build FOLDER`.

An image sets `FASTGEN_KERNEL_CACHE` to that folder, so its engines start without compiling. An engine without compiled
kernels runs this program on another core while it loads the weights.

An empty file `built-MODULE-KEY` marks a module as completely compiled for this kind of CPU.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from fastgen.kernels.cpu import environment
from fastgen.kernels.cpu.vector_width import has_vnni

# Importing a module compiles its kernels.
ALWAYS = ("attention.decode", "attention.prefill", "elementwise", "matmul.float32")
BFLOAT16 = ("bfloat16",)  # compiles the same modules for both element types
LINEAR_BFLOAT16 = ("matmul.bfloat16",)  # of models in bfloat16: heads and, of quantised models, routers
INT8 = ("matmul.int8",)
PACKED = ("matmul.packed",)  # for both element types
VNNI = ("matmul.int8_vnni",)  # for both element types; cannot be compiled for processors without the instruction
# Including those that only some settings need.
MODULES = (*ALWAYS, *BFLOAT16, *LINEAR_BFLOAT16, *INT8, *PACKED, *(VNNI if has_vnni() else ()))


def is_built(folder: Path, modules: Iterable[str] = MODULES) -> bool:
    """Return whether `folder` holds the kernels of `modules`, of exactly this code and for this CPU."""
    return all((folder / _marker(module)).exists() for module in modules)


def start(modules: Iterable[str] = ALWAYS) -> list[subprocess.Popen[bytes]]:
    """Compile each module that is missing in numba's cache folder in a process of its own; return the processes.

    Start none without a folder, or if this process has already imported numba.
    """
    folder = os.environ.get("NUMBA_CACHE_DIR")
    if folder is None or "numba" in sys.modules:
        return []
    # Discard their output: whatever fails there is compiled again, and reported, in the engine itself.
    return [
        subprocess.Popen(
            [sys.executable, "-m", "fastgen.kernels.cpu.build", folder, module],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for module in modules
        if not is_built(Path(folder), [module])
    ]


def compile_modules(folder: Path, modules: Iterable[str] = MODULES) -> None:
    """Compile the modules that `folder` lacks into it."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    os.environ.pop(environment.PREBUILT, None)
    environment.prepare()
    for module in modules:
        if not is_built(folder, [module]):
            importlib.import_module(f"{__package__}.{module}")
            (folder / _marker(module)).touch()


def _marker(module: str) -> str:
    """Return the name of the file that marks a compiled module, with a hash of all that its code depends on."""
    from llvmlite import binding  # type: ignore[import-untyped]

    parts = [
        environment.source_digest(),
        version("numba"),
        version("llvmlite"),
        platform.python_version(),
        os.environ.get("NUMBA_CPU_NAME") or binding.get_host_cpu_name(),
        os.environ.get("NUMBA_CPU_FEATURES") or binding.get_host_cpu_features().flatten(),
    ]
    return f"built-{module}-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def main() -> int:
    """Run the program and return its exit code."""
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(MODULES):
        print(f"usage: python -m fastgen.kernels.cpu.build FOLDER [{'|'.join(MODULES)} ...]", file=sys.stderr)
        return 2
    compile_modules(Path(sys.argv[1]), sys.argv[2:] or MODULES)
    return 0


if __name__ == "__main__":
    sys.exit(main())

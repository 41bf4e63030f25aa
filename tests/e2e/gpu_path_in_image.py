"""All of the GPU path that needs no GPU. test_engine_image.py runs this program in a pod of the engine's image."""

from __future__ import annotations

import importlib
import os
import pkgutil
import socket
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.nvidia import driver
from triton.runtime.build import _build, compile_module_from_src

import fastgen
from fastgen.kernels.cpu import build
from fastgen.kernels.cpu.vector_width import has_vnni
from fastgen.kernels.triton import compilation

MODULE = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *unused) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, 0}, {0}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "answer", 0, -1, methods};
PyMODINIT_FUNC PyInit_answer(void) { return PyModule_Create(&module); }
"""


def runs_as_a_pod_does() -> None:
    assert os.getuid() == 65532
    assert os.statvfs("/").f_flag & os.ST_RDONLY
    assert not resolves("example.com")


def resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, 443))
    except OSError:
        return False


def finds_the_driver_where_gke_mounts_it() -> None:
    assert os.environ["LD_LIBRARY_PATH"].split(":") == ["/usr/local/nvidia/lib", "/usr/local/nvidia/lib64"]


def lets_the_segments_of_the_allocator_grow() -> None:
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def imports_every_module_of_the_engine() -> None:
    """Import all but programs, and kernels that this processor cannot run: they cannot be compiled for it."""
    left_out = set() if has_vnni() else {f"fastgen.kernels.cpu.{name}" for name in build.VNNI}
    for module in pkgutil.walk_packages(fastgen.__path__, "fastgen."):
        if module.name.rpartition(".")[2] != "__main__" and module.name not in left_out:
            importlib.import_module(module.name)


def builds_a_module() -> None:
    assert compile_module_from_src(MODULE, "answer").answer() == 42
    cache = Path(triton.knobs.cache.dir)
    assert cache.is_relative_to(os.environ["HOME"])
    assert list(cache.rglob("answer*.so"))


def builds_the_interface_to_the_driver() -> None:
    """Build what Triton builds at its first launch, against an empty stand-in of the driver's library."""
    folder = tempfile.mkdtemp()
    library = Path(folder, driver.libraries[0])
    subprocess.run(["gcc", "-shared", "-o", library, "-x", "c", os.devnull], check=True)
    source = Path(driver.dirname, "driver.c")
    built = _build("cuda_utils", str(source), folder, [folder], driver.include_dirs, driver.libraries, [])
    assert Path(built).stat().st_size > 10_000


def compiles_a_kernel() -> None:
    """Compile down to machine code, which takes Triton's own ptxas."""
    variant = next(compilation.variants("add_rms_norm/bf16_4096"))
    compiled = compilation.compile_variant(variant, 90)
    assert compiled.is_good, compiled
    assert compiled.registers > 0


if __name__ == "__main__":
    for check in (
        runs_as_a_pod_does,
        finds_the_driver_where_gke_mounts_it,
        lets_the_segments_of_the_allocator_grow,
        imports_every_module_of_the_engine,
        builds_a_module,
        builds_the_interface_to_the_driver,
        compiles_a_kernel,
    ):
        check()
        print(check.__name__)

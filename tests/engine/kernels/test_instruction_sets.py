"""Kernels compiled for each instruction set that this processor can execute, each in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding

from fastgen.kernels.cpu import environment

V2 = ("cx16", "popcnt", "sse3", "ssse3", "sse4.1", "sse4.2")
V3 = (*V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
SETS = {"x86-64-v2": V2, "x86-64-v3": V3, "x86-64-v4": V4}
# One is enough: how kernels share their work does not depend on the instruction set.
WITH_ALL_THREADS = "x86-64-v3"
HERE = Path(__file__).parent
TESTS = ("test_extremes.py", "test_deterministic.py", "test_packed_matmul.py")
# Plugins that take seconds to import and that these tests do not use.
UNUSED = ("cacheprovider", "schemathesis", "hypothesispytest")
PROBE = """
from fastgen.kernels.cpu import environment, vector_width
environment.prepare()
from numba.core.registry import cpu_target
print(cpu_target.target_context.codegen().magic_tuple()[1], vector_width.WIDTH)
"""
# Prints a digest of products of packed weights of every form.
DIGEST = """
import hashlib
import torch
from engine.kernels.test_packed_matmul import FORMS, Weights
torch.manual_seed(0)
x = torch.randn(5, 512)
products = [Weights(50, 16, form).product(x).contiguous() for form in FORMS]
print(hashlib.sha256(b"".join(product.numpy().tobytes() for product in products)).hexdigest())
"""


def compiled_for(name: str) -> dict[str, str]:
    """Return the environment that compiles kernels for an instruction set; skip if the processor lacks it."""
    has = binding.get_host_cpu_features()
    lacking = [feature for feature in SETS[name] if not has.get(feature)]
    if lacking:
        pytest.skip(f"this processor ({binding.get_host_cpu_name()}) cannot execute {name}: no {', '.join(lacking)}")
    # `environment.prepare` sets the last one on processors with 512-bit vectors.
    features = ",".join([*(f"+{feature}" for feature in SETS[name]), "-prefer-256-bit"])
    settings = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features}
    if name == WITH_ALL_THREADS:
        settings |= dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"), str(environment.usable_cpus()))
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV"))}
    return kept | settings


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_kernels_are_right_for_the_instruction_set(name: str) -> None:
    plugins = [argument for plugin in UNUSED for argument in ("-p", f"no:{plugin}")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *plugins, *(str(HERE / name) for name in TESTS)],
        env=compiled_for(name),
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


@pytest.mark.parametrize(("name", "width"), [("x86-64-v2", 8), ("x86-64-v3", 8), ("x86-64-v4", 16)])
def test_kernels_are_compiled_for_the_requested_instruction_set(name: str, width: int) -> None:
    """Otherwise the tests above would all run code for this processor."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=compiled_for(name), capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [name, str(width)]


@pytest.mark.slow
def test_products_of_packed_weights_are_the_same_bit_for_bit_with_avx2_and_avx512() -> None:
    found = set()
    for settings in (compiled_for("x86-64-v3"), compiled_for("x86-64-v4"), compiled_here()):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST], env=settings, cwd=HERE.parents[1], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.add(done.stdout)
    assert len(found) == 1


def compiled_here() -> dict[str, str]:
    """Return the environment that compiles kernels for this processor."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST", "COV", "NUMBA_CPU"))}

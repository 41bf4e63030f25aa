"""Memory and results of a loaded model, with each product and instruction set forced."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch

from support.demo_weights import demo_model

pytestmark = pytest.mark.slow

MIB = 1 << 20
# 355 to 400 MiB were measured, 320 of them Python's, torch's and numba's; 570 where freed memory is kept.
MOST = 450 * MIB

# Run in a separate process, free of other tests' memory. Prints the anonymous bytes beyond the weights; the cache takes
# none before it is used. Then saves the logits of a prompt in two chunks and a decode.
LOAD = """
import re, sys
from pathlib import Path
from fastgen.settings import EngineConfig
from fastgen.model.processor import describe_processor
from fastgen.runner.loader import load_runner
from fastgen.model.source import ModelSource

config = EngineConfig(model=sys.argv[1], kv_cache_memory=16 << 20, dtype="float32")
runner = load_runner(ModelSource.open(config.model), config, lambda stage, fraction: None)
(kilobytes,) = re.findall(r"^Pss_Anon:\\s+(\\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
print(int(kilobytes) * 1024 - runner.num_parameters * 4)
print(describe_processor())

import numpy as np
import torch
from fastgen.core.step_plan import Chunk, StepPlan
from support.driving import logits, sequence

prompt = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198] * 9
rows, done = [], 0
for length in (70, 71, 79, 108):
    subject = sequence(prompt[:length], [0, 1])
    subject.num_computed_tokens = done
    rows.append(logits(runner, StepPlan((Chunk(subject, done, length - done),))))
    done = length
np.save(sys.argv[2], torch.cat(rows).numpy())
"""

NARROW = {"NUMBA_CPU_NAME": "x86-64-v3", "NUMBA_CPU_FEATURES": "+avx2,+fma,+bmi,+bmi2,+f16c"}
VARIANTS = {
    "tiled": {"FASTGEN_CPU_LINEAR": "tiled"},
    "tiled, 256-bit vectors": {"FASTGEN_CPU_LINEAR": "tiled", **NARROW},
    "onednn": {"FASTGEN_CPU_LINEAR": "onednn"},
    "onednn, AVX2": {"FASTGEN_CPU_LINEAR": "onednn", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "plain": {"FASTGEN_CPU_LINEAR": "plain"},
    "plain, AVX2": {"FASTGEN_CPU_LINEAR": "plain", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
}
# Forced by variants, or by the tests of small models.
FORCED = {name for settings in VARIANTS.values() for name in settings} | {"OMP_NUM_THREADS", "NUMBA_NUM_THREADS"}


@dataclass(frozen=True)
class Loaded:
    """The output of one process."""

    beyond_weights: int  # bytes
    description: str
    logits: torch.Tensor  # [4, vocabulary]


Load = Callable[[str], Loaded]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Run one process per variant, with only the variant's settings forced."""
    folder = tmp_path_factory.mktemp("logits")

    @cache
    def run(variant: str) -> Loaded:
        settings = VARIANTS[variant]
        if "NUMBA_CPU_NAME" in settings and not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
            pytest.skip("a processor without AVX2")
        narrower = settings.keys() & {"NUMBA_CPU_NAME", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS"}
        if narrower and torch.backends.cpu.get_cpu_capability() == "AVX2":
            pytest.skip("a processor with AVX2 and nothing wider runs this code in the variant that forces no width")
        if settings["FASTGEN_CPU_LINEAR"] == "onednn" and not torch.backends.mkldnn.is_available():
            pytest.skip("a torch build without oneDNN")
        path = folder / f"{variant}.npy"
        done = subprocess.run(
            [sys.executable, "-c", LOAD, str(demo_model()), str(path)],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name not in FORCED}
            | {"PYTHONPATH": ":".join(filter(None, sys.path)), **settings},
        )
        beyond, description = done.stdout.splitlines()
        return Loaded(int(beyond), description, torch.from_numpy(np.load(path)))

    return run


@pytest.mark.parametrize("variant", VARIANTS)
def test_memory_beyond_the_weights_is_bounded_once_a_model_is_loaded(variant: str, load: Load) -> None:
    assert 0 < load(variant).beyond_weights < MOST


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_are_equal_with_every_product(variant: str, load: Load) -> None:
    torch.testing.assert_close(load(variant).logits, load("plain").logits, atol=2e-4, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_forced_product_and_vector_width_are_in_use(variant: str, load: Load) -> None:
    assert f"product {VARIANTS[variant]['FASTGEN_CPU_LINEAR']}," in load(variant).description
    if "256-bit vectors" in variant:
        assert load(variant).description.endswith("256-bit vectors")

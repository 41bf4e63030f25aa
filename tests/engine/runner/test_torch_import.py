"""What a start imports: each case in a separate process, as the engine process does it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastgen.runner.torch_import import META_KERNELS

START = """
import json, sys
from functools import partial
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.engine import process
from fastgen.settings import EngineConfig

process.import_early()
from fastgen.engine.build import build_engine
from fastgen.model.source import ModelSource
from fastgen.runner.torch_import import import_meta_kernels
from fastgen.text.tokenizer import Tokenizer

config = EngineConfig(model=sys.argv[1], device=sys.argv[2], dtype="float32", kv_cache_memory=1 << 24)
source = ModelSource.open(config.model)
import_meta_kernels(source, config)
if config.device == "cpu":
    load = partial(Tokenizer.load, source.tokenizer)
    engine = build_engine(source, config, load, lambda stage, fraction: None).engine
ready = set(sys.modules)
if config.device == "cpu":
    for number, sampling in enumerate([
        SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, top_k=20, seed=1, repetition_penalty=1.1),
    ]):
        engine.add(Request(id=str(number), prompt_token_ids=list(range(5, 90)), sampling=sampling))
    while engine.has_work:
        engine.step()
print(json.dumps({"ready": sorted(ready), "later": sorted(set(sys.modules) - ready)}))
"""

DEFERRED = """
import sys
from fastgen.runner.torch_import import META_KERNELS, import_torch

import_torch()
import torch
assert META_KERNELS not in sys.modules
torch._meta_registrations.device_hint  # as torch's own modules use it
assert META_KERNELS in sys.modules
print(tuple(torch.linalg.qr(torch.empty(3, 2, device="meta"))[0].shape))
"""


def run(program: str, *arguments: str) -> str:
    """Run a program in another process; return its output."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules(model: Path, device: str) -> Any:
    """Return the modules that an engine has imported once it is ready, and those that its requests import then."""
    return json.loads(run(START, str(model), device))


@pytest.mark.slow
def test_an_engine_on_the_cpu_imports_what_it_needs_and_its_steps_import_no_more(small_model: Path) -> None:
    found = modules(small_model, "cpu")
    unused = {META_KERNELS, "torch._decomp", "transformers", "triton", "rich", "fastgen.model.layers.gpu_backend"}
    assert not unused & set(found["ready"])
    assert not [name for name in found["later"] if name.split(".")[0] in ("fastgen", "numba", "torch")]


@pytest.mark.slow
def test_other_devices_have_the_meta_kernels(small_model: Path) -> None:
    assert META_KERNELS in modules(small_model, "cuda")["ready"]


@pytest.mark.slow
def test_meta_kernels_that_were_left_out_are_imported_when_torch_asks_for_them() -> None:
    assert run(DEFERRED) == "(3, 2)\n"

"""What the start of an engine on the CPU imports, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import json, sys
from functools import partial
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.engine import process
from fastgen.settings import EngineConfig

process.import_torch()
from fastgen.engine.build import build_engine
from fastgen.model.source import ModelSource
from fastgen.text.tokenizer import Tokenizer

config = EngineConfig(model=sys.argv[1], device="cpu", dtype="float32", kv_cache_memory=1 << 24)
source = ModelSource.open(config.model)
load = partial(Tokenizer.load, source.tokenizer)
engine = build_engine(source, config, load, lambda stage, fraction: None).engine
ready = set(sys.modules)
for number, sampling in enumerate([
    SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1),
    SamplingParams(max_tokens=3, temperature=0.8, top_p=0.9, top_k=20, seed=1, repetition_penalty=1.1),
]):
    engine.add(Request(id=str(number), prompt_token_ids=list(range(5, 90)), sampling=sampling))
while engine.has_work:
    engine.step()
print(json.dumps({"ready": sorted(ready), "later": sorted(set(sys.modules) - ready)}))
"""


@pytest.mark.slow
def test_the_steps_of_a_ready_engine_import_nothing_of_torch_numba_or_fastgen(small_model: Path) -> None:
    done = subprocess.run([sys.executable, "-c", START, str(small_model)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert not {"transformers", "triton", "rich", "fastgen.model.layers.gpu_backend"} & set(found["ready"])
    assert not [name for name in found["later"] if name.split(".")[0] in ("fastgen", "numba", "torch")]

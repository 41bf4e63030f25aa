"""The simulated GPU of the test cluster: the code path of a GPU, a queue of work, and faults on demand."""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from cluster import standin
from cluster.commands import run
from cluster.gpus import CUDA_ERROR
from cluster.simulated_gpu import sitecustomize
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.engine.core import Engine
from fastgen.model.source import ModelSource
from fastgen.runner import loader
from fastgen.settings import EngineConfig
from support.tiny_models import saved

PROGRAM = """
import fastgen.runner.loader as loader
print(loader._load_on_gpu.__module__, loader.load_runner.__module__)
"""

# Prints the tokens of a prompt of three tokens.
DIVIDED = """
import sys
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.engine.build import load_on_ranks
from fastgen.engine.calibration import calibrate
from fastgen.engine.core import Engine
from fastgen.model.source import ModelSource
from fastgen.settings import EngineConfig

config = EngineConfig(
    model=sys.argv[1], device="cuda", tensor_parallel=2, block_size=16, max_model_length=160, kv_cache_memory=4 << 20,
    max_sequences=4
)
runner = load_on_ranks(ModelSource.open(config.model), config, lambda _stage, _fraction: None)
config, _ = calibrate(runner, config, lambda _stage, _fraction: None)
runner.prepare_for(config, lambda _fraction: None)
engine = Engine(runner, config)
sampling = SamplingParams(temperature=0, max_tokens=12)
engine.add(Request(id="a", prompt_token_ids=[3, 10, 17], sampling=sampling))
while engine.has_work:
    print(*(token for output in engine.step().outputs for token in output.token_ids))
"""


def engine(folder: Path, device: str) -> Engine:
    config = EngineConfig(
        model=str(folder),
        device=device,
        dtype="float32",
        block_size=16,
        max_model_length=160,
        kv_cache_memory=4 << 20,
        token_budget=16,
    )
    runner = loader.load_runner(ModelSource.open(config.model), config, lambda _stage, _fraction: None)
    assert isinstance(runner, sitecustomize.SimulatedGPU) == (device == "cuda")
    return Engine(runner, config)


def request(name: str, length: int, **sampling: object) -> Request:
    params = SamplingParams(**{"temperature": 0, "max_tokens": 12, **sampling})  # type: ignore[arg-type]
    return Request(id=name, prompt_token_ids=[3 + 7 * n % 90 for n in range(length)], sampling=params)


def tokens_of(subject: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while subject.has_work:
        for output in subject.step().outputs:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return tokens


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("_load_on_gpu", "gpu_runner"):
        monkeypatch.setattr(loader, name, getattr(loader, name))
    monkeypatch.setattr(sitecustomize, "GPUS", tmp_path)
    sitecustomize.simulate(loader)


def test_its_tokens_equal_those_of_the_cpu_kernels(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    tokens = []
    for device in ("cuda", "cpu"):
        subject = engine(folder, device)
        for length in (3, 20, 70):
            subject.add(request(f"greedy {length}", length))
            subject.add(request(f"sampled {length}", length, temperature=0.8, seed=length))
        tokens.append(tokens_of(subject))
    assert tokens[0] == tokens[1]


def test_a_fault_ends_the_next_step_unless_it_is_older_than_the_process(tmp_path: Path) -> None:
    subject = engine(saved("llama", tmp_path), "cuda")
    subject.add(request("a", 3, max_tokens=40))
    fault = tmp_path / os.uname().nodename
    fault.write_text(CUDA_ERROR)
    os.utime(fault, (0, 0))
    assert subject.step().outputs
    os.utime(fault, (time.time() + 1, time.time() + 1))
    with pytest.raises(RuntimeError, match="CUDA error: an illegal memory access"):  # noqa: PT012
        subject.step()  # may be older than the fault
        subject.step()


@pytest.mark.parametrize("switched_on", [True, False])
def test_containers_find_a_gpu_only_if_it_is_switched_on(switched_on: bool, tmp_path: Path) -> None:
    modules = run([sys.executable, "-c", PROGRAM], environment=as_in_a_container(tmp_path, switched_on)).split()
    assert modules == ["sitecustomize" if switched_on else "fastgen.runner.loader", "fastgen.runner.loader"]


def as_in_a_container(folder: Path, switched_on: bool) -> dict[str, str]:
    """Return the environment. The folders are side by side."""
    shutil.copytree(standin.SIMULATED_GPU, folder / "simulated-gpu")
    (folder / "gpus").mkdir()
    if switched_on:
        (folder / "gpus" / "present").touch()
    return {**os.environ, "PYTHONPATH": f"{standin.SOURCE}:{folder / 'simulated-gpu'}"}


def test_a_model_is_divided_among_processes_with_a_gpu_each(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    environment = as_in_a_container(tmp_path, switched_on=True)
    tokens = run([sys.executable, "-c", DIVIDED, str(folder)], environment=environment).split()
    subject = engine(folder, "cpu")
    subject.add(request("a", 3))
    assert list(map(int, tokens)) == tokens_of(subject)["a"]

"""A machine without a usable GPU: each cause gives one line that names the remedy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import pytest
import torch

from fastgen.model.layers.rank_group import ONE_RANK
from fastgen.model.source import ModelSource
from fastgen.runner.device import LEAST_DRIVERS, choose_cache_dtype, choose_device
from fastgen.runner.loader import _load_on_torch
from fastgen.settings import ConfigError, EngineConfig
from support.tiny_models import saved

REPOSITORY = Path(__file__).parents[3]
CUDA = EngineConfig(model="", device="cuda")
OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)
NONE = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from"


def failing(text: str) -> object:
    def fail(*_args: object, **_options: object) -> NoReturn:
        raise RuntimeError(text)

    return fail


@pytest.mark.parametrize(
    ("version", "error", "message"),
    [
        (None, "", "this torch is built without CUDA: install a CUDA build of torch"),
        (
            "13.0",
            OLD,
            "which supports CUDA 11.4 at most, but torch needs CUDA 13.0: update the driver to 580 or newer",
        ),
        ("12.9", OLD, "but torch needs CUDA 12.9: update the driver to 525 or newer"),
        ("14.1", OLD, "but torch needs CUDA 14.1: update the driver, or"),
        ("13.0", NONE, r"no NVIDIA driver is visible: .* spec\.resources\.gpu\.count"),
        ("13.0", "No CUDA GPUs are available", r"torch finds no GPU \(No CUDA GPUs are available\): check nvidia-smi"),
    ],
)
def test_a_missing_gpu_is_explained(
    version: str | None, error: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", failing(error))
    with pytest.raises(ConfigError, match=message) as raised:
        choose_device(CUDA)
    assert str(raised.value).startswith("--device cuda: ")
    assert str(raised.value).endswith(", or use --device cpu")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "page",
    ["README.md", "docs/operations.md", "docs/limits.md", "docs/how-to/gpu-nodes.md", "examples/gpu.yaml"],
)
def test_pages_name_the_driver_that_the_pinned_torch_needs(page: str) -> None:
    pinned = re.search(r"^cuda-toolkit==(\d+)", (REPOSITORY / "requirements/engine.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    least = LEAST_DRIVERS[int(pinned[1])]
    assert re.search(rf"driver\b[^.]*\b{least}", (REPOSITORY / page).read_text().replace("\n", " "))


def with_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)


def test_a_gpu_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, "Tesla T4", (7, 5))
    with pytest.raises(ConfigError, match=r"Tesla T4 has compute capability 7\.5: use a GPU with 8\.0 or higher"):
        choose_device(CUDA)


def test_a_gpu_that_does_not_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, "NVIDIA X", (15, 0))
    monkeypatch.setattr(torch, "ones", failing("CUDA error: no kernel image is available\nCompile with TORCH_USE"))
    with pytest.raises(ConfigError, match="NVIDIA X does not work: CUDA error: no kernel image is available: check"):
        choose_device(CUDA)


def test_a_gpu_that_works_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, "NVIDIA H200", (9, 0))
    one = torch.ones(1)
    monkeypatch.setattr(torch, "ones", lambda _size, device: one if device.type == "cuda" else None)
    assert choose_device(CUDA) == torch.device("cuda", 0)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, "NVIDIA H200", (9, 0))
    current: list[torch.device] = []
    one = torch.ones(1)
    monkeypatch.setattr(torch, "ones", lambda _size, device: one if device == current[-1] else None)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = EngineConfig(model="", device="cuda", tensor_parallel=4)
    assert [choose_device(config, rank).index for rank in range(4)] == [0, 1, 2, 3]
    assert [device.index for device in current] == [0, 1, 2, 3]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"--tensor-parallel 4: torch finds 2 GPUs: .*spec\.resources\.gpu\.count"):
        choose_device(config, 0)


def test_a_float8_cache_needs_a_gpu_and_operators_that_have_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8: supported on --device cuda only: remove it"):
        EngineConfig(model="", kv_cache_dtype="fp8")
    config = EngineConfig(model="", device="cuda", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8: .* compute capability 8\.6: use one with 8\.9"):
        choose_cache_dtype(config, torch.bfloat16, (8, 6))
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8: not available for this model"):
        _load_on_torch(
            ModelSource.open(str(saved("llama", tmp_path))), config, lambda _stage, _fraction: None, ONE_RANK
        )
    assert choose_cache_dtype(config, torch.bfloat16, (9, 0)) == torch.float8_e4m3fn
    assert choose_cache_dtype(CUDA, torch.bfloat16, (9, 0)) == torch.bfloat16


def test_the_log_names_the_device_that_torch_operations_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fastgen.runner.device.choose_device", lambda _config, _rank=0: torch.device("cuda", 0))
    monkeypatch.setattr("fastgen.model.native.load_on_torch", Mock())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H100")
    source = ModelSource.open(str(saved("llama", tmp_path)))
    with caplog.at_level("INFO", "fastgen.model"):
        _load_on_torch(source, CUDA, lambda _stage, _fraction: None, ONE_RANK)
    assert caplog.messages == ["GPU NVIDIA H100; products by torch; dtype torch.bfloat16"]

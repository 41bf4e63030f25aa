"""Kernels are compiled while weights are read: exactly those that the first steps then need."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface

from fastgen.model.native import load_on_gpu
from fastgen.model.partition import Partition
from fastgen.model.source import ModelSource
from fastgen.runner import kernel_compilation, loader
from fastgen.runner.device import run_first_steps
from fastgen.runner.kernel_compilation import KernelCompilation, KernelLaunch, first_launches
from fastgen.runner.loader import gpu_runner
from fastgen.settings import EngineConfig
from support.kernel_keys import KernelKeys, key_of
from support.simulated_graphs import SimulatedCapture
from support.tiny_models import saved
from support.waiting import HANG_SECONDS

CPU = torch.device("cpu")
# Of float16 the interpreter computes what a GPU does; of bfloat16 it needs other constants.
DTYPE = torch.float16
LONGEST = 160


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU whose streams and events do nothing."""
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _device: SimpleNamespace(multi_processor_count=132))
    return torch.device("cuda", 0)


def launches_of(source: ModelSource, gpu: torch.device, config: EngineConfig) -> list[KernelLaunch]:
    return first_launches(source.architecture, gpu, DTYPE, DTYPE, config)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe"])
def test_the_kernels_of_all_first_steps_are_compiled_and_no_others(
    family: str, gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelSource.open(str(saved(family, tmp_path)))
    config = EngineConfig(
        model="", device="cuda", token_budget=300, max_sequences=8, max_model_length=LONGEST, block_size=16
    )
    compiled = {key_of(each.kernel, *each.arguments, **each.options) for each in launches_of(source, gpu, config)}
    monkeypatch.setattr("fastgen.runner.graphs.CUDAGraphCapture", lambda _device: SimulatedCapture())
    model = load_on_gpu(source, CPU, DTYPE, max_model_length=LONGEST, progress=lambda _fraction: None)
    with KernelKeys() as needed:
        run_first_steps(model, config, gpu_runner)
    assert {name for name, _ in needed.keys} >= {"paged_attention_kernel", "_process_logits"}
    assert sorted(compiled) == sorted(needed.keys)


@pytest.mark.slow
def test_the_kernels_of_a_rank_are_those_of_its_part(gpu: torch.device, tmp_path: Path) -> None:
    """All ranks launch the same kernels, so rank 0 compiles them for all."""
    source = ModelSource.open(str(saved("qwen3-moe", tmp_path)))
    config = EngineConfig(model="", device="cuda", token_budget=64, max_sequences=8, block_size=16)
    alone, first, last = (
        {key_of(each.kernel, *each.arguments, **each.options) for each in launches}
        for launches in (
            launches_of(source, gpu, config),
            *(first_launches(source.architecture, gpu, DTYPE, DTYPE, config, Partition(rank, 4)) for rank in (0, 3)),
        )
    )
    assert first == last
    assert first != alone, "fewer query heads have a key-value head in common"


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Let Triton compile for a GPU that is not there."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    active = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    driver.set_active(active)
    yield
    driver.set_active(None)


@triton.jit  # type: ignore[untyped-decorator]
def first(x, count: triton.language.constexpr):  # type: ignore[no-untyped-def]
    triton.language.store(x, count)


@triton.jit  # type: ignore[untyped-decorator]
def second(x, count: triton.language.constexpr):  # type: ignore[no-untyped-def]
    triton.language.store(x + 1, count)


@triton.jit
def broken(x):  # type: ignore[no-untyped-def]
    triton.language.store(x, 1 // 0)


def launch(kernel: object, *constants: int) -> KernelLaunch:
    return KernelLaunch(kernel, [triton.MockTensor(torch.int32), *constants], {"num_warps": 1})


@pytest.mark.slow
@pytest.mark.usefixtures("target")
def test_kernels_are_compiled_in_threads_and_a_broken_one_stops_no_other() -> None:
    progress = Mock()
    launches = [launch(first, 1), launch(broken), launch(first, 2), launch(second, 1), launch(first, 1)]
    KernelCompilation(lambda: launches).wait(progress)
    compiled = [kernel for each in (first, second) for kernel in each.device_caches[0][0].values()]
    assert len(compiled) == 3
    assert all(kernel.asm["cubin"] for kernel in compiled)
    assert progress.mock_calls[-1].args == (1.0,)


@pytest.mark.slow
@pytest.mark.usefixtures("target")
@pytest.mark.parametrize("failures", [1, 2])
def test_a_kernel_that_cannot_be_submitted_is_tried_again_and_stops_no_other(
    failures: int, caplog: pytest.LogCaptureFixture
) -> None:
    error = SystemError("AST constructor recursion depth mismatch (before=36, after=29)")
    faulty = Mock(warmup=Mock(side_effect=[*[error] * failures, None]))
    KernelCompilation(lambda: [launch(faulty), launch(second, failures + 10)]).wait(Mock())
    assert faulty.warmup.call_count == 2
    assert len(second.device_caches[0][0]) > 0
    assert ("a kernel is compiled when a step needs it: AST" in caplog.text) == (failures == 2)


@pytest.mark.slow
@pytest.mark.usefixtures("target")
def test_a_second_pod_with_the_same_cache_folder_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: found.append(cache_hit))
    for _pod in range(2):
        for kernel in (first, second):
            kernel.device_caches.clear()
        KernelCompilation(lambda: [launch(first, 3), launch(second, 3)]).wait(Mock())
    assert found == [False, False, True, True]


def test_without_the_launches_kernels_are_compiled_when_steps_need_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "fastgen.model"):
        KernelCompilation(Mock(side_effect=RuntimeError("no fake tensors"))).wait(lambda _fraction: None)
    assert caplog.messages == ["kernels are compiled one by one, when steps need them: no fake tensors"]


def test_the_weights_are_read_meanwhile() -> None:
    begun, read = threading.Event(), threading.Event()

    def launches() -> list[KernelLaunch]:
        begun.set()
        assert read.wait(HANG_SECONDS)
        return []

    compilation, progress = KernelCompilation(launches), Mock(side_effect=lambda _fraction: read.set())
    assert begun.wait(HANG_SECONDS)
    compilation.wait(progress)
    began, *_, ended = [call.args for call in progress.mock_calls]
    assert (began, ended) == ((0.0,), (1.0,))


@pytest.mark.parametrize("rank", [0, 1])
def test_the_loader_compiles_on_one_rank_while_it_reads_the_weights(
    rank: int, gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[tuple[str, float]] = []

    class Compilation:
        def __init__(self, launches: Callable[[], object]) -> None:
            assert callable(launches)
            heard.append(("kernels", 0.0))

        def wait(self, progress: Callable[[float], None]) -> None:
            progress(1.0)

    def read_weights(*_: object, progress: Callable[[float], None], **_settings: object) -> str:
        progress(0.5)
        return "the model"

    monkeypatch.setattr(kernel_compilation, "KernelCompilation", Compilation)
    monkeypatch.setattr("fastgen.model.native.load_on_gpu", read_weights)
    monkeypatch.setattr("fastgen.runner.device.choose_device", lambda *_: gpu)
    monkeypatch.setattr(loader, "check_gpu_memory", lambda *_, **_sizes: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "H100")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (80 << 30, 80 << 30))
    source: Any = SimpleNamespace(architecture=None)
    group: Any = SimpleNamespace(rank=rank, size=2)
    config = EngineConfig(model="", device="cuda")
    assert loader._load_on_gpu(source, config, lambda *stage: heard.append(stage), group) == "the model"
    weights = ("loading weights", 0.5)
    assert heard == ([weights] if rank else [("kernels", 0.0), weights, ("compiling kernels", 1.0)])


def test_a_stand_in_is_aligned_as_its_tensor() -> None:
    whole = torch.zeros(8, dtype=torch.int32)
    offsets = [kernel_compilation._stand_in(whole[first:]).data_ptr() % 16 for first in (0, 1, 4)]
    assert offsets == [0, 4, 0]


class Kernel(KernelInterface):  # type: ignore[misc]
    """Records what is launched."""

    def __init__(self) -> None:
        self.run = Mock()


def test_launches_of_other_threads_run() -> None:
    """Another model of the same process may be serving."""
    kernel, recorded = Kernel(), list[KernelLaunch]()
    with kernel_compilation._launching(recorded):
        kernel[(1,)](7)
        other = threading.Thread(target=lambda: kernel[(2,)](8))
        other.start()
        other.join()
    kernel[(3,)](9)
    assert [each.arguments for each in recorded] == [[7]]
    assert [(call.args, call.kwargs["grid"]) for call in kernel.run.mock_calls] == [((8,), (2,)), ((9,), (3,))]

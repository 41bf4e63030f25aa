"""A simulated GPU for engines on the test cluster. Python imports this module when it starts.

Every container of the node has this folder on its module path, and beside it the folder GPUS of the machine. If that
says so, an engine with `--device cuda` runs the code path of a GPU: its runner, its input and state on the device, its
operators. The device is the CPU, and computes with the operators' twins in float32. Work is queued to one thread, as to
a stream, so the host is ahead of it.

`cluster.gpus` writes to GPUS: `present` switches the GPUs of the node on, and a file of a pod's name breaks its GPU.
"""

from __future__ import annotations

import importlib.util
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastgen.core.step_output import StepOutput
    from fastgen.model.step_input import StepInput
    from fastgen.runner.gpu_runner import GPURunner, GPUTicket
    from fastgen.runner.interface import Mask

GPUS = Path(__file__).parent.parent / "gpus"
LOADER, JOINING = "fastgen.runner.loader", "fastgen.runner.ranks.joining"
STARTED = time.time()


class SimulatedGPU:
    """A GPURunner whose work runs in a thread, in order. Errors show when results are read, as a GPU's do."""

    device = "cuda"

    def __init__(self, runner: GPURunner) -> None:
        self._runner = runner
        self._stream = ThreadPoolExecutor(1, "gpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, step: StepInput) -> Ticket:
        return Ticket(self._stream, self._stream.submit(self._run, step))

    def _run(self, step: StepInput) -> GPUTicket:
        break_if_asked(GPUS / socket.gethostname())
        return self._runner.launch(step)


class Ticket:
    """A step in the queue of a simulated GPU."""

    def __init__(self, stream: ThreadPoolExecutor, launched: Future[GPUTicket]) -> None:
        self._stream = stream
        self._launched = launched

    def sample(self, masks: list[Mask]) -> None:
        self._sampled = self._stream.submit(lambda: self._launched.result().sample(masks))

    def result(self) -> StepOutput:
        self._sampled.result()
        return self._launched.result().result()


def break_if_asked(fault: Path) -> None:
    """Fail or hang as the file says. A process that started after it was written has a GPU that works."""
    try:
        what, written = fault.read_text(), fault.stat().st_mtime
    except FileNotFoundError:
        return
    if written < STARTED:
        return
    if what == "hang":
        threading.Event().wait()
    raise RuntimeError(what)


def simulate(loader: ModuleType) -> None:
    """Replace what the loader does for GPUs."""
    make_runner = loader.gpu_runner

    def make_simulated(model: Any, cache: Any, config: Any, *more: Any, **further: Any) -> Any:
        # Graphs are simulated in the engine's own tests.
        runner = make_runner(model, cache, replace(config, cuda_graphs="off"), *more, **further)
        # The ranks of a divided model compute their steps in turn: gloo's operations wait for the other ranks.
        return SimulatedGPU(runner) if config.tensor_parallel == 1 else runner

    def load_on_gpu(source: Any, config: Any, progress: Callable[[str, float], None], group: Any) -> Any:
        import torch

        from fastgen.model import native

        loader.log.info("simulated GPU: steps by the operators' twins on the CPU")
        return native.load_on_gpu(
            source,
            torch.device("cpu"),
            torch.float32,
            max_model_length=config.max_model_length,
            progress=lambda fraction: progress("loading weights", fraction),
            group=group,
        )

    loader._load_on_gpu = load_on_gpu  # type: ignore[attr-defined]
    loader.gpu_runner = make_simulated  # type: ignore[attr-defined]


def connect_hosts(joining: ModuleType) -> None:
    """Replace the group of ranks on GPUs by that of ranks on CPUs."""
    joining.join_group = lambda store, rank, config: joining.gloo.GlooGroup(  # type: ignore[attr-defined]
        store, rank, config.tensor_parallel
    )


class WhenImported(MetaPathFinder):
    """Calls a function with a module after its import, without importing it.

    Args:
        module: its name.
        change: the function.
    """

    def __init__(self, module: str, change: Callable[[ModuleType], None]) -> None:
        self._module = module
        self._change = change

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_simulate(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = execute_and_simulate  # type: ignore[method-assign]
        return spec


if (GPUS / "present").exists():
    sys.meta_path[:0] = [WhenImported(LOADER, simulate), WhenImported(JOINING, connect_hosts)]

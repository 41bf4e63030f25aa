"""CUDA graphs simulated on the CPU: they find what a replay of a real graph would compute wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Their results are Python numbers, or have sizes that depend on data: a graph cannot contain them.
WAITS = {"_local_scalar_dense", "item", "nonzero", "masked_select", "unique", "equal", "is_nonzero"}

_Operation = tuple[str, tuple[Any, ...]]


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations by their names, sizes, numbers, and the addresses of tensors that existed before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self._made: list[torch.Tensor] = []  # kept alive, so that no address is used twice
        self._addresses: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{name} in a captured step waits for the device"
        operands = tuple(self._described(leaf) for leaf in tree_leaves((args, kwargs or {})))
        self.operations.append((name, operands))
        result = func(*args, **kwargs or {})
        known = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs or {})) if _is_tensor(leaf)}
        for leaf in tree_leaves(result):
            if _is_tensor(leaf) and leaf.untyped_storage().data_ptr() not in known:
                self._addresses[leaf.untyped_storage().data_ptr()] = len(self._made)
                self._made.append(leaf)
        return result

    def _described(self, value: Any) -> Any:
        if not _is_tensor(value):
            return str(value)
        storage = value.untyped_storage().data_ptr()
        where = ("made", self._addresses[storage]) if storage in self._addresses else ("kept", storage)
        return (*where, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class SimulatedGraph:
    """Replays by running the captured function again. Fails if an operation differs from the captured one."""

    def __init__(self, run: Callable[[], None], captured: list[_Operation]) -> None:
        self._run = run
        self._captured = captured
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        found = _recorded(self._run)
        for number, (was, now) in enumerate(zip(self._captured, found, strict=False)):
            assert was == now, f"operation {number} was captured as {was}, and would now be {now}"
        assert len(self._captured) == len(found)


class SimulatedCapture:
    """Implements `runner.graphs.GraphCapture` on the CPU."""

    def __init__(self) -> None:
        self.graphs: list[SimulatedGraph] = []

    def capture(self, run: Callable[[], None]) -> SimulatedGraph:
        run()
        self.graphs.append(SimulatedGraph(run, _recorded(run)))
        return self.graphs[-1]

    def used_bytes(self) -> int:
        return len(self.graphs) << 20


def _recorded(run: Callable[[], None]) -> list[_Operation]:
    """Run with memory that is not written holding NaN, and return the operations."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # then new memory is filled with NaN or the largest integer
    try:
        with _Recording() as recording:
            run()
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
    operations: list[_Operation] = recording.operations
    return operations

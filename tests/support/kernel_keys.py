"""Records what Triton would compile for the launches of the code path of a GPU, on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import KernelInterface, create_function_from_signature

from fastgen.kernels.gpu.operators import has_kernels, launch_function


class KernelKeys(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, `keys` gets a key for each kernel, types, constants and alignments: Triton compiles each once.

    Operators compute their results by their twins.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "fastgen" and has_kernels(name):
            with mock.patch.object(KernelInterface, "__getitem__", self._launcher):
                launch_function(name)(*args, **kwargs or {})
        return func(*args, **kwargs or {})

    @property
    def _launcher(self) -> Callable[[Any, Any], Callable[..., None]]:
        def launcher(kernel: Any, _grid: Any) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                self.keys.add(key_of(kernel, *args, **options))

            return launch

        return launcher


def key_of(kernel: Any, *args: Any, **options: Any) -> tuple[str, str]:
    """Return the kernel's name, and the key of a launch with these arguments."""
    _, specialization, chosen = _binder(kernel)(*args, **options)
    return kernel.__name__, f"{specialization} {sorted(chosen.items())}"


@functools.cache
def _binder(kernel: Any) -> Callable[..., Any]:
    """Return Triton's function that tells a launch's arguments, specialization and options."""
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    binder: Callable[..., Any] = create_function_from_signature(kernel.signature, kernel.params, backend)
    return binder

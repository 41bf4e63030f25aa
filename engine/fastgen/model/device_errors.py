"""Classifies errors of a device by type name and text, without importing torch.

PyTorch raises `torch.OutOfMemoryError` and `torch.AcceleratorError`, and RuntimeErrors for libraries below it.
"""

from __future__ import annotations

import sys

_OUT_OF_MEMORY = (
    "out of memory",  # CUDA's allocator, the driver, pinned memory
    "CUBLAS_STATUS_ALLOC_FAILED",
    "can't allocate memory",  # DefaultCPUAllocator
    "not enough memory",
)
_FAILURES = (
    *("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "CUDNN_STATUS_", "cudaError"),
    "ncclUnhandledCudaError",
)


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an allocation failed. The device still works, and a smaller step may fit."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY)


def is_device_failure(error: Exception) -> bool:
    """Return whether the GPU or its driver failed.

    Only a new process can use the GPU again, if it still works.
    """
    if type(error).__name__ == "AcceleratorError":
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _FAILURES)


def is_device_error(error: Exception) -> bool:
    """Return whether an error is of the device or its memory, and not of the code that used them."""
    return is_out_of_memory(error) or is_device_failure(error)


def is_capture_failure(error: Exception) -> bool:
    """Return whether launches could not be captured as a CUDA graph. They still work without one."""
    return isinstance(error, RuntimeError) and "captur" in str(error)


def release_cached_memory() -> None:
    """Wait for the GPU, then release the unused memory that torch's allocator keeps.

    Without CUDA this does nothing. Afterwards no step that was rolled back still writes blocks that have been freed.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

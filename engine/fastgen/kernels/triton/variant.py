"""A configuration of a Triton kernel, to compile it ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination of types, constants and launch options that a launch function may choose.

    Attributes:
        name: unique among the variants of the kernel.
        kernel: the `@triton.jit` function.
        signature: type of each argument known at run time, by name: `*bf16`, `*i32`, `i32`, `i64`, `fp32`. The suffix
            `:16` says that a pointer or an integer is divisible by 16, for which Triton specialises too: `*bf16:16`.
        constants: value of each `tl.constexpr` argument, and None for each pointer that is absent, by name.
        num_warps: warps of a program (32 threads each).
        num_stages: stages of software pipelining of loads; Triton's default is 3.
        max_registers: of a thread; None: the compiler's choice.
        targets: compute capabilities that may choose it (80, 90, 100, 120); None: all.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int = 3
    max_registers: int | None = None
    targets: tuple[int, ...] | None = None

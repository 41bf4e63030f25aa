"""Importing this compiles the kernels for activations and caches in bfloat16."""

from __future__ import annotations

from fastgen.kernels.cpu import elementwise
from fastgen.kernels.cpu.attention import decode, prefill
from fastgen.kernels.cpu.jit import compile_for_bfloat16

for _kernel in (
    decode.attend_decodes,
    elementwise.add_rms_norm,
    elementwise.gelu_tanh_multiply,
    elementwise.clamped_swiglu_multiply,
    elementwise.norm_heads,
    elementwise.rms_norm,
    elementwise.rotate_and_store,
    elementwise.silu_multiply,
    prefill.attend_chunks,
):
    compile_for_bfloat16(_kernel)

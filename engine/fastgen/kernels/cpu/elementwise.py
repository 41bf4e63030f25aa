"""Element-wise operations of a decoder layer as numba kernels, parallel over rows.

Arrays are contiguous; T is the number of rows (tokens) of the step. Results are written to arguments. The residual
stream, weights, angles and queries are float32; other activations and the cache are elements (`elements.py`), computed
in float32 and rounded when they are written. Twins in plain torch: `reference.py`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fastgen.kernels.cpu.elements import ElementArray, narrowed, widened
from fastgen.kernels.cpu.jit import kernel, lowering, prange, serial
from fastgen.kernels.cpu.llvm_vectors import I64, Emitter, emitted

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

_f32 = np.float32
_TWICE_ROOT = 1.5957691216057308  # 2 * sqrt(2 / pi)
_SLOPE, _BOUND = 1.702, 7.0  # of gpt-oss's gated activation
LANES = 16


@kernel("void(f4[:,::1], E[:,::1], f4[::1], f4, E[:,::1])")
def add_rms_norm(
    x: FloatArray, update: ElementArray, weight: FloatArray, epsilon: np.float32, out: ElementArray
) -> None:
    """Compute x += update; out = x / rms(x) * weight. All [T, hidden], weight [hidden]."""
    hidden = x.shape[1]
    for t in prange(x.shape[0]):
        total = _f32(0)
        for i in range(hidden):
            value = x[t, i] + widened(update[t, i])
            x[t, i] = value
            total += value * value
        scale = _f32(1) / np.sqrt(total / _f32(hidden) + epsilon)
        for i in range(hidden):
            out[t, i] = narrowed(x[t, i] * scale * weight[i], out)


@serial
def _norm_segment(row: ElementArray, first: int, weight: FloatArray, epsilon: np.float32) -> None:
    """Replace row[first : first + size] by its RMS norm times `weight` [size]."""
    size = weight.shape[0]
    total = _f32(0)
    for i in range(size):
        total += widened(row[first + i]) * widened(row[first + i])
    scale = _f32(1) / np.sqrt(total / _f32(size) + epsilon)
    for i in range(size):
        row[first + i] = narrowed(widened(row[first + i]) * scale * weight[i], row)


@kernel("void(E[:,::1], f4[::1], f4)")
def rms_norm(x: ElementArray, weight: FloatArray, epsilon: np.float32) -> None:
    """Compute x = x / rms(x) * weight in place; x [T, hidden], weight [hidden]."""
    for t in prange(x.shape[0]):
        _norm_segment(x[t], 0, weight, epsilon)


@kernel("void(E[:,::1], f4[::1], f4[::1], i8, i8, f4)")
def norm_heads(
    qkv: ElementArray, query_norm: FloatArray, key_norm: FloatArray, queries: int, keys: int, epsilon: np.float32
) -> None:
    """Normalise segments of queries and keys in place, each of the size of its norm.

    A segment is a head, or all heads: then `queries` and `keys`, the numbers of segments in a row of qkv, are 1.
    """
    query_size, key_size = query_norm.shape[0], key_norm.shape[0]
    for t in prange(qkv.shape[0]):
        for s in range(queries):
            _norm_segment(qkv[t], s * query_size, query_norm, epsilon)
        for s in range(keys):
            _norm_segment(qkv[t], queries * query_size + s * key_size, key_norm, epsilon)


@kernel("void(E[:,::1], f4[:,::1], f4[:,::1], E[:,:,:,::1], E[:,:,:,::1], i8[::1], i8[::1], f4[:,:,::1])")
def rotate_and_store(
    qkv: ElementArray,
    cosines: FloatArray,
    sines: FloatArray,
    keys: ElementArray,
    values: ElementArray,
    blocks: IntArray,
    slots: IntArray,
    queries: FloatArray,
) -> None:
    """Rotate queries and keys, and write keys and values to their slots in the paged cache.

    Args:
        qkv: [T, (heads + 2 * kv heads) * head_dim], the fused projection.
        cosines, sines: [T, d / 2], for each row's position: the first d dimensions of a head are rotated, by halves.
        keys, values: one layer's cache, [blocks, kv heads, block size, head_dim].
        blocks, slots: [T], cache location of each row's key and value.
        queries: [T, heads, head_dim], output.
    """
    heads, head_dim = queries.shape[1], queries.shape[2]
    kv_heads = keys.shape[1]
    half = cosines.shape[1]
    for t in prange(qkv.shape[0]):
        block, slot = blocks[t], slots[t]
        for h in range(heads):
            base = h * head_dim
            for d in range(half):
                a, b = widened(qkv[t, base + d]), widened(qkv[t, base + half + d])
                queries[t, h, d] = a * cosines[t, d] - b * sines[t, d]
                queries[t, h, half + d] = b * cosines[t, d] + a * sines[t, d]
            for d in range(2 * half, head_dim):
                queries[t, h, d] = widened(qkv[t, base + d])
        for h in range(kv_heads):
            base = (heads + h) * head_dim
            for d in range(half):
                a, b = widened(qkv[t, base + d]), widened(qkv[t, base + half + d])
                keys[block, h, slot, d] = narrowed(a * cosines[t, d] - b * sines[t, d], keys)
                keys[block, h, slot, half + d] = narrowed(b * cosines[t, d] + a * sines[t, d], keys)
            for d in range(2 * half, head_dim):
                keys[block, h, slot, d] = qkv[t, base + d]
            base = (heads + kv_heads + h) * head_dim
            for d in range(head_dim):
                values[block, h, slot, d] = qkv[t, base + d]


def _emit_gated(activation: str, builder: Any, element: Any, gates: Any, ups: Any, count: Any, out: Any) -> None:
    """Compute out = gate * sigmoid(exponent) * up for `count` elements, a multiple of LANES, given addresses."""
    emit = Emitter(builder, LANES)
    line = LANES * element.bitwidth // 8
    with lowering.for_range(builder, builder.udiv(count, I64(LANES))) as step:
        gate, up = (emit.load_elements(emit.offset(first, step.index, line), element) for first in (gates, ups))
        exponent = gate
        if activation == "gelu_tanh":
            exponent = _emit_gelu_exponent(emit, gate)
        elif activation == "clamped_swiglu":
            gate = _emit_at_most(emit, gate, _BOUND)
            up = builder.fneg(_emit_at_most(emit, builder.fneg(_emit_at_most(emit, up, _BOUND)), _BOUND))
            up, exponent = emit.add(up, emit.constant(1.0)), emit.multiply(gate, emit.constant(_SLOPE))
        divisor = emit.add(emit.constant(1.0), emit.exp(builder.fneg(exponent)))
        # Divide first: the product of gate and up may overflow although the result does not.
        result = emit.multiply(emit.divide(gate, divisor), up)
        emit.store_elements(result, emit.offset(out, step.index, line), element)


def _emit_at_most(emit: Emitter, x: Any, bound: float) -> Any:
    """Return the smaller of x and `bound`; NaN stays NaN."""
    highest = emit.constant(bound)
    return emit.builder.select(emit.builder.fcmp_ordered(">", x, highest), highest, x)


def _emit_gelu_exponent(emit: Emitter, x: Any) -> Any:
    """Return 2u of gelu's tanh form (Hendrycks and Gimpel, 2016): x * (1 + tanh(u)) / 2 = x * sigmoid(2u)."""
    cubic, linear = emit.constant(_TWICE_ROOT * 0.044715), emit.constant(_TWICE_ROOT)
    return emit.multiply(x, emit.fused(emit.multiply(x, x), cubic, linear))


def _row_of(activation: str) -> Any:
    """Return the function that computes row `t` of out [T, width] for gate_up [T, 2 * width] with the gate first."""
    gate = emitted(partial(_emit_gated, activation))

    def gate_row(gate_up: ElementArray, out: ElementArray, t: int) -> None:
        width, size = out.shape[1], out.itemsize
        whole = width // LANES * LANES
        gates, results = gate_up.ctypes.data + t * width * 2 * size, out.ctypes.data + t * width * size
        gate(out, gates, gates + width * size, whole, results)
        if whole < width:
            rest = np.zeros((3, LANES), gate_up.dtype)  # gates, ups and results of the last columns
            for i in range(whole, width):
                rest[0, i - whole], rest[1, i - whole] = gate_up[t, i], gate_up[t, width + i]
            gate(out, rest.ctypes.data, rest[1].ctypes.data, LANES, rest[2].ctypes.data)
            out[t, whole:] = rest[2, : width - whole]

    return serial(gate_row)


_silu_row, _gelu_row, _clamped_row = map(_row_of, ("silu", "gelu_tanh", "clamped_swiglu"))


@kernel("void(E[:,::1], E[:,::1])")
def silu_multiply(gate_up: ElementArray, out: ElementArray) -> None:
    """Compute out [T, width] = silu(gate) * up for gate_up [T, 2 * width] with the gate first."""
    for t in prange(out.shape[0]):
        _silu_row(gate_up, out, t)


@kernel("void(E[:,::1], E[:,::1])")
def gelu_tanh_multiply(gate_up: ElementArray, out: ElementArray) -> None:
    """Compute out [T, width] = gelu(gate) * up, with gelu's tanh form, for gate_up [T, 2 * width], gate first."""
    for t in prange(out.shape[0]):
        _gelu_row(gate_up, out, t)


@kernel("void(E[:,::1], E[:,::1])")
def clamped_swiglu_multiply(gate_up: ElementArray, out: ElementArray) -> None:
    """Compute out [T, width] for gate_up [T, 2 * width], gate first: see `reference.clamped_swiglu_multiply`."""
    for t in prange(out.shape[0]):
        _clamped_row(gate_up, out, t)

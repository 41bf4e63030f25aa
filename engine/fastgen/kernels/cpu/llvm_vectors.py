"""LLVM vectors for numba kernels: inner loops whose sums must stay in registers.

numba keeps a small array of sums in memory, which is several times slower. The code emitted here has any number of
lanes; LLVM maps them to the processor's registers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from fastgen.kernels.cpu.jit import intrinsic, lowering, serial, types

I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()

_LOG2E = 1.4426950408889634
# numba adds the kernel's flags to every instruction without flags. These exclude `reassoc`, so operations run in the
# order in which they are emitted.
_FLAGS = ("contract",)
# 2^f for f from -1/2 to 1/2, the highest power first.
_POLYNOMIAL = (1.5403530e-4, 1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0)


def emitted(emit: Callable[..., Any], returns: Any = types.void) -> Any:
    """Return a function for kernels whose code `emit(builder, ...)` emits, given the values of its arguments.

    If `emit(builder, element, ...)` has a parameter `element`, the function's first argument is an array, and `emit` is
    given numba's type of its elements instead.
    """
    builder, *parameters = inspect.signature(emit).parameters.values()
    takes_element = bool(parameters) and parameters[0].name == "element"

    def typing(_context: Any, *kinds: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, values: Sequence[Any]) -> Any:
            result = emit(builder, *((kinds[0].dtype, *values[1:]) if takes_element else values))
            return context.get_dummy_value() if result is None else result

        return returns(*kinds), generate

    # numba reads the number of arguments from it.
    typing.__signature__ = inspect.Signature([builder, *parameters])  # type: ignore[attr-defined]
    return intrinsic(typing)


def emitted_by_count(emit: Callable[..., Any]) -> Any:
    """Return a function for kernels whose first argument is a number of rows or heads, from 1 to 4.

    `emit(count, builder, ...)` emits the code for each of these numbers, so that the sums of all rows or heads are in
    registers.
    """
    one, two, three, four = (emitted(partial(emit, count)) for count in range(1, 5))

    def call(count: int, *arguments: Any) -> None:
        if count == 1:
            one(*arguments)
        elif count == 2:
            two(*arguments)
        elif count == 3:
            three(*arguments)
        else:
            four(*arguments)

    return serial(call)


def widened(builder: Any, bits: Any) -> Any:
    """Return the float32 of bfloat16 bits, a scalar or a vector: they are its upper half."""
    integers, floats = _like(bits.type, I32), _like(bits.type, F32)
    upper = builder.shl(builder.zext(bits, integers), _constant(integers, 16))
    return builder.bitcast(upper, floats)


def narrowed(builder: Any, floats: Any) -> Any:
    """Return the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    integers = _like(floats.type, I32)
    bits = builder.bitcast(floats, integers)
    last = builder.and_(builder.lshr(bits, _constant(integers, 16)), _constant(integers, 1))
    rounded = builder.add(bits, builder.add(last, _constant(integers, 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", floats, floats)
    # Rounding could carry a NaN's bits into its exponent.
    kept = builder.select(is_nan, _constant(integers, 0x7FC00000), rounded)
    return builder.trunc(builder.lshr(kept, _constant(integers, 16)), _like(floats.type, I16))


def all_lanes(kind: Any, value: int) -> Any:
    """Return the constant vector of the type `kind` with the same integer in all lanes."""
    return ir.Constant(kind, [value] * kind.count)


def spread_integer(builder: Any, integer: Any, kind: Any) -> Any:
    """Broadcast an integer to all lanes of a vector of the type `kind`."""
    lane = builder.insert_element(ir.Constant(kind, ir.Undefined), integer, I32(0))
    return builder.shuffle_vector(lane, lane, all_lanes(ir.VectorType(I32, kind.count), 0))


def call_intrinsic(builder: Any, name: str, result: Any, *arguments: Any) -> Any:
    """Call the LLVM intrinsic `llvm.NAME`, which returns the type `result`."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(lowering.get_or_insert_function(builder.module, kind, f"llvm.{name}"), arguments)


def _like(kind: Any, element: Any) -> Any:
    """Return the type of as many elements as `kind` has."""
    return ir.VectorType(element, kind.count) if isinstance(kind, ir.VectorType) else element


def _constant(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


class Emitter:
    """Emits LLVM code on vectors of `lanes` floats. Addresses are 64-bit integers in bytes."""

    def __init__(self, builder: Any, lanes: int) -> None:
        self.builder = builder
        self.floats = ir.VectorType(F32, lanes)
        self._first_lane = ir.Constant(ir.VectorType(I32, lanes), [0] * lanes)
        signature = ir.FunctionType(self.floats, [self.floats] * 3)
        self._fused = lowering.get_or_insert_function(builder.module, signature, f"llvm.fmuladd.v{lanes}f32")
        unary = ir.FunctionType(self.floats, [self.floats])
        self._floor = lowering.get_or_insert_function(builder.module, unary, f"llvm.floor.v{lanes}f32")

    def offset(self, address: Any, count: Any, size: Any) -> Any:
        """address + count * size."""
        return self.builder.add(address, self.builder.mul(count, I64(size) if isinstance(size, int) else size))

    def load(self, address: Any, kind: Any = None) -> Any:
        """Load floats in all lanes, or a value of another type."""
        return self.builder.load(self.builder.inttoptr(address, (kind or self.floats).as_pointer()), align=1)

    def store(self, values: Any, address: Any) -> None:
        """Store the values of all lanes."""
        self.builder.store(values, self.builder.inttoptr(address, values.type.as_pointer()), align=1)

    def prefetch(self, address: Any, locality: int = 3) -> None:
        """Start to read a cache line of 64 bytes, into the L1 cache or, with a locality of 2, the L2 cache."""
        pointer = ir.IntType(8).as_pointer()
        signature = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
        function = lowering.get_or_insert_function(self.builder.module, signature, "llvm.prefetch.p0")
        self.builder.call(function, [self.builder.inttoptr(address, pointer), I32(0), I32(locality), I32(1)])

    def load_elements(self, address: Any, element: Any) -> Any:
        """Load floats in all lanes from elements of numba's type `element`: float32, or int16 for bfloat16."""
        if element == types.float32:
            return self.load(address)
        return widened(self.builder, self.load(address, ir.VectorType(I16, self.floats.count)))

    def store_elements(self, values: Any, address: Any, element: Any) -> None:
        """Store the floats of all lanes as elements of numba's type `element`."""
        self.store(values if element == types.float32 else narrowed(self.builder, values), address)

    def spread(self, scalar: Any) -> Any:
        """Broadcast a scalar to all lanes."""
        lane = self.builder.insert_element(ir.Constant(self.floats, ir.Undefined), scalar, I32(0))
        return self.builder.shuffle_vector(lane, lane, self._first_lane)

    def add(self, a: Any, b: Any) -> Any:
        """a + b."""
        return self.builder.fadd(a, b, flags=_FLAGS)

    def subtract(self, a: Any, b: Any) -> Any:
        """a - b."""
        return self.builder.fsub(a, b, flags=_FLAGS)

    def multiply(self, a: Any, b: Any) -> Any:
        """a * b."""
        return self.builder.fmul(a, b, flags=_FLAGS)

    def divide(self, a: Any, b: Any) -> Any:
        """a / b."""
        return self.builder.fdiv(a, b, flags=_FLAGS)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        """a * b + c."""
        return self.builder.call(self._fused, [a, b, c])

    def add_product(self, place: Any, a: Any, b: Any) -> None:
        """*place += a * b."""
        self.builder.store(self.fused(a, b, self.builder.load(place)), place)

    def constant(self, value: float) -> Any:
        """Return a constant with this value in all lanes."""
        return ir.Constant(self.floats, [value] * self.floats.count)

    def larger(self, a: Any, b: Any) -> Any:
        """Return the maximum per lane."""
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def largest(self, values: Any) -> Any:
        """Return the largest lane of `values` as a scalar."""
        return self._over_lanes(self.larger, values)

    def sum_of_lanes(self, values: Any) -> Any:
        """Return the sum of the lanes of `values` as a scalar: of the sums of lanes half of the vector apart."""
        return self._over_lanes(self.add, values)

    def _over_lanes(self, combine: Callable[[Any, Any], Any], values: Any) -> Any:
        count = self.floats.count
        while count > 1:
            count //= 2
            lanes = ir.Constant(ir.VectorType(I32, count), list(range(count)))
            others = ir.Constant(ir.VectorType(I32, count), list(range(count, 2 * count)))
            values = combine(*(self.builder.shuffle_vector(values, values, half) for half in (lanes, others)))
        return self.builder.extract_element(values, I32(0))

    def exp(self, x: Any) -> Any:
        """Compute e^x as 2^i * 2^f with a polynomial for 2^f, whose error is 2e-7.

        The result is 0 for x below -87.68 and infinity for x above 88.38. Clamping i suffices for both limits: an
        exponent of all zeros is 0, one of all ones is infinity.
        """
        builder = self.builder
        scaled = self.larger(self.multiply(x, self.constant(_LOG2E)), self.constant(-127.0))
        highest = self.constant(128.0)
        scaled = builder.select(builder.fcmp_ordered("<", scaled, highest), scaled, highest)
        whole = builder.call(self._floor, [self.add(scaled, self.constant(0.5))])
        f = self.subtract(scaled, whole)
        power = self.constant(_POLYNOMIAL[0])
        for coefficient in _POLYNOMIAL[1:]:
            power = self.fused(power, f, self.constant(coefficient))
        bits = ir.VectorType(I32, self.floats.count)
        biased = builder.add(builder.fptosi(whole, bits), ir.Constant(bits, [127] * self.floats.count))
        exponent = builder.shl(biased, ir.Constant(bits, [23] * self.floats.count))
        return self.multiply(power, builder.bitcast(exponent, self.floats))

    @property
    def zero(self) -> Any:
        """Return 0 in all lanes."""
        return ir.Constant(self.floats, None)

    def places(self, count: int) -> list[Any]:
        """Allocate sums, initially 0; LLVM keeps them in registers."""
        return [lowering.alloca_once_value(self.builder, self.zero) for _ in range(count)]

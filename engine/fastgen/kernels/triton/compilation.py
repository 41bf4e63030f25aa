"""Compile the Triton kernels ahead of time, without a GPU.

`python -m fastgen.kernels.triton.compilation` compiles every variant of every kernel for every target and prints a
Markdown table of registers and shared memory by kernel. It exits with 1 if a variant does not compile, spills registers
or needs more shared memory than the target has. `--file docs/benchmarks/gpu-compilation.csv` compiles only the rows
that the file lacks or that failed, and writes each at once, so that it can be interrupted.
"""

from __future__ import annotations

import argparse
import ast
import csv
import functools
import hashlib
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.language import constexpr
from triton.runtime.jit import JITFunction

import fastgen.kernels.triton
from fastgen.kernels.triton.variant import Variant

# KiB of shared memory that one program may have, by compute capability (CUDA C++ Programming Guide, technical
# specifications per compute capability).
SHARED_MEMORY_LIMITS = {80: 163, 90: 227, 100: 227, 120: 99}
_ALIGNED = ":16"

# What identifies a row: kernel, variant, configuration and target.
VariantKey = tuple[str, str, str, int]


@dataclass(frozen=True, slots=True)
class Compiled:
    """Resources of one variant on one target.

    Attributes:
        kernel, variant: names.
        configuration: digest of the source, types, constants and launch options.
        target: compute capability.
        registers: of a thread.
        spilled_bytes: local memory of a thread, where registers are spilled to.
        shared_kib: shared memory of a program.
        products: instructions of its matrix products: wgmma, tcgen05, mma, or empty.
        copies: bytes of the asynchronous copies to shared memory, and `tma` for those of whole tiles: `4 16`.
        buffers: fewest buffers of a tile that a pipelined loop loads; 0 if there is none.
        error: last line of the compiler's error, or empty; the numbers are 0 if there is one.
    """

    kernel: str
    variant: str
    configuration: str
    target: int
    registers: int = 0
    spilled_bytes: int = 0
    shared_kib: float = 0.0
    products: str = ""
    copies: str = ""
    buffers: int = 0
    error: str = ""

    @property
    def is_good(self) -> bool:
        """Whether it compiles, spills nothing and fits."""
        return not self.error and not self.spilled_bytes and self.shared_kib <= SHARED_MEMORY_LIMITS[self.target]

    @property
    def key(self) -> VariantKey:
        """What identifies its row."""
        return self.kernel, self.variant, self.configuration, self.target


def variants(kernel: str | None = None) -> Iterator[Variant]:
    """Yield the variants that modules of this package export as VARIANTS.

    Args:
        kernel: keep only variants whose full name contains it.
    """
    for module in pkgutil.walk_packages(fastgen.kernels.triton.__path__, f"{fastgen.kernels.triton.__name__}."):
        exported = getattr(importlib.import_module(module.name), "VARIANTS", ())
        yield from (variant for variant in exported if kernel is None or kernel in full_name(variant))


def full_name(variant: Variant) -> str:
    """Return `MODULE.KERNEL/VARIANT`."""
    return f"{variant.kernel.__module__.rpartition('.')[2]}.{_name(variant)}/{variant.name}"


def targets(variant: Variant) -> tuple[int, ...]:
    """Return the compute capabilities that may choose a variant."""
    return tuple(SHARED_MEMORY_LIMITS) if variant.targets is None else variant.targets


def key(variant: Variant, target: int) -> VariantKey:
    """Return what identifies the row of a variant and a compute capability."""
    described = [
        sorted((name, str(value)) for name, value in part.items()) for part in (variant.signature, variant.constants)
    ]
    source = function_digest(variant.kernel.fn)
    options = [variant.num_warps, variant.num_stages]
    if variant.max_registers is not None:
        options.append(variant.max_registers)
    digest = hashlib.sha256(repr((described, *options, source)).encode()).hexdigest()
    return _name(variant), variant.name, digest[:6], target


@functools.cache
def function_digest(function: FunctionType) -> str:
    """Return a digest of the source of a kernel and of the functions and constants of this package that it uses.

    Comments, docstrings and layout do not count, and neither do Triton's own functions.
    """
    described: list[object] = [_source(function)]
    for name in sorted(set(function.__code__.co_names) & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, JITFunction) and not value.fn.__module__.startswith("triton."):
            described.append((name, function_digest(value.fn)))
        elif isinstance(value, constexpr):
            described.append((name, str(value.value)))
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _source(function: FunctionType) -> str:
    """Return the source of a function without its docstring and comments, in one layout."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(tree, ast.FunctionDef)
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    return ast.unparse(tree)


def compile_variant(variant: Variant, target: int) -> Compiled:
    """Compile a variant for a compute capability."""
    signature = dict.fromkeys(variant.kernel.arg_names, "constexpr")
    for argument, kind in variant.signature.items():
        signature[argument] = kind.removesuffix(_ALIGNED)
    names = variant.kernel.arg_names
    aligned = [k for k, kind in variant.signature.items() if kind.endswith(_ALIGNED)]
    source = triton.compiler.ASTSource(
        fn=variant.kernel,
        signature=signature,
        constexprs={(names.index(k),): value for k, value in variant.constants.items()},
        attrs={(names.index(k),): [["tt.divisibility", 16]] for k in aligned},
    )
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages, "maxnreg": variant.max_registers}
    try:
        binary = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    except Exception as error:  # Triton's errors have no common type.
        message = str(error).strip() or type(error).__name__
        return Compiled(*key(variant, target), error=message.splitlines()[-1])
    registers, spilled = _resources(binary.asm["cubin"])
    shared, code = binary.metadata.shared / 1024, binary.asm["ptx"]
    loads = _products(code), _copies(code), _buffers(binary.asm["ttgir"])
    return Compiled(*key(variant, target), registers, spilled, shared, *loads)


def table_page(results: Sequence[Compiled]) -> str:
    """Return a Markdown table with a row for each kernel: the most registers and shared memory of its variants."""
    limits = " | ".join(f"KiB on {target / 10}, of {limit}" for target, limit in SHARED_MEMORY_LIMITS.items())
    lines = [f"| kernel | compiled | registers | {limits} |", "|---|---:|---:|" + "---:|" * len(SHARED_MEMORY_LIMITS)]
    for kernel in dict.fromkeys(result.kernel for result in results):
        rows = [result for result in results if result.kernel == kernel]
        shared = (
            max((row.shared_kib for row in rows if row.target == target), default=None)
            for target in SHARED_MEMORY_LIMITS
        )
        cells = " | ".join("" if most is None else f"{most:.1f}" for most in shared)
        lines.append(f"| `{kernel}` | {len(rows)} | {max(row.registers for row in rows)} | {cells} |")
    return "\n".join(lines)


def read_table(file: Path) -> dict[VariantKey, Compiled]:
    """Return the good rows of a file; the others are compiled again."""
    with file.open(newline="") as lines:
        found = [
            Compiled(
                row["kernel"],
                row["variant"],
                row["configuration"],
                int(row["target"]),
                int(row["registers"]),
                int(row["spilled_bytes"]),
                float(row["shared_kib"]),
                row["products"],
                row["copies"],
                int(row["buffers"]),
                row["error"],
            )
            for row in csv.DictReader(lines)
        ]
    return {result.key: result for result in found if result.is_good}


def write(file: Path, results: Sequence[Compiled]) -> None:
    """Write a row for each result. The file is replaced at once, so that an interruption loses no row."""
    names, unfinished = [field.name for field in fields(Compiled)], file.with_suffix(".unfinished")
    with unfinished.open("w", newline="") as lines:
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(result, name) for name in names] for result in results)
    unfinished.replace(file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastgen.kernels.triton.compilation", description=__doc__)
    parser.add_argument("--kernel", help="only variants whose MODULE.KERNEL/VARIANT contains this")
    parser.add_argument("--target", type=int, action="append", choices=SHARED_MEMORY_LIMITS, help="only these targets")
    parser.add_argument("--file", type=Path, help="CSV file to complete")
    parsed = parser.parse_args(arguments)
    every = {key(variant, target): (variant, target) for variant in variants() for target in targets(variant)}
    wanted = {
        key(variant, target) for variant in variants(parsed.kernel) for target in parsed.target or targets(variant)
    }
    done = {} if parsed.file is None else read_table(parsed.file)
    chosen = [one for one in every if one in wanted and one not in done]
    if not wanted & every.keys():
        parser.error("no kernel has this name and target")
    for number, one in enumerate(chosen, 1):
        done[one] = compile_variant(*every[one])
        print(f"\r{number}/{len(chosen)}", end="", file=sys.stderr, flush=True)
        if parsed.file is not None:
            write(parsed.file, [done[k] for k in every if k in done])
    if parsed.file is not None:
        write(parsed.file, [done[k] for k in every if k in done])  # without rows of variants that are gone
    results = [done[one] for one in every if one in wanted]
    bad = [result for result in results if not result.is_good]
    print(file=sys.stderr)
    for result in bad:
        print(f"failed: {result}")
    print(table_page(results))
    print(f"\n{len(results)} compiled, {len(bad)} failed; torch {torch.__version__}, triton {triton.__version__}.")
    return 1 if bad else 0


def _name(variant: Variant) -> str:
    return str(variant.kernel.__name__).removeprefix("_")


def _products(ptx: str) -> str:
    """Return the instructions of the matrix products: at most one kind, or empty."""
    kinds = {"wgmma": "wgmma.mma_async", "tcgen05": "tcgen05.mma", "mma": "mma.sync"}
    return next((name for name, instruction in kinds.items() if instruction in ptx), "")


def _copies(ptx: str) -> str:
    """Return the bytes of asynchronous copies, ascending, and `tma` if there are tensor copies."""
    # cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10;
    sizes = re.findall(r"cp\.async\.c[ag]\.shared\.global\s+\[[^]]*\],\s*\[[^]]*\],\s*(\w+)", ptx)
    found = [str(size) for size in sorted({int(size, 0) for size in sizes})]
    return " ".join(found + ["tma"] * ("cp.async.bulk.tensor" in ptx))


def _buffers(ttgir: str) -> int:
    """Return the fewest buffers of a tile in shared memory: the first of three dimensions of its allocation."""
    # ttg.local_alloc : () -> !ttg.memdesc<2x128x64xbf16, #shared, #smem, mutable>
    return min(
        (int(count) for count in re.findall(r"ttg\.local_alloc[^\n]*memdesc<(\d+)x\d+x\d+x[a-z]", ttgir)), default=0
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack and local memory of a thread, as the bundled cuobjdump reads them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command: list[Any] = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return found["REG"], found["STACK"] + found["LOCAL"]


if __name__ == "__main__":
    sys.exit(main())

"""Compile the Triton kernels ahead of time, without a GPU.

`python -m fastgen.kernels.triton.compilation` compiles every variant of every kernel for every target and prints a
Markdown table of registers, spills and shared memory. It exits with 1 if a variant does not compile, spills registers
or needs more shared memory than the target has. `--page docs/benchmarks/gpu-compilation.md` compiles only the rows
that the table of that page lacks, and writes each to the page at once, so that it can be interrupted.
"""

from __future__ import annotations

import argparse
import ast
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
from dataclasses import dataclass
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
_HEADER = """\
| kernel | variant | configuration | target | registers | spilled bytes | shared memory, KiB | limit, KiB |
|---|---|---|---|---:|---:|---:|---:|"""
_ROW = re.compile(r"\| (\w+) \| (\S*) \| (\w+) \| sm_(\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| \d+ \|$", re.MULTILINE)

# What identifies a row: kernel, variant, configuration and target.
Key = tuple[str, str, str, int]


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
        error: last line of the compiler's error, or None; the numbers are 0 if there is one.
    """

    kernel: str
    variant: str
    configuration: str
    target: int
    registers: int = 0
    spilled_bytes: int = 0
    shared_kib: float = 0.0
    error: str | None = None

    @property
    def is_good(self) -> bool:
        """Whether it compiles, spills nothing and fits."""
        return not self.error and not self.spilled_bytes and self.shared_kib <= SHARED_MEMORY_LIMITS[self.target]

    @property
    def key(self) -> Key:
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


def key(variant: Variant, target: int) -> Key:
    """Return what identifies the row of a variant and a compute capability."""
    described = [
        sorted((name, str(value)) for name, value in part.items()) for part in (variant.signature, variant.constants)
    ]
    source = source_digest(variant.kernel.fn)
    digest = hashlib.sha256(repr((described, variant.num_warps, variant.num_stages, source)).encode()).hexdigest()
    return _name(variant), variant.name, digest[:6], target


@functools.cache
def source_digest(function: FunctionType) -> str:
    """Return a digest of the source of a kernel and of the functions and constants of this package that it uses.

    Comments, docstrings and layout do not count, and neither do Triton's own functions.
    """
    described: list[object] = [_source(function)]
    for name in sorted(set(function.__code__.co_names) & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, JITFunction) and not value.fn.__module__.startswith("triton."):
            described.append((name, source_digest(value.fn)))
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
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    try:
        binary = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    except Exception as error:  # Triton's errors have no common type.
        message = str(error).strip() or type(error).__name__
        return Compiled(*key(variant, target), error=message.splitlines()[-1])
    registers, spilled = _resources(binary.asm["cubin"])
    return Compiled(*key(variant, target), registers, spilled, binary.metadata.shared / 1024)


def table(results: Sequence[Compiled]) -> str:
    """Return a Markdown table of the results."""
    lines = [_HEADER]
    for r in results:
        numbers = f"{r.registers} | {r.spilled_bytes} | {r.shared_kib:.1f}" if r.error is None else f"{r.error} | |"
        mark = "" if r.is_good else " **over**"
        limit = SHARED_MEMORY_LIMITS[r.target]
        lines.append(f"| {r.kernel} | {r.variant} | {r.configuration} | sm_{r.target} | {numbers} | {limit}{mark} |")
    return "\n".join(lines)


def read_table(page: str) -> dict[Key, Compiled]:
    """Return the rows of the table in a page; those of variants that failed are left out."""
    found = (
        Compiled(kernel, variant, configuration, int(target), int(registers), int(spilled), float(shared))
        for kernel, variant, configuration, target, registers, spilled, shared in _ROW.findall(page)
    )
    return {result.key: result for result in found}


def write_table(page: str, results: Sequence[Compiled]) -> str:
    """Return the page with its table, and the summary after it, replaced."""
    before, _, _ = page.partition(_HEADER)
    return f"{before}{table(results)}\n\n{_summary(results)}\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastgen.kernels.triton.compilation", description=__doc__)
    parser.add_argument("--kernel", help="only variants whose MODULE.KERNEL/VARIANT contains this")
    parser.add_argument("--target", type=int, action="append", choices=SHARED_MEMORY_LIMITS, help="only these targets")
    parser.add_argument("--page", type=Path, help="Markdown page whose table to complete, instead of printing one")
    parsed = parser.parse_args(arguments)
    every = {key(variant, target): (variant, target) for variant in variants() for target in targets(variant)}
    wanted = {
        key(variant, target) for variant in variants(parsed.kernel) for target in parsed.target or targets(variant)
    }
    done = {} if parsed.page is None else read_table(parsed.page.read_text())
    chosen = [one for one in every if one in wanted and one not in done]
    if not wanted & every.keys():
        parser.error("no kernel has this name and target")
    for number, one in enumerate(chosen, 1):
        done[one] = compile_variant(*every[one])
        print(f"\r{number}/{len(chosen)}", end="", file=sys.stderr, flush=True)
        _save(parsed.page, [done[k] for k in every if k in done])
    _save(parsed.page, [done[k] for k in every if k in done])  # without rows of variants that are gone
    results = [done[one] for one in every if one in wanted]
    print(file=sys.stderr)
    print(_summary(results) if parsed.page is not None else f"{table(results)}\n\n{_summary(results)}")
    return 0 if all(result.is_good for result in results) else 1


def _save(page: Path | None, results: Sequence[Compiled]) -> None:
    if page is not None:
        page.write_text(write_table(page.read_text(), results))


def _summary(results: Sequence[Compiled]) -> str:
    bad = sum(not result.is_good for result in results)
    return f"{len(results)} compiled, {bad} failed; torch {torch.__version__}, triton {triton.__version__}."


def _name(variant: Variant) -> str:
    return str(variant.kernel.__name__).removeprefix("_")


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

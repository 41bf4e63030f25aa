"""The CPU, and the dtype and matrix product selected for it. Needs no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastgen.kernels.cpu.vector_width import WIDTH, has_vnni
from fastgen.settings import ConfigError, EngineConfig

LINEAR_VARIABLE = "FASTGEN_CPU_LINEAR"
LINEAR_CHOICES = ("tiled", "onednn", "plain")
DEFAULT_LINEAR = {"float32": "tiled", "bfloat16": "onednn"}
INT8_VARIABLE = "FASTGEN_CPU_INT8"
INT8_CHOICES = ("vnni", "weight-only")
_VNNI = "AVX512-VNNI"

_CPUINFO = Path("/proc/cpuinfo")
# Those of the instruction sets below that multiply bfloat16, the fastest first. Others compute it slower than float32.
_BFLOAT16_SETS = ("AMX-BF16", "AVX512-BF16")
# Instruction sets that determine the speed of products, by their flags in /proc/cpuinfo.
_INSTRUCTION_SETS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX512-BF16",
    "avx512_vnni": _VNNI,
    "avx_vnni": "AVX-VNNI",
    "amx_bf16": "AMX-BF16",
    "amx_int8": "AMX-INT8",
    "asimd": "NEON",
    "sve": "SVE",
}


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor's model name and its instruction sets for matrix products."""

    name: str
    instruction_sets: tuple[str, ...]

    @classmethod
    def parse(cls, cpuinfo: str) -> Processor:
        """Parse the first processor of /proc/cpuinfo; without a model name, use the machine's architecture."""
        fields: dict[str, str] = {}
        for line in cpuinfo.splitlines():
            name, separator, value = line.partition(":")
            if separator:
                fields.setdefault(name.strip(), value.strip())
        flags = (fields.get("flags") or fields.get("Features", "")).split()
        return cls(
            fields.get("model name") or platform.machine(),
            tuple(shown for flag, shown in _INSTRUCTION_SETS.items() if flag in flags),
        )

    @property
    def bfloat16_set(self) -> str | None:
        """The fastest instruction set that multiplies bfloat16, or None."""
        return next((name for name in _BFLOAT16_SETS if name in self.instruction_sets), None)

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.instruction_sets) or 'no vector extensions known'})"


@cache
def this_processor() -> Processor:
    """Return the processor of this machine, reading /proc/cpuinfo once."""
    try:
        return Processor.parse(_CPUINFO.read_text())
    except OSError:
        return Processor.parse("")


@dataclass(frozen=True, slots=True)
class DtypeChoice:
    """The dtype of a model on a CPU, by its name in the configuration, and the reason for it."""

    dtype: str
    reason: str

    def __str__(self) -> str:
        return f"dtype {self.dtype}: {self.reason}"


def choose_cpu_dtype(config: EngineConfig, processor: Processor | None = None) -> DtypeChoice:
    """Return the configured dtype; auto is bfloat16 on processors that multiply it, otherwise float32.

    With `quantization`, the product weight-only computes in float32 on all processors. Without a model, its `auto` is
    none (`weight_storage`).

    Raises:
        ConfigError: if quantization is combined with a dtype that its product lacks, or as `int8_choice`.
    """
    processor = processor or this_processor()
    if config.quantization not in ("auto", "none"):
        product = int8_choice(processor).product
        if product == "weight-only":
            if config.dtype not in ("auto", "float32"):
                raise ConfigError(
                    f"--quantization {config.quantization} computes in float32: remove --dtype {config.dtype}"
                )
            return DtypeChoice("float32", f"--quantization {config.quantization} computes in it")
        if config.dtype == "float16":
            raise ConfigError(
                f"--quantization {config.quantization} computes in float32 or bfloat16: remove --dtype {config.dtype}"
            )
    if config.dtype != "auto":
        return DtypeChoice(config.dtype, "set by --dtype")
    found = processor.bfloat16_set
    if found is None:
        return DtypeChoice("float32", f"the processor has neither {' nor '.join(_BFLOAT16_SETS)}")
    return DtypeChoice("bfloat16", f"the processor has {found}")


def linear_choice(
    dtype: str = "float32", environment: Mapping[str, str] = os.environ, *, deterministic: bool = False
) -> str:
    """Return the product to use with matrices that are not quantised, one of `LINEAR_CHOICES`.

    Args:
        dtype: of the matrices: float32 or bfloat16.
        environment: may name a product.
        deterministic: whether a row's result must not depend on other rows: only tiled guarantees that.

    Raises:
        ConfigError: if the environment names an unknown product, or one that is not deterministic but must be.
    """
    choice = environment.get(LINEAR_VARIABLE) or ("tiled" if deterministic else DEFAULT_LINEAR[dtype])
    if choice not in LINEAR_CHOICES:
        raise ConfigError(f"{LINEAR_VARIABLE}={choice}: choose one of {', '.join(LINEAR_CHOICES)}")
    if deterministic and choice != "tiled":
        raise ConfigError(f"{LINEAR_VARIABLE}={choice} is not available with --deterministic: remove one of them")
    return choice


@dataclass(frozen=True, slots=True)
class Int8Choice:
    """The product with int8 weights, one of `INT8_CHOICES`, and the reason for it.

    `vnni` also quantises activations; `weight-only` computes in float32.
    """

    product: str
    reason: str

    def __str__(self) -> str:
        return f"int8 product {self.product}: {self.reason}"


def int8_choice(processor: Processor | None = None, environment: Mapping[str, str] = os.environ) -> Int8Choice:
    """Return the product to use with int8 weights: by default vnni on processors with AVX512-VNNI.

    Raises:
        ConfigError: if the environment names an unknown product, or one that the processor lacks.
    """
    is_fast = _VNNI in (processor or this_processor()).instruction_sets and has_vnni()
    choice = environment.get(INT8_VARIABLE)
    if choice and choice not in INT8_CHOICES:
        raise ConfigError(f"{INT8_VARIABLE}={choice}: choose one of {', '.join(INT8_CHOICES)}")
    if choice == "vnni" and not is_fast:
        raise ConfigError(f"{INT8_VARIABLE}=vnni: the processor has no {_VNNI}: remove it")
    if choice:
        return Int8Choice(choice, f"set by {INT8_VARIABLE}")
    if is_fast:
        return Int8Choice("vnni", f"the processor has {_VNNI}; activations are quantised too")
    return Int8Choice("weight-only", f"the processor has no {_VNNI}")


def describe_processor(dtype: str = "float32", quantization: str = "none", *, deterministic: bool = False) -> str:
    """Return the processor, its instruction sets and the selected product, for the log."""
    match quantization:
        case "none":
            product = f"{dtype} product {linear_choice(dtype, deterministic=deterministic)}"
        case "stored":
            product = f"products with stored blocks of up to six bits, which quantise activations; {int8_choice()}"
        case _:
            product = str(int8_choice())
    return f"processor {this_processor()}; {product}, kernels with {WIDTH * 32}-bit vectors"


def arithmetic(
    dtype: str = "float32", quantization: str = "none", *, deterministic: bool = False, runs_kernels: bool = True
) -> str:
    """Return the instruction sets, the width of the kernels' vectors and the product, which decide the last bits.

    Args:
        dtype: of the computation.
        quantization: none, int8 or stored.
        deterministic: whether a row's result must not depend on other rows.
        runs_kernels: whether the project's kernels run the model; otherwise torch's do.
    """
    sets = ", ".join(this_processor().instruction_sets) or platform.machine()
    if not runs_kernels:
        return f"{sets}; torch"
    product = int8_choice().product if quantization != "none" else linear_choice(dtype, deterministic=deterministic)
    return f"{sets}; {WIDTH * 32}-bit vectors; product {product}"

"""The CPU and the matrix product selected for it. Needs no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastgen.config import ConfigError
from fastgen.kernels.cpu.vector_width import WIDTH

LINEAR_VARIABLE = "FASTGEN_CPU_LINEAR"
LINEAR_CHOICES = ("tiled", "onednn", "plain")  # the first is the default

_CPUINFO = Path("/proc/cpuinfo")
# Instruction sets that determine the speed of products, by their flags in /proc/cpuinfo.
_INSTRUCTION_SETS = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX512-BF16",
    "avx512_vnni": "AVX512-VNNI",
    "avx_vnni": "AVX-VNNI",
    "amx_tile": "AMX",
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

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(self.instruction_sets) or 'no vector extensions known'})"


@cache
def this_processor() -> Processor:
    """Return the processor of this machine, reading /proc/cpuinfo once."""
    try:
        return Processor.parse(_CPUINFO.read_text())
    except OSError:
        return Processor.parse("")


def linear_choice(environment: Mapping[str, str] = os.environ) -> str:
    """Return the float32 product to use, one of `LINEAR_CHOICES`.

    Raises:
        ConfigError: if the environment names an unknown product.
    """
    choice = environment.get(LINEAR_VARIABLE) or LINEAR_CHOICES[0]
    if choice not in LINEAR_CHOICES:
        raise ConfigError(f"{LINEAR_VARIABLE}={choice}: choose one of {', '.join(LINEAR_CHOICES)}")
    return choice


def describe() -> str:
    """Return the processor, its instruction sets and the selected product, for the log.

    Raises:
        ConfigError: as `linear_choice`.
    """
    return f"processor {this_processor()}; float32 product {linear_choice()}, kernels with {WIDTH * 32}-bit vectors"

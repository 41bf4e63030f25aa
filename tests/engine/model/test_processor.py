"""The processor's description in the first lines of logs and test runs."""

from __future__ import annotations

import platform

import pytest

from fastgen.config import ConfigError
from fastgen.kernels.cpu.vector_width import WIDTH
from fastgen.model.processor import Processor, describe, linear_choice, this_processor

XEON = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8481C
flags\t\t: fpu avx avx2 avx512f avx512_bf16 avx512_vnni amx_bf16 amx_tile avx_vnni

processor\t: 1
model name\t: another
flags\t\t: fpu
"""


def test_instruction_sets_are_those_of_the_first_processor() -> None:
    assert str(Processor.parse(XEON)) == (
        "Intel(R) Xeon(R) Platinum 8481C (AVX2, AVX-512, AVX512-BF16, AVX512-VNNI, AVX-VNNI, AMX)"
    )


@pytest.mark.parametrize(("text", "shown"), [("Features\t: fp asimd sve\n", "NEON, SVE"), ("", "no vector")])
def test_processor_without_a_model_name_is_named_by_its_architecture(text: str, shown: str) -> None:
    assert str(Processor.parse(text)).startswith(f"{platform.machine()} ({shown}")


def test_processor_file_is_read_once() -> None:
    assert this_processor() is this_processor()


def test_description_names_the_processor_and_the_forced_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_CPU_LINEAR", "plain")
    assert describe() == f"processor {this_processor()}; float32 product plain, kernels with {WIDTH * 32}-bit vectors"
    monkeypatch.setenv("FASTGEN_CPU_LINEAR", "fast")
    with pytest.raises(ConfigError, match="choose one of tiled, onednn, plain"):
        describe()


def test_product_is_tiled_unless_the_environment_names_another() -> None:
    assert [linear_choice(environment) for environment in ({}, {"FASTGEN_CPU_LINEAR": "onednn"})] == ["tiled", "onednn"]

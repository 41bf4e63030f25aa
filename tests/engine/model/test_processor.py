"""The processor's description in the first lines of logs and test runs."""

from __future__ import annotations

import platform
from dataclasses import replace

import pytest

from fastgen.commands.calibrate import formats
from fastgen.kernels.cpu.vector_width import WIDTH
from fastgen.model.processor import (
    Processor,
    choose_cpu_dtype,
    describe_processor,
    int8_choice,
    linear_choice,
    this_processor,
)
from fastgen.settings import ConfigError, EngineConfig

XEON = """\
processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R) Xeon(R) Platinum 8481C
flags\t\t: fpu avx avx2 avx512f avx512_bf16 avx512_vnni amx_bf16 amx_tile amx_int8 avx_vnni

processor\t: 1
model name\t: another
flags\t\t: fpu
"""


def test_instruction_sets_are_those_of_the_first_processor() -> None:
    assert str(Processor.parse(XEON)) == (
        "Intel(R) Xeon(R) Platinum 8481C (AVX2, AVX-512, AVX512-BF16, AVX512-VNNI, AVX-VNNI, AMX-BF16, AMX-INT8)"
    )


@pytest.mark.parametrize(("text", "shown"), [("Features\t: fp asimd sve\n", "NEON, SVE"), ("", "no vector")])
def test_processor_without_a_model_name_is_named_by_its_architecture(text: str, shown: str) -> None:
    assert str(Processor.parse(text)).startswith(f"{platform.machine()} ({shown}")


def test_processor_file_is_read_once() -> None:
    assert this_processor() is this_processor()


def test_description_names_the_processor_and_the_forced_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_CPU_LINEAR", "plain")
    assert (
        describe_processor()
        == f"processor {this_processor()}; float32 product plain, kernels with {WIDTH * 32}-bit vectors"
    )
    monkeypatch.setenv("FASTGEN_CPU_LINEAR", "fast")
    with pytest.raises(ConfigError, match="choose one of tiled, onednn, plain"):
        describe_processor()


def test_product_is_the_dtypes_default_unless_the_environment_names_another() -> None:
    forced = {"FASTGEN_CPU_LINEAR": "onednn"}
    assert [linear_choice("float32", environment) for environment in ({}, forced)] == ["tiled", "onednn"]
    assert [linear_choice("bfloat16", environment) for environment in ({}, forced)] == ["onednn", "onednn"]


def test_only_the_product_with_one_order_of_sums_is_deterministic() -> None:
    assert [linear_choice(dtype, {}, deterministic=True) for dtype in ("float32", "bfloat16")] == ["tiled", "tiled"]
    for choice in ("onednn", "plain"):
        with pytest.raises(ConfigError, match=f"FASTGEN_CPU_LINEAR={choice} is not available with --deterministic"):
            linear_choice("bfloat16", {"FASTGEN_CPU_LINEAR": choice}, deterministic=True)


@pytest.mark.parametrize(
    ("flags", "dtype", "reason"),
    [
        ("avx512f avx512_bf16 amx_bf16", "bfloat16", "the processor has AMX-BF16"),
        ("avx512f avx512_bf16", "bfloat16", "the processor has AVX512-BF16"),
        ("avx512f avx_vnni amx_int8", "float32", "the processor has neither AMX-BF16 nor AVX512-BF16"),
    ],
)
def test_auto_is_bfloat16_where_the_processor_multiplies_it(flags: str, dtype: str, reason: str) -> None:
    processor = Processor.parse(f"flags: {flags}")
    auto = choose_cpu_dtype(EngineConfig(model=""), processor)
    assert (auto.dtype, auto.reason) == (dtype, reason)
    assert str(auto) == f"dtype {dtype}: {reason}"
    assert choose_cpu_dtype(EngineConfig(model="", dtype="bfloat16"), processor).dtype == "bfloat16"
    assert choose_cpu_dtype(EngineConfig(model="", dtype="float32"), processor).dtype == "float32"
    # None of these processors has AVX512-VNNI.
    assert choose_cpu_dtype(EngineConfig(model="", quantization="int8"), processor).dtype == "float32"
    with pytest.raises(ConfigError, match="--quantization int8 computes in float32: remove --dtype bfloat16"):
        choose_cpu_dtype(EngineConfig(model="", quantization="int8", dtype="bfloat16"), processor)


def test_int8_products_quantise_activations_where_the_processor_multiplies_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast, slow = Processor.parse("flags: avx512f avx512_vnni avx512_bf16"), Processor.parse("flags: avx512f avx_vnni")
    monkeypatch.setattr("fastgen.model.processor.has_vnni", lambda: True)
    assert str(int8_choice(fast, {})).startswith("int8 product vnni: the processor has AVX512-VNNI")
    assert str(int8_choice(slow, {})) == "int8 product weight-only: the processor has no AVX512-VNNI"
    assert int8_choice(fast, {"FASTGEN_CPU_INT8": "weight-only"}).product == "weight-only"
    with pytest.raises(ConfigError, match="FASTGEN_CPU_INT8=vnni: the processor has no AVX512-VNNI"):
        int8_choice(slow, {"FASTGEN_CPU_INT8": "vnni"})
    with pytest.raises(ConfigError, match="choose one of vnni, weight-only"):
        int8_choice(fast, {"FASTGEN_CPU_INT8": "fast"})
    monkeypatch.setattr("fastgen.model.processor.has_vnni", lambda: False)
    assert int8_choice(fast, {}).product == "weight-only", "kernels are compiled for another processor"


def test_int8_computes_in_the_dtype_of_other_products_where_activations_are_quantised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FASTGEN_CPU_INT8", raising=False)
    monkeypatch.setattr("fastgen.model.processor.has_vnni", lambda: True)
    fast, older = (Processor.parse(f"flags: avx512f avx512_vnni {more}") for more in ("avx512_bf16", ""))

    def dtype(processor: Processor, given: str) -> str:
        return choose_cpu_dtype(EngineConfig(model="", quantization="int8", dtype=given), processor).dtype

    assert [dtype(fast, given) for given in ("auto", "float32", "bfloat16")] == ["bfloat16", "float32", "bfloat16"]
    assert [dtype(older, given) for given in ("auto", "float32", "bfloat16")] == ["float32", "float32", "bfloat16"]
    with pytest.raises(ConfigError, match="int8 computes in float32 or bfloat16: remove --dtype float16"):
        dtype(fast, "float16")
    monkeypatch.setenv("FASTGEN_CPU_INT8", "weight-only")
    assert dtype(fast, "auto") == "float32"


def test_description_names_the_int8_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTGEN_CPU_INT8", "weight-only")
    assert "; int8 product weight-only: set by FASTGEN_CPU_INT8, kernels with " in describe_processor("float32", "int8")


def test_calibrate_measures_the_default_first_then_the_processors_other_formats() -> None:
    fast, slow = Processor.parse("flags: avx512_bf16"), Processor.parse("flags: avx2")
    auto = EngineConfig(model="")

    def measured(processor: Processor, config: EngineConfig = auto, *, is_native: bool = True) -> list[tuple[str, str]]:
        found = formats(config, processor, replace(config, quantization="none"), is_native=is_native)
        return [(settings.dtype, settings.quantization) for settings in found.values()]

    assert measured(fast) == [("bfloat16", "none"), ("float32", "none"), ("auto", "int8")]
    assert measured(slow) == [("float32", "none"), ("auto", "int8")]
    assert measured(slow, is_native=False) == [("float32", "none")]
    assert measured(fast, EngineConfig(model="", dtype="float32")) == [("float32", "none")]
    plain, int8 = (replace(auto, quantization=name) for name in ("none", "int8"))
    assert next(iter(formats(auto, fast, plain, is_native=True))) == (
        "bfloat16, the default: the processor has AVX512-BF16"
    )
    found = formats(auto, fast, int8, is_native=True)
    assert list(found) == ["int8, the default for this GGUF file", "--dtype bfloat16", "--dtype float32"]
    assert [(each.dtype, each.quantization) for each in found.values()] == [
        ("auto", "int8"), ("bfloat16", "none"), ("float32", "none")
    ]  # fmt: skip

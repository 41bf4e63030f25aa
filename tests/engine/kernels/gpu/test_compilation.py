"""The ahead-of-time compilation of kernels. `python -m fastgen.kernels.triton.compilation` compiles all variants."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest


def test_representative_variants_fit_a_chip() -> None:
    command = [sys.executable, "-m", "fastgen.kernels.triton.compilation", "--kernel", "gated_activation/bf16"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([*command, "--target", "90"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| gated_activation")]
    assert len(rows) == 2
    assert all(" | sm_90 | " in row and row.endswith("| 227 |") for row in rows)


def test_an_unknown_kernel_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    with pytest.raises(SystemExit) as raised:
        module.main(["--kernel", "no_such_kernel"])
    assert raised.value.code == 2
    assert "no kernel has this name" in capsys.readouterr().err


def test_spills_shared_memory_and_errors_fail_a_variant() -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    good = module.Compiled("kernel", "variant", 120, registers=255, shared_kib=99.0)
    bad = [
        module.Compiled("kernel", "variant", 120, spilled_bytes=8),
        module.Compiled("kernel", "variant", 120, shared_kib=99.1),
        module.Compiled("kernel", "variant", 90, error="no such type"),
    ]
    assert good.is_good
    assert not any(one.is_good for one in bad)
    lines = module.table([good, *bad]).splitlines()
    assert lines[2] == "| kernel | variant | sm_120 | 255 | 0 | 99.0 | 99 |"
    assert all(line.endswith("**over** |") for line in lines[3:])
    assert len({line.count("|") for line in lines}) == 1


def test_names_of_variants_are_unique_and_every_kernel_has_one() -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    names = [module.full_name(variant) for variant in module.variants()]
    assert len(names) == len(set(names))
    kernels = {name.partition("/")[0] for name in names}
    expected = {"add_rms_norm", "gated_activation", "embed", "rotary_cache", "route_experts"}
    expected |= {"count_pairs", "sort_pairs", "gate_up", "down", "sum_shares"}
    assert expected <= {kernel.partition(".")[2] for kernel in kernels}


@pytest.mark.parametrize("missing", ["signature", "constants"])
def test_a_variant_that_does_not_compile_is_reported(missing: str) -> None:

    module = importlib.import_module("fastgen.kernels.triton.compilation")
    variant = next(v for v in module.variants("gated_activation"))
    result = module.compile_variant(replace(variant, **{missing: {}}), 90)
    assert not result.is_good
    assert result.error

"""The ahead-of-time compilation of kernels. `python -m fastgen.kernels.triton.compilation` compiles all variants."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from fastgen.kernels.gpu import attention_tiles

BENCHMARKS = Path(__file__).parents[4] / "docs/benchmarks"
FILE = BENCHMARKS / "gpu-compilation.csv"
COMPLETE = "run `python -m fastgen.kernels.triton.compilation --file docs/benchmarks/gpu-compilation.csv`"


@pytest.mark.slow
def test_representative_variants_fit_a_chip(tmp_path: Path) -> None:
    file = tmp_path / "compiled.csv"
    header, *known = FILE.read_text().splitlines()
    file.write_text(f"{header}\n")
    command = [sys.executable, "-m", "fastgen.kernels.triton.compilation", "--kernel", "gated_activation/bf16"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [*command, "--target", "90", "--file", str(file)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| `gated_activation` | 3 | " in done.stdout
    rows = file.read_text().splitlines()[1:]
    assert len(rows) == 3
    assert set(rows) <= set(known), "the file differs from what is compiled"


def test_an_unknown_kernel_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    with pytest.raises(SystemExit) as raised:
        module.main(["--kernel", "no_such_kernel"])
    assert raised.value.code == 2
    assert "no kernel has this name" in capsys.readouterr().err


def test_spills_shared_memory_and_errors_fail_a_variant() -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    good = module.Compiled("kernel", "variant", "abc123", 120, registers=255, shared_kib=99.0)
    bad = [
        module.Compiled("kernel", "variant", "abc123", 120, spilled_bytes=8),
        module.Compiled("kernel", "variant", "abc123", 120, shared_kib=99.1),
        module.Compiled("kernel", "variant", "abc123", 90, error="no such type"),
    ]
    assert good.is_good
    assert not any(one.is_good for one in bad)


def test_names_of_variants_are_unique_and_every_kernel_has_one() -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    names = [module.full_name(variant) for variant in module.variants()]
    assert len(names) == len(set(names))
    assert launched() == {name.partition("/")[0].partition(".")[2] for name in names}


def launched() -> set[str]:
    """Return the kernels that the modules of fastgen.kernels.triton launch."""
    (folder,) = importlib.import_module("fastgen.kernels.triton").__path__
    launch = re.compile(r"^ +_?(\w+)\[.+\]\(", re.MULTILINE)
    return {kernel for path in Path(folder).rglob("*.py") for kernel in launch.findall(path.read_text())}


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["signature", "constants"])
def test_a_variant_that_does_not_compile_is_reported(missing: str) -> None:

    module = importlib.import_module("fastgen.kernels.triton.compilation")
    variant = next(v for v in module.variants("gated_activation"))
    result = module.compile_variant(replace(variant, **{missing: {}}), 90)
    assert not result.is_good
    assert result.error


def keys(module: ModuleType, name: str | None = None) -> list[object]:
    return [module.key(variant, target) for variant in module.variants(name) for target in module.targets(variant)]


def test_the_file_has_a_good_row_for_each_of_todays_configurations() -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    rows = module.read_table(FILE)
    assert list(rows) == keys(module), f"a row is missing, or of a variant or kernel that has changed: {COMPLETE}"
    assert len(FILE.read_text().splitlines()) == len(rows) + 1, "a row is not good, or twice there"


def test_products_copies_and_buffers_are_read_from_the_code() -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    copies = """
        cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10;
        @%p2 cp.async.ca.shared.global [ %r2 + 0 ], [ %rd2 + 0 ], 0x4, %r7;
        cp.async.cg.shared.global [ %r3 + 16 ], [ %rd3 + 0 ], 0x10, %r8;
        cp.async.commit_group;
    """
    tensor = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2, %r3}];"
    assert module._copies(copies) == "4 16"
    assert module._copies(copies + tensor) == "4 16 tma"
    assert module._copies("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [ %rd1 + 0 ];") == ""
    products = ["wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", "tcgen05.mma.cta_group::1.kind::f16 [ %r1 ]"]
    products += ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "fma.rn.f32 %f1, %f2, %f3;"]
    assert [module._products(line) for line in products] == ["wgmma", "tcgen05", "mma", ""]
    allocations = """
        %1 = ttg.local_alloc %q : (tensor<128x128xbf16, #blocked>) -> !ttg.memdesc<128x128xbf16, #shared, #smem>
        %2 = ttg.local_alloc : () -> !ttg.memdesc<2x64xi32, #shared1, #smem, mutable>
        %3 = ttg.local_alloc : () -> !ttg.memdesc<3x128x64xbf16, #shared, #smem, mutable>
        %4 = ttg.local_alloc : () -> !ttg.memdesc<2x64x128xbf16, #shared, #smem, mutable>
    """
    assert module._buffers(allocations) == 2
    assert module._buffers("%1 = tt.load %2 : tensor<128x!tt.ptr<f32>>") == 0


def test_attention_multiplies_chunks_by_warp_groups_and_loads_decodes_into_two_buffers() -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    rows = [row for row in module.read_table(FILE).values() if row.kernel == "paged_attention_kernel"]
    chunks, decodes = (
        [row for row in rows if row.target in (90, 100) and row.variant.startswith((f"{kind}-bf16-", f"{kind}-fp16-"))]
        for kind in ("chunks", "decodes")
    )
    assert {(row.target, row.products) for row in chunks} == {(90, "wgmma"), (100, "tcgen05")}
    assert {row.buffers for row in decodes if "-fp8" not in row.variant} == {2}


def test_the_page_shows_the_most_of_each_kernel() -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    rows = list(module.read_table(FILE).values())
    assert f"\n\n{module.table_page(rows)}\n\n" in (BENCHMARKS / "gpu.md").read_text()


def test_the_table_has_the_most_registers_and_shared_memory_of_each_kernel() -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    rows = [
        module.Compiled("a", "small", "abc123", 80, registers=20, shared_kib=9.0),
        module.Compiled("a", "large", "abc123", 80, registers=30, shared_kib=8.0),
        module.Compiled("a", "small", "abc123", 120, registers=40, shared_kib=1.0),
        module.Compiled("b", "only", "abc123", 90, registers=50, shared_kib=2.0),
    ]
    assert module.table_page(rows).splitlines()[2:] == [
        "| `a` | 3 | 40 | 9.0 |  |  | 1.0 |",
        "| `b` | 1 | 50 |  | 2.0 |  |  |",
    ]


def test_a_file_is_completed_and_what_does_not_fit_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    compiled: list[object] = []

    def compile_variant(variant: object, target: int) -> object:
        compiled.append(module.key(variant, target))
        return module.Compiled(*module.key(variant, target), registers=9, shared_kib=1.0)

    monkeypatch.setattr(module, "compile_variant", compile_variant)
    wanted = keys(module, "gated_activation")
    gone = module.Compiled("gated_activation", "gone", "abc123", 90)
    bad = module.Compiled(*wanted[2], spilled_bytes=8)
    file = tmp_path / "compiled.csv"
    module.write(file, [module.Compiled(*wanted[1], registers=7, shared_kib=2.5), bad, gone])
    for expected in (wanted[:1] + wanted[2:], []):
        compiled.clear()
        assert module.main(["--kernel", "gated_activation", "--file", str(file)]) == 0
        assert compiled == expected
        rows = module.read_table(file)
        assert list(rows) == wanted
        assert (rows[wanted[1]].registers, rows[wanted[2]].registers) == (7, 9)


def test_an_interrupted_write_loses_no_row(tmp_path: Path) -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    file = tmp_path / "compiled.csv"
    rows = [module.Compiled("kernel", "variant", "abc123", target, registers=7) for target in (80, 90)]
    module.write(file, rows)

    def interrupted() -> Iterator[object]:
        yield rows[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module.write(file, interrupted())
    assert list(module.read_table(file).values()) == rows


def test_a_variant_that_does_not_fit_is_named_and_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    monkeypatch.setattr(
        module,
        "compile_variant",
        lambda variant, target: module.Compiled(*module.key(variant, target), error="no, such type"),
    )
    file = tmp_path / "compiled.csv"
    module.write(file, [])
    assert module.main(["--kernel", "gated_activation/bf16", "--target", "90", "--file", str(file)]) == 1
    assert capsys.readouterr().out.count("no, such type") == 3
    assert module.read_table(file) == {}


def test_a_changed_configuration_is_another_row() -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    variant = next(iter(module.variants("gated_activation")))
    changed = [
        replace(variant, num_warps=variant.num_warps + 1),
        replace(variant, num_stages=variant.num_stages + 1),
        replace(variant, max_registers=64),
        replace(variant, constants={**variant.constants, "BLOCK": 7}),
        replace(variant, signature={**variant.signature, "out": "*i8"}),
    ]
    assert len({module.key(one, 90) for one in [variant, *changed]}) == 6


KERNEL = '''
import triton
import triton.language as tl

SHIFT = tl.constexpr(3)

@triton.jit
def inner(x):
    return x * 2 + SHIFT

@triton.jit
def kernel(out, SIZE: tl.constexpr):
    """Write."""
    # Each program writes one row.
    tl.store(out + tl.arange(0, SIZE), tl.max(inner(tl.arange(0, SIZE)), 0))
'''


@pytest.fixture
def digest(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that returns the digest of the kernel of a module with this source."""
    module = importlib.import_module("fastgen.kernels.triton.compilation")

    def digest_of(source: str) -> str:
        path = tmp_path / f"{hashlib.sha256(source.encode()).hexdigest()}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location("a_kernel", path)
        assert spec is not None
        assert spec.loader is not None
        loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
        return str(module.function_digest(loaded.kernel.fn))

    return digest_of


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("SIZE), tl.max", "SIZE) + 1, tl.max"),
        ("x * 2", "x * 4"),
        ("constexpr(3)", "constexpr(5)"),
        ("tl.store(out", "if SIZE > 16:\n        tl.store(out"),
    ],
    ids=["its own source", "a function that it calls", "a constant", "an indented line"],
)
def test_a_changed_kernel_is_another_row(digest: Callable[[str], str], before: str, after: str) -> None:
    assert KERNEL.count(before) == 1
    assert digest(KERNEL.replace(before, after)) != digest(KERNEL)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Write.", "Write the largest."),
        ("Each program writes", "Programs write"),
        ("import triton\n", "import triton\n\n\n"),
        ("(out + tl.arange(0, SIZE),", "(\n        out + tl.arange(0, SIZE),\n       "),
    ],
    ids=["docstring", "comment", "another line", "line breaks"],
)
def test_a_kernel_with_the_same_tokens_keeps_its_row(digest: Callable[[str], str], before: str, after: str) -> None:
    assert before in KERNEL
    assert digest(KERNEL.replace(before, after, 1)) == digest(KERNEL)


def test_every_configuration_that_attention_may_choose_is_compiled() -> None:
    module = importlib.import_module("fastgen.kernels.triton.compilation")
    element_bytes = {"*bf16:16": 2, "*fp16:16": 2, "*fp32:16": 4, "*fp8e4nv:16": 1, "*u8:16": 1}
    compiled, chosen = set(), set()
    for variant in module.variants("paged_attention"):
        of = variant.constants
        sizes = of["PADDED_DIM"], of["BLOCK_M"], of["BLOCK_N"], variant.num_warps, variant.num_stages
        size = element_bytes[variant.signature["key_cache"]]
        compiled |= {(target, size, *sizes) for target in module.targets(variant)}
    for target, size, head_dim, group, num_rows in itertools.product(
        module.SHARED_MEMORY_LIMITS, (1, 2, 4), (16, 64, 80, 128, 160, 256), (1, 4, 7, 16), (1, 64, 65, 8192)
    ):
        for launch in attention_tiles.tile_classes(num_rows, 256, group, 1, head_dim, size, target, 132):
            c = launch.configuration
            padded = attention_tiles.padded_dim(head_dim)
            chosen.add((target, size, padded, c.block_m, c.block_n, c.num_warps, c.num_stages))
    assert chosen == compiled

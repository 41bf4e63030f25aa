"""Paged attention in Triton's interpreter against its twin, and the twin against a computation by hand.

Tolerances: float32 sums of another order (float32); weights rounded to 11 bits (float16); the interpreter truncates
results to 8 bits where a GPU rounds, but multiplies in float32 (bfloat16).
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.gpu.operator_bytes import attention_bytes

from fastgen.kernels import reference
from fastgen.kernels.gpu import attention_tiles
from fastgen.kernels.gpu.attention import paged_attention
from fastgen.kernels.gpu.attention_tiles import classes_of, num_counters, workspace_elements
from fastgen.kernels.gpu.work_list import list_attention_work, work_items

pytestmark = pytest.mark.slow  # together over ten seconds

Import = Callable[[str], ModuleType]

TOLERANCES = {
    torch.float32: {"atol": 3e-6, "rtol": 1e-5},
    torch.float16: {"atol": 2e-3, "rtol": 2e-3},
    torch.bfloat16: {"atol": 1e-6, "rtol": 2**-7},
}
CPU = torch.device("cpu")
DECODES = ((1, 0), (1, 14), (1, 15), (1, 16), (1, 199), (3, 0), (9, 60))  # rows and context of each sequence
CHUNKS = ((1, 90), (1, 0), (40, 0), (21, 70), (2, 31))
VERIFIED = ((2, 140), (8, 300), (5, 11), (1, 70), (7, 0))


@dataclass
class Step:
    """Random rows over a cache whose unwritten slots, and blocks of unused table entries, are NaN."""

    sequences: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    padded_rows: int = 0
    padded_sequences: int = 0
    magnitude: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        lengths = [rows + context for rows, context in self.sequences]
        sizes = [-(-length // self.block_size) for length in lengths]
        order = (torch.randperm(sum(sizes)) + 1).split(sizes)  # block 0 is in no table
        shape = (sum(sizes) + 1, self.kv_heads, self.block_size, self.head_dim)
        self.keys, self.values = torch.randn(shape) * self.magnitude, torch.randn(shape)
        self.tables = torch.zeros(len(sizes) + self.padded_sequences, max(sizes) + 3, dtype=torch.int32)
        self.keys[0] = self.values[0] = torch.nan
        for sequence, (blocks, length) in enumerate(zip(order, lengths, strict=True)):
            self.tables[sequence, : len(blocks)] = blocks
            unwritten = blocks[-1:], slice(None), slice((length - 1) % self.block_size + 1, None)
            self.keys[unwritten] = self.values[unwritten] = torch.nan
        cache_dtype = self.cache_dtype or self.dtype
        self.keys, self.values = self.keys.to(cache_dtype), self.values.to(cache_dtype)
        starts = torch.tensor([0, *(rows for rows, _ in self.sequences)] + [0] * self.padded_sequences)
        self.starts = starts.cumsum(0).to(torch.int32)
        self.lengths = torch.tensor(lengths + [0] * self.padded_sequences, dtype=torch.int32)
        self.total = int(self.starts[-1])
        self.query = torch.randn(self.total + self.padded_rows, self.heads, self.head_dim).to(self.dtype)

    def run(self, operator: Callable[..., None], **changes: Any) -> torch.Tensor:
        """Return the rows of the sequences as float32."""
        out = torch.full_like(self.query, 7.0)
        options = {
            "sinks": None, "scale": self.head_dim**-0.5, "window": 0, "softcap": 0.0, "key_scale": 1.0,
            "value_scale": 1.0, "workspace": None,
        }  # fmt: skip
        options |= self.options | changes
        if options["workspace"] is None:
            options["workspace"] = self.workspace()
        if "work" not in options:
            options["work"] = list_attention_work(*self.listed(), options["window"])
        inputs = (self.query, self.keys, self.values, self.starts, self.lengths, self.tables)
        operator(out, *inputs, **options)
        assert (out[self.total :] == 7).all(), "a row of no sequence was written"
        return out[: self.total].float()

    def workspace(self) -> torch.Tensor:
        """Return a workspace that is NaN but for its counters."""
        workspace = torch.full((workspace_elements(self.kv_heads, self.head_dim, CPU),), torch.nan)
        workspace[: num_counters(self.kv_heads, CPU)] = 0
        return workspace

    def listed(self) -> tuple[torch.Tensor, ...]:
        """Return the operands of `list_attention_work`."""
        return self.query, self.keys, self.starts, self.lengths

    def num_splits(self) -> list[int]:
        """Return the parts of each tile, by launch and row."""
        window, found = self.options.get("window", 0), []
        for tiles in classes_of(self.query, self.keys, len(self.lengths)):
            programs = work_items(self.starts.tolist(), self.lengths.tolist(), tiles, window)
            items = [item for items in programs for item in items]
            found += [item.num_splits for item in sorted(items, key=lambda item: item.row) if item.split == 0]
        return found


def by_hand(step: Step) -> torch.Tensor:
    """Attention of each row and head alone, in float64."""
    options = {"window": 0, "softcap": 0.0, "sinks": None, "key_scale": 1.0, "value_scale": 1.0} | step.options
    out = torch.empty(step.total, step.heads, step.head_dim, dtype=torch.float64)
    row = 0
    for sequence, (rows, context) in enumerate(step.sequences):
        for position in range(context, context + rows):
            for head in range(step.heads):
                scores, values = [], []
                for key in range(max(0, position + 1 - options["window"]) if options["window"] else 0, position + 1):
                    block = step.tables[sequence, key // step.block_size]
                    slot = block, head // (step.heads // step.kv_heads), key % step.block_size
                    score = step.query[row, head].double() @ step.keys[slot].double()
                    score = score.item() * options["key_scale"] * step.head_dim**-0.5
                    if options["softcap"]:
                        score = math.tanh(score / options["softcap"]) * options["softcap"]
                    scores.append(score)
                    values.append(step.values[slot].double() * options["value_scale"])
                if options["sinks"] is not None:
                    scores.append(options["sinks"][head].item())
                    values.append(torch.zeros(step.head_dim, dtype=torch.float64))
                weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
                out[row, head] = weights @ torch.stack(values)
            row += 1
    return out.float()


def sinks(heads: int) -> torch.Tensor:
    return torch.linspace(-2, 3, heads)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": sinks(4)},
    "scales": {"key_scale": 1.5, "value_scale": 0.25},
    "all": {"window": 17, "softcap": 1.5, "sinks": sinks(4), "key_scale": 1.5, "value_scale": 0.25},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_the_twin_equals_attention_by_hand(options: str) -> None:
    step = Step(((1, 0), (1, 20), (4, 15)), head_dim=8, padded_rows=2, padded_sequences=2, options=OPTIONS[options])
    torch.testing.assert_close(step.run(paged_attention), by_hand(step), atol=1e-6, rtol=1e-6)


def test_the_twin_equals_the_reference_of_one_sequence() -> None:
    step = Step(((9, 30),), options={"window": 12, "softcap": 3.0})
    expected = reference.paged_attention(
        step.query, step.keys, step.values, step.tables[0, :3], 30, 1 / 8, window=12, softcap=3.0
    )
    torch.testing.assert_close(step.run(paged_attention), expected, atol=1e-6, rtol=1e-6)


def test_shapes_that_do_not_fit_are_rejected() -> None:
    step = Step(((1, 3),), heads=3)
    with pytest.raises(ValueError, match="does not fit a cache"):
        step.run(paged_attention)


def variation(sequences: tuple[tuple[int, int], ...], **changes: Any) -> Any:
    names = "-".join(f"{name}={value}" for name, value in changes.items() if name != "options")
    options = "-".join(changes.get("options", {}))
    kind = {DECODES: "decodes", CHUNKS: "chunks", VERIFIED: "verified"}.get(sequences, "few")
    return pytest.param(sequences, changes, id="-".join(filter(None, (kind, names, options))))


VARIATIONS = [
    *(variation(DECODES, heads=group, kv_heads=1) for group in (1, 3, 5, 7, 16)),
    *(variation(CHUNKS, heads=group, kv_heads=1) for group in (1, 2, 7, 8)),
    *(variation(DECODES, heads=2, head_dim=dim, block_size=32) for dim in (80, 112, 128, 192)),
    *(variation(CHUNKS, heads=2, kv_heads=1, head_dim=dim, block_size=64) for dim in (96, 160, 256)),
    *(variation(CHUNKS, heads=2, kv_heads=1, block_size=size) for size in (48, 128)),
    *(variation(rows, options=options) for rows in (DECODES, CHUNKS) for options in OPTIONS.values()),
    *(variation(CHUNKS, heads=2, kv_heads=1, options={"window": window}) for window in (1, 32, 61)),
    variation(DECODES, padded_rows=5, padded_sequences=4),
    variation(CHUNKS, padded_rows=90, padded_sequences=1),
    variation(((1, 0),), padded_rows=1, padded_sequences=1),
    variation(((1, 300),)),
    *(variation(VERIFIED, heads=2 * group) for group in (1, 4, 16)),
    *(variation((*VERIFIED, (50, 0)), heads=2 * group) for group in (4, 32)),
    variation(VERIFIED, options=OPTIONS["all"] | {"window": 110}),
    *(variation(rows, dtype=dtype) for rows in (DECODES, CHUNKS) for dtype in (torch.float16, torch.bfloat16)),
    variation(DECODES, cache_dtype=torch.float8_e4m3fn, options=OPTIONS["scales"]),
    variation(CHUNKS, cache_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16, options=OPTIONS["scales"]),
]


@pytest.mark.parametrize(("sequences", "changes"), VARIATIONS)
def test_the_kernel_equals_its_twin(sequences: Any, changes: dict[str, Any], interpreted: Import) -> None:
    step = Step(sequences, **changes)
    launch = interpreted("attention").paged_attention
    torch.testing.assert_close(step.run(launch), step.run(paged_attention), **TOLERANCES[step.dtype])


def test_a_step_without_sequences_writes_nothing(interpreted: Import) -> None:
    step = Step(((1, 3),), padded_rows=2)
    step.starts.zero_()
    step.lengths.zero_()
    step.total = 0
    kernels = interpreted("attention")
    step.run(kernels.paged_attention, work=interpreted("work_list").list_attention_work(*step.listed()))


def test_a_launch_depends_on_shapes_alone(interpreted: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph repeats the grid and the numbers of its capture, whatever the lengths are."""
    kernels, lists = interpreted("attention"), interpreted("work_list")
    launches: list[Any] = []

    def record(_self: Any, *arguments: Any, grid: Any, **keywords: Any) -> None:
        numbers = [value for value in arguments if not isinstance(value, torch.Tensor)]
        launches.append((grid, numbers, {name: value for name, value in keywords.items() if name != "warmup"}))

    monkeypatch.setattr(importlib.import_module("triton.runtime.interpreter").InterpretedFunction, "run", record)
    table = torch.zeros(8, 40, dtype=torch.int32)
    for sequences in (((1, 500), (1, 3), (70, 20)), ((72, 0),), ((9, 300), *((1, 0),) * 7)):
        step = Step(sequences, padded_rows=80 - sum(rows for rows, _ in sequences), padded_sequences=8 - len(sequences))
        step.tables = table
        step.run(kernels.paged_attention, work=lists.list_attention_work(*step.listed()))
    assert len(launches) == 9, "the list, decodes and chunks of each step"
    assert launches[:3] == launches[3:6] == launches[6:]


def test_keys_before_the_window_are_not_read(interpreted: Import) -> None:
    step = Step(((1, 150), (70, 60)), options={"window": 5})
    expected = step.run(paged_attention)
    step.tables[0, : 146 // 16] = 0  # of NaN
    step.tables[1, : 56 // 16] = 0
    torch.testing.assert_close(step.run(interpreted("attention").paged_attention), expected, **TOLERANCES[step.dtype])


def test_large_scores_neither_overflow_nor_lose_the_maximum(interpreted: Import) -> None:
    step = Step(DECODES, magnitude=1000.0)
    launch = interpreted("attention").paged_attention
    torch.testing.assert_close(step.run(launch), step.run(paged_attention), atol=1e-3, rtol=0)


def test_float8_is_decoded_on_devices_without_it(interpreted: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = interpreted("attention")
    for module in (kernels, attention_tiles):
        monkeypatch.setattr(module, "capability", lambda _: 80)
    step = Step(((32, 0),), cache_dtype=torch.float8_e4m3fn, options={"window": 1})  # a row is its own value
    values = torch.arange(256, dtype=torch.uint8)
    values = values[values & 0x7F != 0x7F]  # NaN
    step.values[1:].view(torch.uint8).copy_(values.repeat(40)[: step.values[1:].numel()].view_as(step.values[1:]))
    expected = step.values[step.tables[0, :2]].float().transpose(0, 1).flatten(1, 2).repeat_interleave(2, 0)
    torch.testing.assert_close(step.run(kernels.paged_attention).transpose(0, 1), expected, atol=0, rtol=0)


LONG = ((1, 149), (1, 90), (1, 4), (1, 120))
LONG_AND_CHUNK = ((1, 400), (1, 180), (2, 300), (63, 120))


@pytest.mark.parametrize(
    ("sequences", "changes"),
    [
        variation(LONG),
        variation(LONG, options=OPTIONS["all"] | {"window": 110}),
        variation(LONG, padded_rows=12, padded_sequences=12),
        variation(LONG_AND_CHUNK, options={"sinks": sinks(4)}),
        variation(LONG_AND_CHUNK, options={"window": 150}, head_dim=128, dtype=torch.float16),
        variation(((5, 400), (90, 500)), heads=12, kv_heads=2, dtype=torch.float16),
        variation(((90, 50),), heads=64, kv_heads=2, dtype=torch.float16),
        variation(((90, 500),), head_dim=256, options={"window": 20}),  # some rows see no key of the first part
        variation(((1, 130),), heads=16, kv_heads=1, head_dim=256),  # partial sums are added one by one
        variation(((1, 130),), heads=8, kv_heads=1, head_dim=256),  # and four at a time
    ],
)
def test_split_tiles_equal_whole_ones(
    sequences: Any, changes: dict[str, Any], interpreted: Import, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch = interpreted("attention").paged_attention
    step = Step(sequences, **changes)
    use_multiprocessors(0, monkeypatch)
    assert set(step.num_splits()) == {1}
    whole = step.run(launch)
    use_multiprocessors(16, monkeypatch)
    assert max(step.num_splits()) > 1
    close = {"atol": 2e-6, "rtol": 1e-5} if step.dtype == torch.float32 else TOLERANCES[step.dtype]
    split = step.run(launch)
    torch.testing.assert_close(split, whole, **close)
    torch.testing.assert_close(split, step.run(paged_attention), **TOLERANCES[step.dtype])


def test_chunks_and_rows_to_verify_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    use_multiprocessors(16, monkeypatch)
    decodes, chunk = Step(((2, 300), (1, 400))).num_splits(), Step(((70, 600),)).num_splits()
    assert min(decodes) > 1
    assert min(chunk) > 1


def test_a_workspace_serves_launch_after_launch(interpreted: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = interpreted("attention")
    use_multiprocessors(12, monkeypatch)
    workspace = Step(LONG).workspace()
    for sequences in (LONG, LONG_AND_CHUNK, LONG[:1]):
        step = Step(sequences)
        assert max(step.num_splits()) > 1
        out = step.run(kernels.paged_attention, workspace=workspace)
        assert not workspace[: num_counters(2, CPU)].view(torch.int32).any(), "a counter was not reset"
        torch.testing.assert_close(out, step.run(paged_attention), atol=3e-6, rtol=1e-5)


def test_the_order_of_programs_changes_no_bit(interpreted: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs programs in the order of the grid; the last of a tile's adds its parts, whichever it is."""
    kernels = interpreted("attention")
    use_multiprocessors(12, monkeypatch)
    step = Step(LONG_AND_CHUNK)
    expected = step.run(kernels.paged_attention)
    grids = importlib.import_module("triton.runtime.interpreter")
    backwards = lambda *bounds: reversed(range(*bounds)) if len(bounds) == 1 else range(*bounds)  # noqa: E731
    monkeypatch.setattr(grids, "range", backwards, raising=False)
    assert torch.equal(step.run(kernels.paged_attention), expected)


def test_partial_sums_are_visible_to_the_program_that_adds_them() -> None:
    """Every thread's stores, a barrier, the counter, a barrier, loads past the L1 cache: in the code for sm_90."""
    kernels = importlib.import_module("fastgen.kernels.triton.attention")
    variant = next(v for v in kernels.VARIANTS if v.name.startswith("decodes-bf16-bf16-64-global-"))
    accesses = re.findall(r"\b(?:st\.global|ld\.global|atom|bar\.sync)[.\w]*", ptx(variant, 90))
    counter = accesses.index("atom.global.gpu.acq_rel.add.u32")
    assert "st.global" in accesses[counter - 2]
    assert accesses[counter - 1] == accesses[counter + 1] == "bar.sync"
    loads = [access for access in accesses[counter:] if access.startswith("ld.global")]
    assert loads
    assert all(load.startswith("ld.global.cg") for load in loads)


def ptx(variant: Any, target: int) -> str:
    import triton

    names = variant.kernel.arg_names
    source = triton.compiler.ASTSource(
        variant.kernel,
        signature={name: variant.signature.get(name, "constexpr").removesuffix(":16") for name in names},
        constexprs={(names.index(name),): value for name, value in variant.constants.items()},
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in variant.signature.items()
            if kind.endswith(":16")
        },
    )
    options = {
        "num_warps": variant.num_warps, "num_stages": variant.num_stages, "maxnreg": variant.max_registers
    }  # fmt: skip
    gpu = triton.backends.compiler.GPUTarget("cuda", target, 32)
    return str(triton.compile(source, target=gpu, options=options).asm["ptx"])


def test_a_small_workspace_and_the_work_of_another_step_are_rejected(interpreted: Import) -> None:
    step, launch = Step(LONG), interpreted("attention").paged_attention
    with pytest.raises(ValueError, match="too small"):
        step.run(launch, workspace=step.workspace()[:-1])
    with pytest.raises(ValueError, match="not that of this step"):
        step.run(launch, work=list_attention_work(*Step(LONG[:3]).listed()))


def use_multiprocessors(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_tiles, "num_multiprocessors", lambda _: number)


def test_a_head_size_without_a_kernel_is_rejected(interpreted: Import) -> None:
    step = Step(((1, 3),), head_dim=320)
    with pytest.raises(ValueError, match="320"):
        step.run(interpreted("attention").paged_attention, work=torch.empty(0), workspace=torch.empty(0))


def test_bytes_count_each_key_and_value_once() -> None:
    # 100 and 7 keys for 2 KV heads, 1 and 3 rows of 8 heads; a padded sequence counts nothing.
    expected = 2 * 2 * 64 * (107 * 2 + 4 * 8)
    assert attention_bytes([100, 7, 50], [1, 3, 0], kv_heads=2, heads=8, head_dim=64, element_bytes=2) == expected

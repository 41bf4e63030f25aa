"""Mixtures of experts: kernels against twins, twins against the model's loop over experts.

Tolerance: float32 sums of another order; in float16, roundings of each product to either side. Products are not tested
in bfloat16, whose bits the interpreter would multiply as integers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from benchmarks.gpu.operator_bytes import experts_bytes, route_experts_bytes

from fastgen.kernels.gpu import experts
from fastgen.model.config.architecture import Experts
from fastgen.model.layers import moe
from fastgen.model.layers.weights import Mixture

pytestmark = pytest.mark.slow  # together over ten seconds

Import = Callable[[str], ModuleType]


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "count", "top_k"), [(1, 8, 2), (70, 60, 4), (3, 5, 5), (2, 512, 16), (0, 8, 2)])
def test_routing_equals_its_twin(
    interpreted: Import, rows: int, count: int, top_k: int, dtype: torch.dtype, normalised: bool
) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(rows, count) * 3).to(dtype)
    expected_weights, expected_ids = experts.route_experts(logits, top_k, normalised)
    weights, ids = interpreted("experts").route_experts(logits, top_k, normalised)
    assert torch.equal(ids, expected_ids)
    assert (ids.dtype, weights.dtype) == (torch.int32, dtype)
    torch.testing.assert_close(weights, expected_weights, atol=0, rtol=1e-5 if dtype == torch.float32 else 2**-7)


def test_of_equal_logits_the_lower_expert_is_chosen_first(interpreted: Import) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]])
    for route in (experts.route_experts, interpreted("experts").route_experts):
        assert route(logits, 4, True)[1].tolist() == [[1, 2, 4, 0]]


def test_extreme_logits_are_routed_and_nan_stays_in_its_row(interpreted: Import) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [-1e30, -1e30, -1e30], [torch.nan] * 3])
    weights, ids = interpreted("experts").route_experts(logits, 2, True)
    torch.testing.assert_close(weights[:2], torch.tensor([[1.0, 0.0], [0.5, 0.5]]))
    assert ids[:2].tolist() == [[0, 2], [0, 1]]
    assert ((ids >= 0) & (ids < 3)).all()


def mixture(
    rows: int, count: int, top_k: int, hidden: int = 24, width: int = 40, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = torch.randn(rows, hidden)
    gate_up, down = torch.randn(count, 2 * width, hidden) / 4, torch.randn(count, hidden, width) / 4
    ids = (
        torch.stack([torch.randperm(count)[:top_k] for _ in range(rows)]).int() if rows else torch.empty(0, top_k).int()
    )
    return x.to(dtype), gate_up.to(dtype), down.to(dtype), torch.rand(rows, top_k).to(dtype), ids


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "count", "top_k"), [(1, 8, 2), (37, 5, 3), (0, 4, 2)])
def test_experts_equal_their_twin(interpreted: Import, rows: int, count: int, top_k: int, activation: str) -> None:
    operands = mixture(rows, count, top_k)
    expected = experts.experts(*operands, activation)
    out = interpreted("experts").experts(*operands, activation)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [3, 70, 300])  # one for each table entry of blocks
def test_experts_equal_their_twin_in_half_precision(interpreted: Import, rows: int) -> None:
    operands = mixture(rows, 2, 1, hidden=80, width=72, dtype=torch.float16)
    expected = experts.experts(*operands, "silu")
    out = interpreted("experts").experts(*operands, "silu")
    torch.testing.assert_close(out, expected, atol=0.01, rtol=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "count", "top_k"), [(1, 8, 2), (37, 5, 3)])
def test_experts_with_biases_equal_their_twin(
    interpreted: Import, rows: int, count: int, top_k: int, dtype: torch.dtype
) -> None:
    operands, error = mixture(rows, count, top_k, dtype=dtype), 1e-5 if dtype == torch.float32 else 0.01
    biases = torch.randn(count, 80), torch.randn(count, 24)
    expected = experts.experts(*operands, "clamped_swiglu", *biases)
    out = interpreted("experts").experts(*operands, "clamped_swiglu", *biases)
    torch.testing.assert_close(out, expected, atol=error, rtol=error)
    without = experts.experts(*operands, "clamped_swiglu", None, None)
    assert not torch.allclose(expected, without, atol=10 * error)


@pytest.mark.parametrize(("rows", "count", "top_k"), [(1, 8, 2), (37, 5, 3), (130, 3, 2)])
def test_experts_of_other_ranks_add_nothing(interpreted: Import, rows: int, count: int, top_k: int) -> None:
    """The results of two ranks, each with some of the experts, add up to the result of all experts."""
    x, gate_up, down, weights, ids = mixture(rows, count, top_k)
    whole = experts.experts(x, gate_up, down, weights, ids, "silu")
    first = count // 2
    for compute in (experts.experts, interpreted("experts").experts):
        ours = compute(x, gate_up[:first], down[:first], weights, ids.masked_fill(ids >= first, -1), "silu")
        theirs = compute(x, gate_up[first:], down[first:], weights, ids - first, "silu")
        torch.testing.assert_close(ours + theirs, whole, atol=1e-5, rtol=1e-5)


def test_rows_of_nan_do_not_reach_other_rows(interpreted: Import) -> None:
    operands = mixture(6, 3, 2)
    expected = interpreted("experts").experts(*operands, "silu")
    operands[0][4:] = torch.nan
    out = interpreted("experts").experts(*operands, "silu")
    assert torch.equal(out[:4], expected[:4])


@pytest.mark.parametrize(
    ("pairs", "count", "tile"), [(1, 8, 16), (7, 8, 16), (600, 5, 64), (40, 300, 16), (200, 257, 16)]
)
@pytest.mark.parametrize("skew", ["even", "one expert", "uneven"])
def test_pairs_are_sorted_stably_into_tiles(
    interpreted: Import, monkeypatch: pytest.MonkeyPatch, pairs: int, count: int, tile: int, skew: str
) -> None:
    # Few chunks, so that a program has more pairs than it compares at once.
    monkeypatch.setattr(interpreted("expert_sorting"), "_MAX_CHUNKS", 2)
    torch.manual_seed(0)
    drawn = {
        "even": torch.arange(pairs) % count,
        "one expert": torch.full((pairs,), count - 1),
        "uneven": (torch.rand(pairs) ** 3 * count).long(),
    }[skew]
    sorted_pairs, tile_experts, tile_rows = interpreted("expert_sorting").sort_pairs(drawn.int()[:, None], count, tile)
    found: list[int] = []
    for index, (expert, rows) in enumerate(zip(tile_experts.tolist(), tile_rows.tolist(), strict=True)):
        own = sorted_pairs[index * tile : index * tile + rows].tolist()
        assert all(drawn[pair] == expert for pair in own)
        found += own
    assert found == drawn.argsort(stable=True).tolist()


def test_the_tiles_of_a_chunk_are_mostly_full() -> None:
    """Of 128 experts, 8 for each token, chosen evenly; the means of rows are from 32 to 512."""
    kernels = importlib.import_module("fastgen.kernels.triton.experts")
    generator = torch.Generator().manual_seed(0)
    filled = {}
    for tokens in (512, 1024, 2048, 4096, 8192):
        rows = torch.rand(tokens, 128, generator=generator).topk(8).indices.flatten().bincount(minlength=128)
        gate_up, down = kernels._products(tokens * 8, 128, torch.bfloat16)
        assert gate_up.tile == down.tile
        computed = (rows + gate_up.tile - 1) // gate_up.tile * gate_up.tile
        filled[tokens] = gate_up.tile, round(tokens * 8 / int(computed.sum()), 2)
    assert {tokens: tile for tokens, (tile, _) in filled.items()} == {512: 64, 1024: 64, 2048: 64, 4096: 128, 8192: 128}
    assert filled[2048][1] >= 0.78, "tiles of 128 rows would be filled to 0.69"
    assert all(share >= 0.5 for _, share in filled.values())


def test_tiles_suffice_for_the_worst_routing_and_are_not_more(interpreted: Import) -> None:
    max_tiles = interpreted("expert_sorting").max_tiles

    def worst(pairs: int, count: int, tile: int) -> int:
        """Return the most tiles of any routing, by dynamic programming over experts."""
        most = [-(-n // tile) for n in range(pairs + 1)]
        for _ in range(count - 1):
            most = [max(-(-n // tile) + most[total - n] for n in range(total + 1)) for total in range(pairs + 1)]
        return most[pairs]

    for pairs in (1, 3, 8, 20, 33):
        for count in (1, 4, 9):
            for tile in (2, 16):
                assert max_tiles(pairs, count, tile) == worst(pairs, count, tile)


def test_twins_equal_the_models_loop_over_experts() -> None:
    x, gate_up, down, _, _ = mixture(9, 6, 2)
    router = torch.randn(6, 24)

    def activate(values: torch.Tensor) -> torch.Tensor:
        gate, up = values.chunk(2, -1)
        return F.silu(gate) * up

    def linear(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda values: F.linear(values, weight)

    mlps = [SimpleNamespace(gate_up=linear(g), down=linear(d)) for g, d in zip(gate_up, down, strict=True)]
    for normalised in (False, True):
        shape = Experts(count=6, top_k=2, intermediate_size=down.shape[2], normalised=normalised)
        layer = Mixture(shape, linear(router), None, range(6), mlps, None)
        expected = moe.mixture_of_experts(layer, x, activate)
        out = experts.experts(x, gate_up, down, *experts.route_experts(x @ router.T, 2, normalised), "silu")
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_unsupported_numbers_and_activations_are_rejected() -> None:
    for count, top_k in ((4, 5), (4, 0), (32, 17), (513, 2)):
        with pytest.raises(ValueError, match="1 to 16 of at most 512"):
            experts.route_experts(torch.zeros(1, count), top_k, True)
    with pytest.raises(ValueError, match="relu"):
        experts.experts(*mixture(1, 2, 1), "relu")
    with pytest.raises(ValueError, match="must be given together"):
        experts.experts(*mixture(1, 2, 1), "silu", torch.zeros(2, 80), None)


def test_bytes_count_each_busy_expert_once() -> None:
    assert route_experts_bytes(3, 8, 2, 4) == 3 * (8 * 4 + 2 * 8)
    assert experts_bytes(3, 2, 5, 16, 32, 2) == 5 * 3 * 16 * 32 * 2 + 3 * (2 * 16 * 2 + 2 * 6)

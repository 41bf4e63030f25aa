"""Triton kernels of mixtures of experts: routing, and products grouped by expert (`expert_sorting`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from fastgen.kernels.gpu.elementwise import ACTIVATIONS
from fastgen.kernels.gpu.experts import MAX_EXPERTS, MAX_TOP_K, check_experts, check_routing
from fastgen.kernels.triton.elementwise import activate, factor
from fastgen.kernels.triton.expert_sorting import PADDED_EXPERTS, TILES, padded_experts, sort_pairs
from fastgen.kernels.triton.variant import Variant

_SUM_BLOCK, _SUM_WARPS = 1024, 4
_ROUTE_WARPS = 2
_GROUP = 8  # tiles whose programs run beside each other and share weights in the L2 cache


@dataclass(frozen=True, slots=True)
class _Product:
    """Blocks of one grouped product: `tile` rows by `columns` of the output, `depth` of the sum at a time."""

    tile: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int

    def constants(self) -> dict[str, Any]:
        return {"TILE": self.tile, "BLOCK_N": self.columns, "BLOCK_K": self.depth, "GROUP": _GROUP}


# Products of gate and up, and of down, by the largest mean number of rows of an expert. The last tile of an expert is
# half empty on average, and takes as long as a full one: with a mean of 128 rows, tiles of 64 rows are filled to 81 %,
# and tiles of 128 to 69 %. With more rows, large tiles read weights less often and keep the tensor cores busier.
_HALF_PRODUCTS = {
    16: (_Product(16, 32, 128, 4, 4), _Product(16, 64, 128, 4, 4)),
    128: (_Product(64, 64, 64, 4, 3), _Product(64, 128, 64, 4, 3)),
    None: (_Product(128, 64, 64, 8, 3), _Product(128, 128, 64, 8, 3)),
}
# In float32, products run without tensor cores, to keep all bits.
_FLOAT_PRODUCTS = {
    16: (_Product(16, 32, 32, 4, 2), _Product(16, 32, 32, 4, 2)),
    None: (_Product(32, 32, 32, 4, 2), _Product(32, 32, 32, 4, 2)),
}
assert {product.tile for table in (_HALF_PRODUCTS, _FLOAT_PRODUCTS) for product, _ in table.values()} == set(TILES)


def route_experts(router_logits: torch.Tensor, top_k: int, normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch `_route_experts`; see `fastgen.kernels.gpu.experts.route_experts`."""
    rows, num_experts = router_logits.shape
    check_routing(num_experts, top_k)
    weights = router_logits.new_empty(rows, top_k)
    expert_ids = torch.empty(rows, top_k, dtype=torch.int32, device=router_logits.device)
    if rows:
        constants = _route_constants(num_experts)
        _route_experts[(triton.cdiv(rows, constants["ROWS"]),)](
            router_logits, weights, expert_ids, rows, num_experts, top_k,
            IS_NORMALISED=normalised, **constants, num_warps=_ROUTE_WARPS,
        )  # fmt: skip
    return weights, expert_ids


def experts(
    x: torch.Tensor,
    gate_up_weights: torch.Tensor,
    down_weights: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
    activation: str,
    gate_up_biases: torch.Tensor | None = None,
    down_biases: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the five kernels of a mixture; see `fastgen.kernels.gpu.experts.experts`."""
    check_experts(activation, gate_up_biases, down_biases)
    (rows, hidden), top_k = x.shape, expert_ids.shape[1]
    num_experts, width = len(gate_up_weights), gate_up_weights.shape[1] // 2
    pairs = rows * top_k
    out = torch.empty_like(x)
    if not rows:
        return out
    gate_up, down = _products(pairs, num_experts, x.dtype)
    sorted_pairs, tile_experts, tile_rows = sort_pairs(expert_ids, num_experts, gate_up.tile)
    num_tiles = len(tile_rows)
    activations = x.new_empty(pairs, width)
    _gate_up[(num_tiles * triton.cdiv(width, gate_up.columns),)](
        x, gate_up_weights, gate_up_biases, sorted_pairs, tile_experts, tile_rows, activations, num_tiles, top_k,
        hidden, width,
        ACTIVATION=activation, **gate_up.constants(), num_warps=gate_up.num_warps, num_stages=gate_up.num_stages,
    )  # fmt: skip
    shares = x.new_empty(pairs, hidden)
    _down[(num_tiles * triton.cdiv(hidden, down.columns),)](
        activations, down_weights, down_biases, weights, sorted_pairs, tile_experts, tile_rows, shares, num_tiles,
        hidden, width,
        **down.constants(), num_warps=down.num_warps, num_stages=down.num_stages,
    )  # fmt: skip
    _sum_shares[(rows, triton.cdiv(hidden, _SUM_BLOCK))](
        shares, expert_ids, out, top_k, hidden, BLOCK=_SUM_BLOCK, num_warps=_SUM_WARPS
    )
    return out


def _products(pairs: int, num_experts: int, dtype: torch.dtype) -> tuple[_Product, _Product]:
    """Return the blocks of both products, chosen by the mean number of rows of an expert."""
    table = _FLOAT_PRODUCTS if dtype == torch.float32 else _HALF_PRODUCTS
    mean = triton.cdiv(pairs, num_experts)
    return next(products for bound, products in table.items() if bound is None or mean <= bound)


def _route_constants(num_experts: int) -> dict[str, Any]:
    padded = padded_experts(num_experts)
    return {"EXPERTS": padded, "ROWS": max(1, 512 // padded), "CHOICES": MAX_TOP_K}


@triton.jit(do_not_specialize=["rows", "num_experts", "top_k"])
def _route_experts(
    router_logits, weights, expert_ids, rows, num_experts, top_k,
    IS_NORMALISED: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, CHOICES: tl.constexpr,
):  # fmt: skip
    """Choose and weight the experts of ROWS rows; of equal logits, the lower index is chosen first."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    expert = tl.arange(0, EXPERTS)[None, :]
    inside = (row < rows) & (expert < num_experts)
    logits = tl.load(router_logits + row * num_experts + expert, mask=inside, other=float("-inf"))
    left = logits.to(tl.float32)
    largest = tl.max(left, 1)[:, None]
    total = tl.sum(tl.exp(left - largest), 1)[:, None]
    choice = tl.arange(0, CHOICES)[None, :]
    chosen = tl.zeros((ROWS, CHOICES), tl.int32)
    found = tl.full((ROWS, CHOICES), float("-inf"), tl.float32)
    for rank in range(top_k):
        # NaN, which padded rows may hold, must not lead beyond the experts.
        best = tl.minimum(tl.argmax(left, 1), num_experts - 1)[:, None]
        found = tl.where(choice == rank, tl.max(left, 1)[:, None], found)
        chosen = tl.where(choice == rank, best, chosen)
        left = tl.where(expert == best, float("-inf"), left)
    probabilities = tl.exp(found - largest) / total
    if IS_NORMALISED:
        probabilities = probabilities / tl.sum(probabilities, 1)[:, None]
    written = (row < rows) & (choice < top_k)
    tl.store(weights + row * top_k + choice, probabilities.to(logits.dtype), mask=written)
    tl.store(expert_ids + row * top_k + choice, chosen, mask=written)


@triton.jit
def _tile_and_block(num_tiles, num_blocks, GROUP: tl.constexpr):
    """Return the program's tile and block of columns; GROUP tiles share a block of weights before the next block."""
    program = tl.program_id(0)
    first = program // (GROUP * num_blocks) * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    within = program % (GROUP * num_blocks)
    return first + within % size, within // size


@triton.jit(do_not_specialize=["num_tiles", "top_k"])
def _gate_up(
    x, weights, biases, sorted_pairs, tile_experts, tile_rows, activations, num_tiles, top_k, hidden, width,
    ACTIVATION: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute activation(gate) * up of BLOCK_N columns for the rows of one tile."""
    tile, block = _tile_and_block(num_tiles, tl.cdiv(width, BLOCK_N), GROUP)
    rows = tl.load(tile_rows + tile)
    if rows == 0:
        return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    exists = (tl.arange(0, TILE) < rows)[:, None]
    pairs = tl.load(sorted_pairs + tile * TILE + tl.arange(0, TILE)[:, None], mask=exists, other=0)
    columns = (block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    depth = tl.arange(0, BLOCK_K)
    inputs = x + (pairs // top_k).to(tl.int64) * hidden + depth[None, :]
    gates = weights + expert * 2 * width * hidden + columns * hidden + depth[:, None]
    ups = gates + width * hidden
    gate = tl.zeros((TILE, BLOCK_N), tl.float32)
    up = tl.zeros((TILE, BLOCK_N), tl.float32)
    for start in range(0, hidden, BLOCK_K):
        is_weight = (columns < width) & (depth < hidden - start)[:, None]
        a = tl.load(inputs + start, mask=exists & (depth < hidden - start)[None, :], other=0.0)
        gate = tl.dot(a, tl.load(gates + start, mask=is_weight, other=0.0), gate, input_precision="ieee")
        up = tl.dot(a, tl.load(ups + start, mask=is_weight, other=0.0), up, input_precision="ieee")
    dtype = activations.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if biases is not None:
        own_biases = biases + expert * 2 * width + columns
        gate = (gate + tl.load(own_biases, mask=columns < width, other=0.0)).to(dtype).to(tl.float32)
        up = (up + tl.load(own_biases + width, mask=columns < width, other=0.0)).to(dtype).to(tl.float32)
    activated = activate(gate, ACTIVATION).to(dtype).to(tl.float32)
    product = activated * factor(up, ACTIVATION)
    tl.store(activations + pairs.to(tl.int64) * width + columns, product.to(dtype), mask=exists & (columns < width))


@triton.jit(do_not_specialize=["num_tiles"])
def _down(
    activations, weights, biases, pair_weights, sorted_pairs, tile_experts, tile_rows, shares, num_tiles, hidden, width,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_N columns of the experts' outputs, times the router's weights, for the rows of one tile."""
    tile, block = _tile_and_block(num_tiles, tl.cdiv(hidden, BLOCK_N), GROUP)
    rows = tl.load(tile_rows + tile)
    if rows == 0:
        return
    expert = tl.load(tile_experts + tile).to(tl.int64)
    exists = (tl.arange(0, TILE) < rows)[:, None]
    pairs = tl.load(sorted_pairs + tile * TILE + tl.arange(0, TILE)[:, None], mask=exists, other=0)
    columns = (block * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
    depth = tl.arange(0, BLOCK_K)
    inputs = activations + pairs.to(tl.int64) * width + depth[None, :]
    downs = weights + expert * hidden * width + columns * width + depth[:, None]
    total = tl.zeros((TILE, BLOCK_N), tl.float32)
    for start in range(0, width, BLOCK_K):
        a = tl.load(inputs + start, mask=exists & (depth < width - start)[None, :], other=0.0)
        b = tl.load(downs + start, mask=(columns < hidden) & (depth < width - start)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    dtype = shares.dtype.element_ty
    weight = tl.load(pair_weights + pairs, mask=exists, other=0.0).to(tl.float32)
    total = total.to(dtype).to(tl.float32)
    if biases is not None:
        own_biases = tl.load(biases + expert * hidden + columns, mask=columns < hidden, other=0.0)
        total = (total + own_biases).to(dtype).to(tl.float32)
    share = (total * weight).to(dtype)
    tl.store(shares + pairs.to(tl.int64) * hidden + columns, share, mask=exists & (columns < hidden))


@triton.jit(do_not_specialize=["top_k"])
def _sum_shares(shares, expert_ids, out, top_k, hidden, BLOCK: tl.constexpr):
    """Add the shares of one row's experts in float32, in the order of their choice; those of negative ids are unset."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in range(top_k):
        is_added = inside & (tl.load(expert_ids + row * top_k + rank) >= 0)
        total += tl.load(shares + (row * top_k + rank) * hidden + columns, mask=is_added, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + columns, total.to(out.dtype.element_ty), mask=inside)


def _route_variants() -> Iterator[Variant]:
    cases = [(number, "bf16") for number in PADDED_EXPERTS] + [(MAX_EXPERTS, "fp16"), (MAX_EXPERTS, "fp32")]
    for number, dtype in cases:
        signature = dict.fromkeys(("router_logits", "weights"), f"*{dtype}:16") | {"expert_ids": "*i32:16"}
        signature |= dict.fromkeys(("rows", "num_experts", "top_k"), "i32")
        for normalised in (False, True):
            name = f"{dtype}_{number}_experts" + "_normalised" * normalised
            constants = _route_constants(number) | {"IS_NORMALISED": normalised}
            yield Variant(name, _route_experts, signature, constants, _ROUTE_WARPS)


def _product_variants() -> Iterator[Variant]:
    for dtype, table in (("bf16", _HALF_PRODUCTS), ("fp16", _HALF_PRODUCTS), ("fp32", _FLOAT_PRODUCTS)):
        matrix = f"*{dtype}:16"
        tiles = dict.fromkeys(("sorted_pairs", "tile_experts", "tile_rows"), "*i32:16")
        tiles |= {"num_tiles": "i32", "hidden": "i32:16", "width": "i32:16"}
        for gate_up, down in table.values():
            signature = dict.fromkeys(("x", "weights", "activations"), matrix) | tiles | {"top_k": "i32"}
            for activation in ACTIVATIONS:
                types, constants = _with_biases(activation == "clamped_swiglu", signature, gate_up.constants())
                name, constants = f"{dtype}_tile_{gate_up.tile}_{activation}", constants | {"ACTIVATION": activation}
                yield Variant(name, _gate_up, types, constants, gate_up.num_warps, gate_up.num_stages)
            signature = dict.fromkeys(("activations", "weights", "pair_weights", "shares"), matrix) | tiles
            for biased in (False, True):
                types, constants = _with_biases(biased, signature, down.constants())
                name = f"{dtype}_tile_{down.tile}" + "_biased" * biased
                yield Variant(name, _down, types, constants, down.num_warps, down.num_stages)
        signature = {"shares": matrix, "expert_ids": "*i32:16", "out": matrix, "top_k": "i32", "hidden": "i32:16"}
        yield Variant(dtype, _sum_shares, signature, {"BLOCK": _SUM_BLOCK}, _SUM_WARPS)


def _with_biases(
    biased: bool, signature: dict[str, str], constants: dict[str, Any]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return types and constants with biases, which only gpt-oss's experts have, or without."""
    return (signature | {"biases": "*fp32:16"}, constants) if biased else (signature, constants | {"biases": None})


VARIANTS = (*_route_variants(), *_product_variants())

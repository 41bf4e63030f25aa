"""Triton kernels of `fastgen.kernels.gpu.sampling.tokens`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from fastgen.kernels.gpu.sampling.columns import Column
from fastgen.kernels.gpu.sampling.logits import CHUNK, GROUP
from fastgen.kernels.gpu.sampling.top_k_top_p import TOP
from fastgen.kernels.triton.sampling.logits import constants, load_float
from fastgen.kernels.triton.sampling.rng import first_beyond, uniform_number
from fastgen.kernels.triton.sampling.top_tokens import VOCABULARIES, padded_chunks, top_tokens
from fastgen.kernels.triton.variant import Variant

_TILE = 4096
_ROW_WARPS, _COMMIT_WARPS = 16, 4
_COMMIT_BLOCK = 128
_SIZES = {"CHUNK": CHUNK, "GROUP": GROUP, "TOP": TOP}

_COLUMNS = tl.constexpr(len(Column))
_TEMPERATURE, _TOP_P, _MIN_P, _TYPICAL_P = constants(Column.TEMPERATURE, Column.TOP_P, Column.MIN_P, Column.TYPICAL_P)
_SEED, _TOP_K = constants(Column.SEED, Column.TOP_K)
_PROMPT, _COUNT_ROW = constants(Column.NUM_PROMPT_TOKENS, Column.COUNT_ROW)
_RING, _RING_LENGTH = constants(Column.RING, Column.RING_LENGTH)


def sample_tokens(
    logits: torch.Tensor,
    scores: torch.Tensor,
    is_changed: torch.Tensor,
    chunk_max: torch.Tensor,
    chunk_sum: torch.Tensor,
    group_max: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: torch.Tensor,
) -> torch.Tensor:
    """Launch `_draw` and `_draw_from_many`; see `fastgen.kernels.gpu.sampling.tokens.sample_tokens`."""
    num_rows, vocabulary = scores.shape
    tokens = slots.new_empty(num_rows)
    if num_rows:
        chunks = padded_chunks(vocabulary)
        groups = slots.new_empty(num_rows, TOP)
        keys = slots.new_empty(num_rows, TOP, dtype=torch.int64)
        _draw[(num_rows,)](
            logits, scores, is_changed, chunk_max, chunk_sum, group_max, slots, positions, columns,
            tokens, groups, keys, vocabulary, chunk_max.shape[1], logits.stride(0),
            **_SIZES, CHUNKS=chunks, num_warps=_draw_warps(chunks),
        )  # fmt: skip
        _draw_from_many[(num_rows,)](
            logits, scores, is_changed, chunk_max, slots, positions, columns, tokens,
            vocabulary, chunk_max.shape[1], logits.stride(0),
            CHUNKS=chunks, TILE=_TILE, num_warps=_ROW_WARPS,
        )  # fmt: skip
    return tokens


def commit_tokens(
    tokens: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    last_tokens: torch.Tensor,
) -> None:
    """Launch `_commit_tokens`; see `fastgen.kernels.gpu.sampling.tokens.commit_tokens`."""
    if len(tokens):
        _commit_tokens[(triton.cdiv(len(tokens), _COMMIT_BLOCK),)](
            tokens, slots, positions, columns, lists, counts, last_tokens, len(tokens), counts.stride(0),
            BLOCK=_COMMIT_BLOCK, num_warps=_COMMIT_WARPS,
        )  # fmt: skip


def _draw_warps(chunks: int) -> int:
    """Return the warps of `_draw`: fewer leave more registers to each of their threads."""
    return _ROW_WARPS if chunks <= 64 else 8


@triton.jit
def _draw(
    logits, scores, is_changed, chunk_max, chunk_sum, group_max, slots, positions, columns, tokens, groups, keys,
    vocabulary, num_chunks, logits_stride,
    CHUNK: tl.constexpr, GROUP: tl.constexpr, TOP: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Choose the token of one row: greedily, without filters, or from its top tokens; -1 if these do not suffice."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        tl.store(tokens + row, 0)
        return
    column = columns + slot * _COLUMNS
    scores = _scores_of(row, logits, logits_stride, scores, vocabulary, is_changed)
    chunk = tl.arange(0, CHUNKS)
    maxima = tl.load(chunk_max + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    top = tl.max(maxima)
    temperature = load_float(column, _TEMPERATURE)
    if temperature == 0:
        first = tl.min(tl.where(maxima == top, chunk, CHUNKS)) * CHUNK
        token = first + tl.arange(0, CHUNK)
        score = tl.load(scores + token, mask=token < vocabulary, other=float("-inf"))
        tl.store(tokens + row, tl.minimum(tl.min(tl.where(score == top, token, vocabulary)), vocabulary - 1))
        return
    sums = tl.load(chunk_sum + row * num_chunks + chunk, mask=chunk < num_chunks, other=0.0)
    sums *= tl.where(sums > 0, tl.exp((maxima.to(tl.float64) - top) / temperature), 0.0)
    total = tl.sum(sums)
    top_k = tl.load(column + _TOP_K)
    is_bounded = (top_k > 0) | (load_float(column, _TOP_P) < 1) | (load_float(column, _MIN_P) > 0)
    if (load_float(column, _TYPICAL_P) < 1) | (is_bounded & (tl.minimum(top_k, vocabulary) > TOP)):
        chosen = tl.full([], -1, tl.int32)
    elif is_bounded:
        token = top_tokens(
            scores, vocabulary, group_max + row * num_chunks * (CHUNK // GROUP), num_chunks * (CHUNK // GROUP),
            groups + row * TOP, keys + row * TOP, TOP, GROUP, CHUNKS * (CHUNK // GROUP),
        )  # fmt: skip
        # The parameters are loaded here: while the top tokens are found, registers are scarce.
        uniform = uniform_number(tl.load(column + _SEED), tl.load(positions + row).to(tl.int64))
        score = tl.load(scores + token, mask=token < vocabulary, other=float("-inf"))
        weights = tl.exp((score.to(tl.float64) - top) / load_float(column, _TEMPERATURE))
        chosen = _draw_from_top(
            token, weights, total, uniform,
            tl.load(column + _TOP_K), load_float(column, _TOP_P), load_float(column, _MIN_P), vocabulary, TOP,
        )  # fmt: skip
    else:
        uniform = uniform_number(tl.load(column + _SEED), tl.load(positions + row).to(tl.int64))
        chosen = _draw_from_all(scores, sums, uniform * total, top, temperature, vocabulary, CHUNK, CHUNKS)
    tl.store(tokens + row, tl.minimum(chosen, vocabulary - 1))


@triton.jit
def _scores_of(row, logits, logits_stride, scores, vocabulary, is_changed):
    """Return a pointer to the scores of a row: its logits if it is not changed."""
    return tl.where(tl.load(is_changed + row) != 0, scores + row * vocabulary, logits + row * logits_stride)


@triton.jit
def _draw_from_top(token, weights, total, uniform, top_k, top_p, min_p, vocabulary, TOP: tl.constexpr):
    """Draw from the top tokens [TOP], given their `weights` and the `total` of all; -1 if the filters keep more."""
    order = tl.arange(0, TOP)
    is_within = (top_k == 0) | (order < top_k)
    weights = tl.where(is_within, weights, 0.0)
    mass = tl.where(top_k == 0, total, tl.sum(weights))
    before = tl.cumsum(weights) - weights
    wanted = tl.where(top_p >= 1, float("inf"), top_p * mass)
    is_kept = (is_within & (before < wanted) & (weights >= min_p) & (weights > 0)) | (order == 0)
    weights = tl.where(is_kept, weights, 0.0)
    chosen = tl.sum(tl.where(order == first_beyond(weights, uniform * tl.sum(weights), TOP), token, 0))
    is_cut = (tl.sum(is_kept.to(tl.int32)) == TOP) & (vocabulary > TOP)
    return tl.where(is_cut, -1, chosen)


@triton.jit
def _draw_from_all(scores, sums, wanted, top, temperature, vocabulary, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """Return the token at which the cumulative sum of all weights exceeds `wanted`, given the `sums` of the chunks."""
    chunk = first_beyond(sums, wanted, CHUNKS)
    before = tl.sum(tl.where(tl.arange(0, CHUNKS) < chunk, sums, 0.0))
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    score = tl.load(scores + token, mask=token < vocabulary, other=float("-inf"))
    weights = tl.exp((score - top) / temperature.to(tl.float32)).to(tl.float64)
    return chunk * CHUNK + first_beyond(weights, wanted - before, CHUNK)


@triton.jit
def _draw_from_many(
    logits, scores, is_changed, chunk_max, slots, positions, columns, tokens, vocabulary, num_chunks, logits_stride,
    CHUNKS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Choose the token of one row for which `_draw` found none, because filters keep many or scattered tokens."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(tokens + row) >= 0:
        return
    column = columns + tl.load(slots + row).to(tl.int64) * _COLUMNS
    unscaled = _scores_of(row, logits, logits_stride, scores, vocabulary, is_changed)
    scores += row * vocabulary
    chunk = tl.arange(0, CHUNKS)
    maxima = tl.load(chunk_max + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    top = tl.max(maxima)
    temperature = tl.full([TILE], 0.0, tl.float32) + load_float(column, _TEMPERATURE).to(tl.float32)
    for first in range(0, vocabulary, TILE):
        token = first + tl.arange(0, TILE)
        score = tl.load(unscaled + token, mask=token < vocabulary, other=0.0)
        tl.store(scores + token, tl.div_rn(score - top, temperature), mask=token < vocabulary)
    tl.debug_barrier()

    # Top-k, top-p and min-p keep the weights from `least`, typical-p those with a closeness from `closest`.
    least = tl.full([], 0.0, tl.float32)
    top_k = tl.load(column + _TOP_K)
    if top_k > 0:
        least = _threshold(scores, vocabulary, top_k.to(tl.float64), least, None, "count", TILE)
    top_p = load_float(column, _TOP_P)
    if top_p < 1:
        all_weights, _ = _totals(scores, vocabulary, least, None, None, TILE)
        wanted = top_p.to(tl.float32).to(tl.float64) * all_weights
        least = tl.maximum(least, _threshold(scores, vocabulary, wanted, least, None, "weight", TILE))
    least = tl.maximum(least, load_float(column, _MIN_P).to(tl.float32))
    total, moment = _totals(scores, vocabulary, least, None, None, TILE)
    mean = moment / total
    closest = tl.full([], 0.0, tl.float32)
    typical_p = load_float(column, _TYPICAL_P)
    if typical_p < 1:
        # A surprisal is log(total) - score, so it is as far from the expected one as the score is from its mean.
        typical = typical_p.to(tl.float32).to(tl.float64) * total
        closest = _threshold(scores, vocabulary, typical, least, mean, "closeness", TILE)
        total, moment = _totals(scores, vocabulary, least, mean, closest, TILE)

    share = uniform_number(tl.load(column + _SEED), tl.load(positions + row).to(tl.int64)) * total
    before = tl.full([], 0.0, tl.float64)
    found = -1
    last = 0
    start = 0
    while (found < 0) & (start < vocabulary):
        _score, kept = _kept(scores, start, vocabulary, least, mean, closest, TILE)
        weights = kept.to(tl.float64)
        in_tile = tl.sum(weights)
        if in_tile > 0:
            last = start + first_beyond(weights, share - before, TILE)
            found = tl.where(before + in_tile > share, last, found)
        before += in_tile
        start += TILE
    tl.store(tokens + row, tl.where(found < 0, last, found))


@triton.jit
def _kept(scores, first, vocabulary, least, mean, closest, TILE: tl.constexpr):
    """Return scores and weights [TILE] float32 of the tokens from `first`; weight 0 if they are not kept."""
    token = first + tl.arange(0, TILE)
    score = tl.load(scores + token, mask=token < vocabulary, other=float("-inf"))
    weight = tl.exp(score)
    weight = tl.where(weight >= least, weight, 0.0)
    if closest is not None:
        weight = tl.where(_closeness(score, mean) >= closest, weight, 0.0)
    return score, weight


@triton.jit
def _closeness(score, mean):
    """Return 1 / (1 + |score - mean|) in float32; the difference is computed in float64."""
    distance = tl.abs(score.to(tl.float64) - mean).to(tl.float32)
    return tl.div_rn(tl.full(score.shape, 1.0, tl.float32), 1.0 + distance)


@triton.jit
def _totals(scores, vocabulary, least, mean, closest, TILE: tl.constexpr):
    """Return the sums of kept weights, and of kept weights times scores, in float64."""
    total = tl.zeros([TILE], tl.float64)
    moment = tl.zeros([TILE], tl.float64)
    for first in range(0, vocabulary, TILE):
        score, weight = _kept(scores, first, vocabulary, least, mean, closest, TILE)
        total += weight.to(tl.float64)
        moment += tl.where(weight > 0, weight.to(tl.float64) * score.to(tl.float64), 0.0)
    return tl.sum(total), tl.sum(moment)


@triton.jit
def _threshold(scores, vocabulary, wanted, least, mean, KEY: tl.constexpr, TILE: tl.constexpr):
    """Return the largest key such that the mass of the kept tokens with keys >= it is at least `wanted`, else 0.

    The key is the weight, or the closeness to `mean` if KEY is "closeness"; the mass is the weight, or 1 if KEY is
    "count". Keys are from 0 to 1, where float32 order as their bits do. The bisection ends when no key is left between
    its bounds.
    """
    wanted = tl.maximum(wanted, 1e-30)
    low = tl.full([], 0, tl.int32)
    high = tl.full([], 0x3F800001, tl.int32)  # just above 1
    while high - low > 1:
        middle = (low + high) // 2
        mass = tl.zeros([TILE], tl.float64)
        next_above = tl.full([TILE], 0x3F800000, tl.int32)
        next_below = tl.full([TILE], 0, tl.int32)
        for first in range(0, vocabulary, TILE):
            score, weight = _kept(scores, first, vocabulary, least, None, None, TILE)
            key = (_closeness(score, mean) if KEY == "closeness" else weight).to(tl.int32, bitcast=True)
            is_above = (key >= middle) & (weight > 0)
            mass += tl.where(is_above, 1.0 if KEY == "count" else weight, 0.0).to(tl.float64)
            next_above = tl.where(is_above, tl.minimum(next_above, key), next_above)
            next_below = tl.where((weight > 0) & (key < middle), tl.maximum(next_below, key), next_below)
        if tl.sum(mass) >= wanted:
            low = tl.min(next_above)
        else:
            high = tl.max(next_below) + 1
    return low.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_rows"])
def _commit_tokens(
    tokens, slots, positions, columns, lists, counts, last_tokens, num_rows, vocabulary, BLOCK: tl.constexpr
):
    """Record the tokens of BLOCK rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < num_rows, other=-1).to(tl.int64)
    is_used = slot >= 0
    token = tl.load(tokens + row, mask=is_used, other=0)
    tl.store(last_tokens + slot, token, mask=is_used)
    column = columns + slot * _COLUMNS
    count_row = tl.load(column + _COUNT_ROW, mask=is_used, other=-1)
    count = counts + count_row * vocabulary + token
    tl.store(count, tl.load(count, mask=count_row >= 0, other=0) + 2, mask=count_row >= 0)
    ring_length = tl.load(column + _RING_LENGTH, mask=is_used, other=0)
    ring = lists + tl.load(column + _RING, mask=is_used, other=0)
    num_generated = tl.load(positions + row, mask=is_used, other=0) - tl.load(column + _PROMPT, mask=is_used, other=0)
    place = num_generated % tl.maximum(ring_length, 1)
    tl.store(ring + place, token, mask=ring_length > 0)


def _variants() -> Iterator[Variant]:
    """Yield `_commit_tokens`, and the others for vocabularies of up to 32k, 64k, 128k, 256k and 512k tokens."""
    rows = dict.fromkeys(("slots", "positions", "tokens"), "*i32:16") | {"columns": "*i64:16", "vocabulary": "i32:16"}
    state = dict.fromkeys(("lists", "counts", "last_tokens"), "*i32:16") | {"num_rows": "i32"}
    yield Variant("", _commit_tokens, rows | state, {"BLOCK": _COMMIT_BLOCK}, _COMMIT_WARPS)
    scores = rows | dict.fromkeys(("logits", "scores", "chunk_max"), "*fp32:16") | {"num_chunks": "i32"}
    scores |= {"is_changed": "*i32:16", "logits_stride": "i32:16"}
    sums = {"chunk_sum": "*fp64:16", "group_max": "*fp32:16", "groups": "*i32:16", "keys": "*i64:16"}
    for vocabulary in VOCABULARIES:
        name, chunks = f"v{vocabulary}", padded_chunks(vocabulary)
        yield Variant(name, _draw, scores | sums, _SIZES | {"CHUNKS": chunks}, _draw_warps(chunks))
        yield Variant(name, _draw_from_many, scores, {"CHUNKS": chunks, "TILE": _TILE}, _ROW_WARPS)


VARIANTS = tuple(_variants())

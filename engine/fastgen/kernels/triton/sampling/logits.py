"""Triton kernels of `fastgen.kernels.gpu.sampling.logits`."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from fastgen.kernels.gpu.sampling.columns import Column
from fastgen.kernels.gpu.sampling.logits import CHUNK, GROUP
from fastgen.kernels.triton.variant import Variant

_TILE = 4096
_WARPS = 8
_SIZES: dict[str, int | None] = {"CHUNK": CHUNK, "GROUP": GROUP}


def constants(*columns: Column) -> Iterator[tl.constexpr]:
    """Return the columns as constants of kernels."""
    return (tl.constexpr(int(column)) for column in columns)


_COLUMNS = tl.constexpr(len(Column))
_REPETITION, _PRESENCE, _FREQUENCY = constants(
    Column.REPETITION_PENALTY, Column.PRESENCE_PENALTY, Column.FREQUENCY_PENALTY
)
_TEMPERATURE, _PROMPT, _MIN_TOKENS, _COUNT_ROW = constants(
    Column.TEMPERATURE, Column.NUM_PROMPT_TOKENS, Column.MIN_TOKENS, Column.COUNT_ROW
)
_BIASES, _NUM_BIASES, _BANS, _NUM_BANS = constants(Column.BIASES, Column.NUM_BIASES, Column.BANS, Column.NUM_BANS)
_RING, _RING_LENGTH = constants(Column.RING, Column.RING_LENGTH)


def process_logits(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    columns: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor,
    masks: torch.Tensor | None = None,
    mask_rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch `_find_changes` and `_process_logits`; see `fastgen.kernels.gpu.sampling.logits.process_logits`."""
    num_rows, vocabulary = logits.shape
    num_chunks = triton.cdiv(vocabulary, CHUNK)
    scores = logits.new_empty(num_rows, vocabulary, dtype=torch.float32)
    is_changed = slots.new_empty(num_rows)
    chunk_max = logits.new_empty(num_rows, num_chunks, dtype=torch.float32)
    chunk_sum = logits.new_empty(num_rows, num_chunks, dtype=torch.float64)
    group_max = logits.new_empty(num_rows, num_chunks * (CHUNK // GROUP), dtype=torch.float32)
    if num_rows:
        mask_width = 0 if masks is None else masks.stride(0)
        _find_changes[(num_rows,)](
            logits, slots, positions, columns, lists, masks, mask_rows, is_changed,
            vocabulary, logits.stride(0), mask_width,
            TILE=_TILE, num_warps=_WARPS,
        )  # fmt: skip
        # Without fused multiply-add, scores are the same bits as on a CPU.
        _process_logits[(num_rows, num_chunks)](
            logits, slots, columns, lists, counts, masks, mask_rows,
            scores, is_changed, chunk_max, chunk_sum, group_max,
            vocabulary, num_chunks, logits.stride(0), mask_width,
            **_SIZES, num_warps=_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return scores, is_changed, chunk_max, chunk_sum, group_max


@triton.jit
def load_float(column, index: tl.constexpr):
    """Load a float64 parameter of a slot."""
    return tl.load(column + index).to(tl.float64, bitcast=True)


@triton.jit
def _first_from(tokens, count, least):
    """Return the index of the first of `count` ascending tokens that is at least `least`."""
    low = count * 0
    high = count
    while low < high:
        middle = (low + high) // 2
        is_below = tl.load(tokens + middle) < least
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
    return low


@triton.jit
def _find_changes(
    logits, slots, positions, columns, lists, masks, mask_rows, is_changed, vocabulary, logits_stride, mask_width,
    TILE: tl.constexpr,
):  # fmt: skip
    """Decide whether the scores of one row differ from its logits, and which tokens are banned.

    None is banned if that would leave no token.
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    column = columns + slot * _COLUMNS
    num_bans = tl.load(column + _NUM_BANS).to(tl.int32)
    has_changes = (num_bans > 0) | (tl.load(column + _NUM_BIASES) > 0) | (tl.load(column + _COUNT_ROW) >= 0)
    if masks is not None:
        has_changes |= tl.load(mask_rows + row) >= 0
    tl.store(is_changed + row, has_changes.to(tl.int32))
    if num_bans == 0:
        return
    bans = lists + tl.load(column + _BANS)
    ring = lists + tl.load(column + _RING)
    ring_length = tl.load(column + _RING_LENGTH)
    num_generated = tl.load(positions + row).to(tl.int64) - tl.load(column + _PROMPT)
    is_short = num_generated < tl.load(column + _MIN_TOKENS)
    for first in range(0, num_bans, TILE):
        ban = first + tl.arange(0, TILE)
        inside = ban < num_bans
        length = tl.load(bans + num_bans + ban, mask=inside, other=0)
        end = bans + tl.load(bans + 2 * num_bans + ban, mask=inside, other=0) + length
        is_banned = tl.where(length < 0, is_short, length <= num_generated).to(tl.int32)
        for back in range(1, tl.max(length) + 1):
            compared = inside & (back <= length) & (length <= num_generated)
            last = tl.load(ring + (num_generated - back) % ring_length, mask=back <= num_generated, other=-1)
            expected = tl.load(end - back, mask=compared, other=-1)
            is_banned = tl.where(compared & (expected != last), 0, is_banned)
        tl.store(bans + 3 * num_bans + ban, is_banned, mask=inside)
    tl.debug_barrier()
    start = 0
    is_left = 0
    while (is_left == 0) & (start < vocabulary):
        token = start + tl.arange(0, TILE)
        score = tl.load(logits + row * logits_stride + token, mask=token < vocabulary, other=float("-inf"))
        score = _masked(score.to(tl.float32), token, row, vocabulary, masks, mask_rows, mask_width)
        score = _without_bans(score, token, start, start + TILE, bans, num_bans)
        is_left = tl.max((score != float("-inf")).to(tl.int32))
        start += TILE
    if is_left == 0:
        for first in range(0, num_bans, TILE):
            ban = first + tl.arange(0, TILE)
            tl.store(bans + 3 * num_bans + ban, tl.zeros([TILE], tl.int32), mask=ban < num_bans)


@triton.jit
def _without_bans(score, token, first, end, bans, num_bans):
    """Return the `score` of each `token` with bans applied; the tokens are `first` to `end - 1`."""
    for ban in range(_first_from(bans, num_bans, first), _first_from(bans, num_bans, end)):
        is_banned = tl.load(bans + 3 * num_bans + ban) != 0
        score = tl.where((token == tl.load(bans + ban)) & is_banned, float("-inf"), score)
    return score


@triton.jit
def _masked(score, token, row, vocabulary, masks, mask_rows, mask_width):
    """Return the `score` of each `token` with the row's grammar mask applied, if it has one."""
    if masks is not None:
        mask_row = tl.load(mask_rows + row).to(tl.int64)
        if mask_row >= 0:
            words = tl.load(masks + mask_row * mask_width + token // 32, mask=token < vocabulary, other=0)
            score = tl.where(((words >> (token % 32)) & 1) != 0, score, float("-inf"))
    return score


@triton.jit
def _process_logits(
    logits, slots, columns, lists, counts, masks, mask_rows, scores, is_changed, chunk_max, chunk_sum, group_max,
    vocabulary, num_chunks, logits_stride, mask_width,
    CHUNK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute the scores of one chunk of one row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    if slot < 0:
        return
    GROUPS: tl.constexpr = CHUNK // GROUP
    column = columns + slot * _COLUMNS
    first = chunk * CHUNK
    token = first + tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = token < vocabulary
    score = tl.load(logits + row * logits_stride + token, mask=inside, other=float("-inf")).to(tl.float32)

    num_biases = tl.load(column + _NUM_BIASES).to(tl.int32)
    biases = lists + tl.load(column + _BIASES)
    for bias in range(_first_from(biases, num_biases, first), _first_from(biases, num_biases, first + CHUNK)):
        value = tl.load(biases + num_biases + bias).to(tl.float32, bitcast=True)
        score = tl.where(token == tl.load(biases + bias), score + value, score)

    count_row = tl.load(column + _COUNT_ROW)
    if count_row >= 0:
        count = tl.load(counts + count_row * vocabulary + token, mask=inside, other=0)
        repetition = load_float(column, _REPETITION).to(tl.float32)
        repeated = tl.where(score > 0, tl.div_rn(score, tl.broadcast_to(repetition, score.shape)), score * repetition)
        score = tl.where(count > 0, repeated, score)
        score -= load_float(column, _FREQUENCY).to(tl.float32) * (count >> 1).to(tl.float32)
        score = tl.where(count > 1, score - load_float(column, _PRESENCE).to(tl.float32), score)

    num_bans = tl.load(column + _NUM_BANS).to(tl.int32)
    score = _without_bans(score, token, first, first + CHUNK, lists + tl.load(column + _BANS), num_bans)
    score = _masked(score, token, row, vocabulary, masks, mask_rows, mask_width)
    if tl.load(is_changed + row) != 0:
        tl.store(scores + row * vocabulary + token, score, mask=inside)

    largest = tl.max(score, 1)
    tl.store(group_max + (row * num_chunks + chunk) * GROUPS + tl.arange(0, GROUPS), largest)
    top = tl.max(largest)
    tl.store(chunk_max + row * num_chunks + chunk, top)
    temperature = load_float(column, _TEMPERATURE)
    total = tl.full([], 0.0, tl.float64)
    if (temperature > 0) & (top > float("-inf")):
        weight = tl.exp((score - top) / temperature.to(tl.float32))
        total = tl.sum(weight.to(tl.float64))
    tl.store(chunk_sum + row * num_chunks + chunk, total)


def _variants() -> Iterator[Variant]:
    """Yield both kernels for every type of logits, with and without grammars."""
    grammar = dict.fromkeys(("masks", "mask_rows"), "*i32:16")
    absent: dict[str, int | None] = dict.fromkeys(grammar)
    for dtype in ("bf16", "fp16", "fp32"):
        inputs = {"logits": f"*{dtype}:16", "slots": "*i32:16", "columns": "*i64:16", "lists": "*i32:16"}
        inputs |= {"is_changed": "*i32:16"}
        inputs |= dict.fromkeys(("vocabulary", "logits_stride", "mask_width"), "i32:16")
        bans = inputs | {"positions": "*i32:16"}
        process = inputs | {"counts": "*i32:16", "num_chunks": "i32", "chunk_sum": "*fp64:16"}
        process |= dict.fromkeys(("scores", "chunk_max", "group_max"), "*fp32:16")
        for name, masks, no_masks in ((f"{dtype}_grammar", grammar, {}), (dtype, {}, absent)):
            yield Variant(name, _find_changes, bans | masks, no_masks | {"TILE": _TILE}, _WARPS)
            yield Variant(name, _process_logits, process | masks, no_masks | _SIZES, _WARPS)


VARIANTS = tuple(_variants())

"""Paged attention of a whole step in one kernel.

The rows of a step are packed: chunks and decodes of any length follow each other. A program computes one *tile*: up to
BLOCK_M pairs of a query token and a query head that share a KV head, so that a KV tile is loaded once for all heads of
its group and `tl.dot` is filled. Softmax is computed online (Milakov and Gimelshein, 2018; Dao et al., 2022).

Grid. Sequence s owns the tiles from `query_starts[s] // BLOCK_Q + s` on, where BLOCK_Q is the number of tokens of a
tile. This leaves at least ceil(rows / BLOCK_Q) tiles for each sequence, needs no lengths on the host, and lets a
program find its sequence by binary search. Programs without rows return at once.

Split decodes. A decode is one tile, and few long decodes would leave most multiprocessors idle. `SPLIT_PROGRAMS`
further programs per launch are therefore divided evenly among the sequences of the step, as read on the device: each
takes a range of the keys of one decode, and leaves an unnormalised sum in the workspace. The last program to finish a
decode adds the sums, in the order of the ranges, whichever program that is: results do not depend on timing.

Memory order of the reduction. A program's stores to the workspace precede a barrier of its threads. The barrier
precedes the increment of the decode's counter by one thread, with acquire and release semantics at the scope of the
GPU. Releases are cumulative over the barrier, and increments of one counter form a release sequence. So the program
that reads the last count observes all stores of the others: its threads wait at a second barrier, over which Triton
distributes the count. They read past the L1 cache, and reset the counter by a plain store, which the next launch on
the stream observes.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def _num_occupied(query_starts, num_sequences, capacity):
    """Return the number of sequences with rows, at least 1; those without follow them."""
    total = tl.load(query_starts + capacity)
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) < total:
            low = middle
        else:
            high = middle
    return low + 1


@triton.jit
def _sequence_of_tile(query_starts, tile, num_sequences, BLOCK_Q: tl.constexpr):
    """Return the last sequence whose first tile is at most `tile`."""
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _decode_e4m3(x, DTYPE: tl.constexpr):
    """Convert to DTYPE; bytes are float8_e4m3fn, whose exponent bias is 8 less than that of a half."""
    if x.dtype == tl.uint8:
        bits = x.to(tl.uint16)
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return (half * 256.0).to(DTYPE)
    return x.to(DTYPE)


@triton.jit
def _attend(
    q, position, top, norm, sums, keys, values, table, key_block_stride, value_block_stride,
    first_tile, end_tile, first_key, end_key, scale, softcap, window,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add the KV tiles `first_tile` to `end_tile - 1` to the online softmax (top, norm, sums).

    `top` is the greatest score of each row times log2(e), `norm` the sum of the exponentials, `sums` that of the
    weighted values. Only keys `first_key` to `end_key - 1` are read. MASK: some of them are invisible to some rows.
    """
    d = tl.arange(0, PADDED_DIM)
    for tile in range(first_tile, end_tile):
        key = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        present = (key >= first_key) & (key < end_key)
        block = tl.load(table + key // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        slot = (key % BLOCK_SIZE) * HEAD_DIM
        k = tl.load(
            keys + (block * key_block_stride + slot)[None, :] + d[:, None],
            mask=present[None, :] & (d < HEAD_DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(q, _decode_e4m3(k, DTYPE), input_precision="ieee") * scale
        if SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = (1 - 2 / (tl.exp2(scores * (2 / softcap)) + 1)) * (softcap * _LOG2_E)
        if MASK:
            visible = key[None, :] <= position[:, None]
            if WINDOW:
                visible = visible & (key[None, :] > position[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # Subtracting infinities of a row that has seen no key yet would give NaN.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        norm = norm * decay + tl.sum(weights, 1)
        v = tl.load(
            values + (block * value_block_stride + slot)[:, None] + d[None, :],
            mask=present[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        )
        sums = tl.dot(weights.to(DTYPE), _decode_e4m3(v, DTYPE), sums * decay[:, None], input_precision="ieee")
        top = new_top
    return top, norm, sums


@triton.jit
def _store(
    out, row, head, valid, top, norm, sums, sinks, value_scale, row_stride, head_stride,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Write the softmax (top, norm, sums) of each row and head, with the sinks' scores added."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * _LOG2_E
        new_top = tl.maximum(top, sink)
        decay = tl.exp2(top - new_top)
        norm = norm * decay + tl.exp2(sink - new_top)
        sums = sums * decay[:, None]
    d = tl.arange(0, PADDED_DIM)
    result = sums * (value_scale / norm)[:, None]
    tl.store(
        out + (row.to(tl.int64) * row_stride + head * head_stride)[:, None] + d[None, :],
        result.to(out.dtype.element_ty),
        mask=valid[:, None] & (d < HEAD_DIM)[None, :],
    )


@triton.jit(
    do_not_specialize=["num_sequences", "capacity", "num_extra", "table_stride", "window"],
    do_not_specialize_on_alignment=["query_starts", "seq_lens", "block_tables", "sinks"],
)
def paged_attention_kernel(
    out, query, key_cache, value_cache, query_starts, seq_lens, block_tables, sinks, workspace,
    scale, value_scale, softcap, window, num_sequences, capacity, num_extra,
    out_row_stride, out_head_stride, query_row_stride, query_head_stride,
    key_block_stride, key_head_stride, value_block_stride, value_head_stride, table_stride,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DIAGONAL: tl.constexpr, SPLIT_TILES: tl.constexpr,
    MERGED: tl.constexpr, NUM_COUNTERS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the step, or one range of the keys of a decode.

    Grid: [kv heads, num_extra + tiles]. `scale` includes the factor log2(e). Without a workspace no decode is
    split. DIAGONAL: visit fully visible KV tiles without a mask first. SPLIT_TILES: fewest KV tiles of a split. MERGED:
    splits that are added at once. NUM_COUNTERS: elements of the workspace that precede the partial results.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    program = tl.program_id(1)

    occupied = 1
    if workspace is not None:
        occupied = _num_occupied(query_starts, num_sequences, capacity)
    if program < num_extra:
        sequence = program % occupied
        split = 1 + program // occupied
        tile = 0
    else:
        tile = program - num_extra
        sequence = _sequence_of_tile(query_starts, tile, num_sequences, BLOCK_Q)
        tile -= tl.load(query_starts + sequence) // BLOCK_Q + sequence
        split = 0
    start = tl.load(query_starts + sequence)
    rows = tl.load(query_starts + sequence + 1) - start
    length = tl.load(seq_lens + sequence)
    num_tiles = tl.cdiv(rows, BLOCK_Q)
    if tile >= num_tiles or (split > 0 and rows > 1):
        return
    # The last tile of a chunk sees the most keys: start it first.
    first_token = (num_tiles - 1 - tile) * BLOCK_Q

    context = length - rows
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(context + first_token - window + 1, 0)
    end_key = tl.minimum(context + first_token + BLOCK_Q, length)
    first_tile = first_key // BLOCK_N
    end_tile = tl.cdiv(end_key, BLOCK_N)
    num_splits = 1
    if workspace is not None:  # noqa: SIM102 (Triton compiles the first condition away)
        if rows == 1:
            tiles = tl.maximum(tl.cdiv(end_tile - first_tile, 1 + num_extra // occupied), SPLIT_TILES)
            num_splits = tl.cdiv(end_tile - first_tile, tiles)
            first_tile += split * tiles
            end_tile = tl.minimum(first_tile + tiles, end_tile)
    if split >= num_splits:
        return

    pair = tl.arange(0, BLOCK_M)
    token = first_token + pair // GROUP
    head = kv_head * GROUP + pair % GROUP
    valid = (pair < BLOCK_Q * GROUP) & (token < rows)
    d = tl.arange(0, PADDED_DIM)
    q = tl.load(
        query + ((start + token).to(tl.int64) * query_row_stride + head * query_head_stride)[:, None] + d[None, :],
        mask=valid[:, None] & (d < HEAD_DIM)[None, :],
        other=0.0,
    ).to(DTYPE)
    position = context + token
    keys = key_cache + kv_head.to(tl.int64) * key_head_stride
    values = value_cache + kv_head.to(tl.int64) * value_head_stride
    table = block_tables + sequence.to(tl.int64) * table_stride

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    if DIAGONAL:
        full_tile = tl.maximum(tl.minimum((context + first_token + 1) // BLOCK_N, end_tile), first_tile)
        top, norm, sums = _attend(
            q, position, top, norm, sums, keys, values, table, key_block_stride, value_block_stride,
            first_tile, full_tile, first_key, end_key, scale, softcap, window,
            HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, DTYPE, WINDOW, SOFTCAP, False,
        )  # fmt: skip
        first_tile = full_tile
    top, norm, sums = _attend(
        q, position, top, norm, sums, keys, values, table, key_block_stride, value_block_stride,
        first_tile, end_tile, first_key, end_key, scale, softcap, window,
        HEAD_DIM, PADDED_DIM, BLOCK_SIZE, BLOCK_N, DTYPE, WINDOW, SOFTCAP, True,
    )  # fmt: skip

    if workspace is None or num_splits == 1:
        _store(
            out, start + token, head, valid, top, norm, sums, sinks, value_scale, out_row_stride, out_head_stride,
            HEAD_DIM, PADDED_DIM,
        )  # fmt: skip
    else:
        # Counters [kv heads, num_extra], at most NUM_COUNTERS; then sums [kv heads, 2 num_extra, GROUP, HEAD_DIM], top
        # and norm [kv heads, 2 num_extra, GROUP]. Split i of a sequence is at i * occupied + sequence, which is less
        # than 2 num_extra: there are at most 1 + num_extra // occupied splits.
        num_partials = tl.num_programs(0) * 2 * num_extra * GROUP
        counter = workspace.to(tl.pointer_type(tl.int32), bitcast=True) + kv_head * num_extra + sequence
        partials = workspace + NUM_COUNTERS
        tops = partials + num_partials * HEAD_DIM
        norms = tops + num_partials
        base = (kv_head * 2 * num_extra + sequence) * GROUP
        row = base + split * occupied * GROUP + pair
        tl.store(tops + row, top, mask=valid)
        tl.store(norms + row, norm, mask=valid)
        tl.store(
            partials + row.to(tl.int64)[:, None] * HEAD_DIM + d[None, :],
            sums,
            mask=valid[:, None] & (d < HEAD_DIM)[None, :],
        )
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.store(counter, 0)
            member = tl.arange(0, PADDED_GROUP)
            is_member = member < GROUP
            all_top = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
            all_norm = tl.zeros([PADDED_GROUP], tl.float32)
            all_sums = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
            for first in range(0, num_splits, MERGED):
                other = first + tl.arange(0, MERGED)
                part = base + other[:, None] * (occupied * GROUP) + member[None, :]
                mask = (other < num_splits)[:, None] & is_member[None, :]
                part_top = tl.load(tops + part, mask=mask, other=float("-inf"), cache_modifier=".cg")
                part_norm = tl.load(norms + part, mask=mask, other=0.0, cache_modifier=".cg")
                part_sums = tl.load(
                    partials + part.to(tl.int64)[:, :, None] * HEAD_DIM + d[None, None, :],
                    mask=mask[:, :, None] & (d < HEAD_DIM)[None, None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                new_top = tl.where(is_member, tl.maximum(all_top, tl.max(part_top, 0)), 0.0)
                weights = tl.exp2(part_top - new_top[None, :])
                decay = tl.exp2(all_top - new_top)
                all_norm = all_norm * decay + tl.sum(part_norm * weights, 0)
                all_sums = all_sums * decay[:, None] + tl.sum(part_sums * weights[:, :, None], 0)
                all_top = new_top
            _store(
                out, start + tl.zeros([PADDED_GROUP], tl.int32), kv_head * GROUP + member, is_member,
                all_top, all_norm, all_sums, sinks, value_scale, out_row_stride, out_head_stride, HEAD_DIM, PADDED_DIM,
            )  # fmt: skip

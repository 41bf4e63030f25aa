"""Paged attention of a step, by persistent programs that walk a work list.

The rows of a step are packed: chunks and decodes of any length follow each other. A *tile* is up to BLOCK_M pairs of a
query token and a query head that share a KV head, so that a KV tile is loaded once for all heads of its group and
`tl.dot` is filled. Softmax is computed online (Milakov and Gimelshein, 2018; Dao et al., 2022).

Grid. There are as many programs as fit on the device at once, whatever the step is. Each computes the items that the
work list has for it (`fastgen.kernels.gpu.work_list`): whole tiles, and parts of the ranges of keys of at most two
others. It begins with the item after its first: all programs then read the keys of a chunk from the first one on, at
about the same time, and find them in the L2 cache.

Split tiles. A program leaves the unnormalised sum of a part in the workspace. The last program to finish a part of a
tile adds the sums, in the order of the parts, whichever program that is: results do not depend on timing.

Memory order of the reduction. A program's stores to the workspace precede a barrier of its threads. The barrier
precedes the increment of the tile's counter by one thread, with acquire and release semantics at the scope of the
GPU. Releases are cumulative over the barrier, and increments of one counter form a release sequence. So the program
that reads the last count observes all stores of the others: its threads wait at a second barrier, over which Triton
distributes the count. They read past the L1 cache, and reset the counter by a plain store, which the next launch on
the stream observes. In one launch each counter counts the parts of one tile, and each place of the workspace is written
once.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)


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
    do_not_specialize=["table_stride", "window"],
    do_not_specialize_on_alignment=["work", "block_tables", "sinks"],
)
def paged_attention_kernel(
    out, query, key_cache, value_cache, work, block_tables, sinks, counters, partials,
    scale, value_scale, softcap, window,
    out_row_stride, out_head_stride, query_row_stride, query_head_stride,
    key_block_stride, key_head_stride, value_block_stride, value_head_stride, table_stride,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DIAGONAL: tl.constexpr, FIELDS: tl.constexpr,
    ADDED_PAIRS: tl.constexpr, PADDED_PAIRS: tl.constexpr, ADDED_PARTS: tl.constexpr,
):  # fmt: skip
    """Compute the items of a program for one KV head.

    Grid: [kv heads, programs]. `scale` includes the factor log2(e). `work` is this launch's part of the work list,
    `counters` are [kv heads, programs], and `partials` hold the results of parts. DIAGONAL: visit fully visible KV
    tiles without a mask first. ADDED_PAIRS, ADDED_PARTS: pairs of a split tile and parts of it that are added at once.
    """
    kv_head = tl.program_id(0)
    program = tl.program_id(1)
    num_programs = tl.num_programs(1)
    keys = key_cache + kv_head.to(tl.int64) * key_head_stride
    values = value_cache + kv_head.to(tl.int64) * value_head_stride
    d = tl.arange(0, PADDED_DIM)

    first_item = tl.load(work + 2 * program)
    num_items = tl.load(work + 2 * program + 1) - first_item
    # Offsets that are the same for all items would take registers in the loop over KV tiles if they were computed here.
    for number in tl.range(0, num_items, disable_licm=True):
        item = work + 2 * num_programs + (first_item + (number + 1) % num_items) * FIELDS
        sequence = tl.load(item)
        first_row = tl.load(item + 1)
        num_tokens = tl.load(item + 2)
        first_position = tl.load(item + 3)
        first_tile = tl.load(item + 4)
        end_tile = tl.load(item + 5)
        split = tl.load(item + 6)
        num_splits = tl.load(item + 7)

        pair = tl.arange(0, BLOCK_M)
        token = pair // GROUP
        head = kv_head * GROUP + pair % GROUP
        valid = token < num_tokens
        q = tl.load(
            query + ((first_row + token).to(tl.int64) * query_row_stride + head * query_head_stride)[:, None]
            + d[None, :],
            mask=valid[:, None] & (d < HEAD_DIM)[None, :],
            other=0.0,
        ).to(DTYPE)  # fmt: skip
        position = first_position + token
        table = block_tables + sequence.to(tl.int64) * table_stride
        first_key = 0
        if WINDOW:
            first_key = tl.maximum(first_position - window + 1, 0)
        end_key = first_position + num_tokens

        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        norm = tl.zeros([BLOCK_M], tl.float32)
        sums = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
        if DIAGONAL:
            full_tile = tl.maximum(tl.minimum((first_position + 1) // BLOCK_N, end_tile), first_tile)
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

        if num_splits == 1:
            _store(
                out, first_row + token, head, valid, top, norm, sums, sinks, value_scale, out_row_stride,
                out_head_stride, HEAD_DIM, PADDED_DIM,
            )  # fmt: skip
        else:
            # Sums [kv heads, 2 programs, BLOCK_M, HEAD_DIM], then top and norm [kv heads, 2 programs, BLOCK_M]. Part 0
            # of a tile is in place 1 of its program, the others in place 0 of theirs.
            num_partials = tl.num_programs(0) * num_programs * (2 * BLOCK_M)
            tops = partials + num_partials.to(tl.int64) * HEAD_DIM
            norms = tops + num_partials
            base = kv_head * num_programs * 2
            row = (base + 2 * program + tl.where(split == 0, 1, 0)) * BLOCK_M + pair
            tl.store(tops + row, top, mask=valid)
            tl.store(norms + row, norm, mask=valid)
            tl.store(
                partials + row.to(tl.int64)[:, None] * HEAD_DIM + d[None, :],
                sums,
                mask=valid[:, None] & (d < HEAD_DIM)[None, :],
            )
            first_program = program - split
            counter = counters + kv_head * num_programs + first_program
            tl.debug_barrier()
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                tl.store(counter, 0)
                for first_pair in range(0, num_tokens * GROUP, ADDED_PAIRS):
                    member = tl.arange(0, PADDED_PAIRS)
                    added = first_pair + member
                    is_added = (member < ADDED_PAIRS) & (added < num_tokens * GROUP)
                    all_top = tl.full([PADDED_PAIRS], float("-inf"), tl.float32)
                    all_norm = tl.zeros([PADDED_PAIRS], tl.float32)
                    all_sums = tl.zeros([PADDED_PAIRS, PADDED_DIM], tl.float32)
                    for first_part in range(0, num_splits, ADDED_PARTS):
                        other = first_part + tl.arange(0, ADDED_PARTS)
                        other_place = base + 2 * (first_program + other) + (other == 0).to(tl.int32)
                        part = (other_place * BLOCK_M)[:, None] + added[None, :]
                        mask = (other < num_splits)[:, None] & is_added[None, :]
                        part_top = tl.load(tops + part, mask=mask, other=float("-inf"), cache_modifier=".cg")
                        part_norm = tl.load(norms + part, mask=mask, other=0.0, cache_modifier=".cg")
                        part_sums = tl.load(
                            partials + part.to(tl.int64)[:, :, None] * HEAD_DIM + d[None, None, :],
                            mask=mask[:, :, None] & (d < HEAD_DIM)[None, None, :],
                            other=0.0,
                            cache_modifier=".cg",
                        )
                        new_top = tl.where(is_added, tl.maximum(all_top, tl.max(part_top, 0)), 0.0)
                        # Subtracting infinities of pairs that have seen no key yet would give NaN.
                        new_base = tl.where(new_top == float("-inf"), 0.0, new_top)
                        weights = tl.exp2(part_top - new_base[None, :])
                        decay = tl.exp2(all_top - new_base)
                        all_norm = all_norm * decay + tl.sum(part_norm * weights, 0)
                        all_sums = all_sums * decay[:, None] + tl.sum(part_sums * weights[:, :, None], 0)
                        all_top = new_top
                    _store(
                        out, first_row + added // GROUP, kv_head * GROUP + added % GROUP, is_added,
                        all_top, all_norm, all_sums, sinks, value_scale, out_row_stride, out_head_stride, HEAD_DIM,
                        PADDED_DIM,
                    )  # fmt: skip

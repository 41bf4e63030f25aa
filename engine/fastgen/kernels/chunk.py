"""Attention of a prompt chunk over its paged context, by torch's own attention on gathered pages.

torch's flash kernel runs at a rate that a numba kernel does not reach for many queries; gathering the pages is cheap
beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

# Contexts up to this length go through one masked call; beyond it, two calls without a mask and a merge are faster.
LONGEST_MASKED_CONTEXT = 512
# Squeezed scores held at once: a few buffers of 16 MiB, whatever the context.
_MOST_SCORES = 1 << 22

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One chunk of a pass, the same for all layers.

    Attributes:
        row: its first row in the pass.
        num_tokens: its rows.
        context: keys before it that are gathered: all of the sequence's, but for blocks that a window leaves behind.
        blocks: [pages] int64, the blocks of context and chunk in order.
        mask: [num_tokens, context + num_tokens] float, what is added to the scores; None where no single mask is used.
    """

    row: int
    num_tokens: int
    context: int
    blocks: torch.Tensor
    mask: torch.Tensor | None

    @classmethod
    def make(
        cls, row: int, num_tokens: int, context: int, blocks: torch.Tensor, block_size: int, window: int | None = None
    ) -> ChunkPlan:
        """A plan of the fastest kind: without a mask where the chunk stands alone or has a long context.

        Args:
            row, num_tokens: the chunk's rows.
            context: tokens of the sequence before it.
            blocks: [pages] of context and chunk.
            block_size: tokens of a block.
            window: each token sees this many, itself the last; None where it sees all.
        """
        if (window is not None and window < context + num_tokens) or 0 < context <= LONGEST_MASKED_CONTEXT:
            return cls.masked(row, num_tokens, context, blocks, block_size, window)
        return cls(row, num_tokens, context, blocks, None)

    @classmethod
    def masked(
        cls, row: int, num_tokens: int, context: int, blocks: torch.Tensor, block_size: int, window: int | None = None
    ) -> ChunkPlan:
        """A plan with a mask; arguments as in `make`."""
        skipped = 0 if window is None else max(context + 1 - window, 0) // block_size
        context -= skipped * block_size
        visible = torch.ones(num_tokens, context + num_tokens, dtype=torch.bool).tril_(context)
        if window is not None:
            visible.triu_(context + 1 - window)
        mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))
        return cls(row, num_tokens, context, blocks[skipped:], mask)


def attend_chunk(
    plan: ChunkPlan,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    *,
    softcap: float | None = None,
) -> None:
    """Writes the chunk's rows of `out`.

    Args:
        plan: which rows, which blocks.
        queries, out: [T, heads, head_dim] float32.
        keys, values: one layer's cache, [blocks, kv heads, block size, head_dim], the chunk's own already written.
        scale: on the scores.
        softcap: scores are squeezed between ± this by tanh, for which the plan must have a mask; None where not.
    """
    rows = slice(plan.row, plan.row + plan.num_tokens)
    length = plan.context + plan.num_tokens
    k = _gather(keys, plan.blocks)[:, :, :length]
    v = _gather(values, plan.blocks)[:, :, :length]
    q = queries[rows].transpose(0, 1)[None]  # [1, heads, n, head_dim]
    if softcap is not None:
        result = _attend_capped(plan, q, k, v, scale, softcap)
    elif plan.mask is not None:
        result = _attend_masked(plan.mask, q, k, v, scale)
    elif plan.context == 0:
        result = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        result = _attend_in_two(plan, q, k, v, scale)
    out[rows] = result[0].transpose(0, 1)


def _gather(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """[1, kv heads, pages * block size, head_dim], contiguous."""
    # Pages first: of a cache seen transposed, torch would copy all of it before it selects.
    pages = cache.index_select(0, blocks).transpose(0, 1)
    return pages.reshape(1, pages.shape[0], -1, pages.shape[-1])


def _attend_masked(mask: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One call over context and chunk; the heads of a group form its batch, as torch's own grouping copies the keys."""
    _, heads, n, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    by_group = q.reshape(kv_heads, group, n, head_dim).transpose(0, 1)
    k, v = k.expand(group, -1, -1, -1), v.expand(group, -1, -1, -1)
    result = F.scaled_dot_product_attention(by_group, k, v, attn_mask=mask, scale=scale)
    return result.transpose(0, 1).reshape(1, heads, n, head_dim)


def _attend_in_two(plan: ChunkPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The context without a mask and the chunk itself causally, merged by their log-sum-exp."""
    _, heads, n, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    own_k = k[:, :, plan.context :].repeat_interleave(group, 1)
    own_v = v[:, :, plan.context :].repeat_interleave(group, 1)
    own, own_lse = _flash(q, own_k, own_v, 0.0, True, scale=scale)
    # Without a mask the heads of a group are only more queries of their key-value head.
    grouped = q.reshape(1, kv_heads, group * n, head_dim)
    past, past_lse = _flash(grouped, k[:, :, : plan.context], v[:, :, : plan.context], 0.0, False, scale=scale)
    own_lse = _by_head(own_lse, heads).reshape(1, heads, n)
    past_lse = _by_head(past_lse, kv_heads).reshape(1, heads, n)
    weight = torch.sigmoid(own_lse - past_lse)[..., None]
    return torch.lerp(past.reshape(1, heads, n, head_dim), own, weight)


def _attend_capped(
    plan: ChunkPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:
    """Attention with squeezed scores, which torch has no kernel for: some rows of a key-value head at a time."""
    assert plan.mask is not None
    _, heads, n, head_dim = q.shape
    kv_heads = k.shape[1]
    out = torch.empty(q.shape)
    grouped, results = (x.reshape(kv_heads, heads // kv_heads, n, head_dim) for x in (q, out))
    step = max(1, _MOST_SCORES * kv_heads // (heads * k.shape[2]))
    for first in range(0, n, step):
        rows = slice(first, first + step)
        for head in range(kv_heads):
            scores = grouped[head, :, rows] @ k[0, head].T
            scores.mul_(scale / softcap).tanh_().mul_(softcap).add_(plan.mask[rows])
            results[head, :, rows] = scores.softmax(-1) @ v[0, head]
    return out


def _by_head(log_sum_exp: torch.Tensor, heads: int) -> torch.Tensor:
    """[1, heads, n]: torch has returned either order over its releases."""
    return log_sum_exp if log_sum_exp.shape[1] == heads else log_sum_exp.transpose(1, 2)

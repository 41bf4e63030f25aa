"""Paged attention for Falcon, whose transformers code does not look attention functions up by name."""

from __future__ import annotations

from typing import Any

import torch
from transformers.models.falcon import modeling_falcon

from fastgen.model.transformers_backend.paged_attention import IMPLEMENTATION, NotServedError, attention


class PagedFalconAttention(modeling_falcon.FalconAttention):
    """transformers' layer with our attention, if the model's configuration names it."""

    def forward(  # type: ignore[override]  # the rest only passes through
        self,
        hidden_states: torch.Tensor,
        alibi: torch.Tensor | None,
        attention_mask: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend over hidden_states [1, T, hidden]; return [1, T, hidden] and no attention weights."""
        if self.config._attn_implementation != IMPLEMENTATION:
            computed: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
                hidden_states, alibi, attention_mask, position_embeddings=position_embeddings, **others
            )
            return computed
        if alibi is not None:
            raise NotServedError("alibi positions")
        assert position_embeddings is not None
        queries, keys, values = self._split_heads(self.query_key_value(hidden_states))  # [1, T, heads, head_dim]
        if self.new_decoder_architecture:
            # _split_heads repeats keys and values for each query head of a group: keep one of each.
            group = self.num_heads // int(self.num_kv_heads or 1)
            keys, values = keys[:, :, ::group], values[:, :, ::group]
        q, k, v = (states.transpose(1, 2) for states in (queries, keys, values))
        q, k = modeling_falcon.apply_rotary_pos_emb(q, k, *position_embeddings)  # type: ignore[no-untyped-call]
        attended, _ = attention(self, q, k, v, None, scaling=self.inv_norm_factor)
        return self.dense(attended.flatten(2)), None


def register() -> None:
    """Make Falcon models built with our attention's name use this layer."""
    modeling_falcon.FALCON_ATTENTION_CLASSES[IMPLEMENTATION] = PagedFalconAttention

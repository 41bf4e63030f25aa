"""Linear attention by the gated delta rule with torch operations, on any device, from states in slots.

Yang et al., "Gated Delta Networks" (2024). A head's state S [key_dim, value_dim] maps keys to values. Token t with
decay a, strength b, query q, key k and value v changes it to S' = a S + k uᵀ with u = b (v - a Sᵀ k), and its result is
S'ᵀ q. Decodes compute just that. A chunk of a prompt is computed in pieces, whose tokens are computed together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from fastgen.kv_cache.tensors import KVCache, RecurrentStates
from fastgen.model.config.architecture import DeltaRule, ModelArchitecture
from fastgen.model.forward_input import ChunkSpan, ForwardInput

# Tokens that are computed together. The work within a piece is quadratic in its length.
PIECE = 64
_EPSILON = 1e-6  # of the norm of queries and keys, as in the published implementation


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """What a layer's linear attention needs besides its projections. All are float32.

    Attributes:
        filters: [kernel size, width of queries, keys and values], of the causal convolution; the last one is for the
            token itself.
        decay: [value heads], negative: the rate at which states decay.
        offset: [value heads], added to what the decay depends on.
        norm: [value_dim], of the results.
    """

    filters: torch.Tensor
    decay: torch.Tensor
    offset: torch.Tensor
    norm: torch.Tensor


class _Tokens(NamedTuple):
    """What n tokens bring to a layer's linear attention, in float32."""

    inputs: torch.Tensor  # [n, width of queries, keys and values], before the convolution
    strengths: torch.Tensor  # [n, value heads]
    decays: torch.Tensor  # [n, value heads], logarithms

    def part(self, rows: slice) -> _Tokens:
        return _Tokens(self.inputs[rows], self.strengths[rows], self.decays[rows])


class LinearAttention:
    """The linear attention of one step with T rows, with what all layers share. The states are on `device`."""

    def __init__(
        self,
        shape: DeltaRule,
        forward_input: ForwardInput,
        states: RecurrentStates,
        epsilon: float,
        device: torch.device,
    ) -> None:
        self._shape = shape
        self._states = states
        self._epsilon = epsilon
        self._chunks = forward_input.chunks
        self._num_decodes = decodes = forward_input.num_decodes
        self._slots, self._sources = forward_input.state_slots.tolist(), forward_input.state_sources.tolist()
        sources, saves = forward_input.state_sources[:decodes], forward_input.state_saves
        self._decode_slots = torch.from_numpy(forward_input.state_slots[:decodes]).to(device)
        self._decode_sources = torch.from_numpy(np.maximum(sources, 0)).to(device)
        self._fresh_decodes = torch.from_numpy(np.flatnonzero(sources < 0)).to(device)
        of_decodes = torch.from_numpy(saves[saves[:, 0] < decodes]).to(device)
        self._saved_rows, self._saved_slots, self._saved_after = (
            of_decodes[:, 0],
            of_decodes[:, 2],
            of_decodes[:, 1] > 0,
        )
        self._saves: dict[int, list[tuple[int, int]]] = {}  # of chunks: number of tokens and slot, by sequence
        for sequence, num_tokens, slot in saves[saves[:, 0] >= decodes].tolist():
            self._saves.setdefault(sequence, []).append((num_tokens, slot))

    def attend(self, place: int, weights: DeltaWeights, qkvz: torch.Tensor, ba: torch.Tensor) -> torch.Tensor:
        """Compute a layer's linear attention, and update the states of the step's sequences.

        Args:
            place: of the layer among those with states.
            weights: of the layer.
            qkvz: [T, queries, keys, values and gates of the results].
            ba: [T, 2 * value heads], which strengths and decays depend on.

        Returns:
            [T, width of values], normalised and gated.
        """
        shape, rows = self._shape, len(qkvz)
        inputs, gates = qkvz.float().split([shape.mixed, shape.values], 1)  # type: ignore[no-untyped-call]
        strengths, decays = ba.float().chunk(2, 1)
        tokens = _Tokens(inputs, strengths.sigmoid(), weights.decay * F.softplus(decays + weights.offset))
        out = torch.empty(rows, shape.value_heads, shape.value_dim, device=qkvz.device)
        if decodes := self._num_decodes:
            out[:decodes] = self._decode(place, weights, tokens.part(slice(decodes)))
        for span in self._chunks:
            part = slice(span.row, span.row + span.num_tokens)
            out[part] = self._chunk(span, place, weights, tokens.part(part))
        scale = torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + self._epsilon)
        out = out * scale * weights.norm * F.silu(gates.reshape(out.shape))
        return out.flatten(1).to(qkvz.dtype)

    def _decode(self, place: int, weights: DeltaWeights, tokens: _Tokens) -> torch.Tensor:
        """Compute a token of each of D sequences: results [D, value heads, value_dim]."""
        kept_inputs, kept_matrices = self._states.inputs[place], self._states.matrices[place]
        before, matrices = kept_inputs[self._decode_sources], kept_matrices[self._decode_sources]
        before[self._fresh_decodes] = 0
        matrices[self._fresh_decodes] = 0
        window = torch.cat((before, tokens.inputs[:, None]), 1)  # [D, kernel size, width]
        q, k, v = self._heads(F.silu((window * weights.filters).sum(1)))  # [D, value heads, dim]
        after = matrices * tokens.decays.exp()[..., None, None]
        update = tokens.strengths[..., None] * (v - torch.einsum("dhkv,dhk->dhv", after, k))
        after.addcmul_(k[..., :, None], update[..., None, :])
        self._keep_decodes(kept_inputs, before, window[:, 1:])
        self._keep_decodes(kept_matrices, matrices, after)
        return torch.einsum("dhkv,dhk->dhv", after, q)

    def _keep_decodes(self, kept: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
        """Write the decodes' states, and copies from before or after their tokens, to slots."""
        kept[self._decode_slots] = after
        if len(rows := self._saved_rows):
            is_after = self._saved_after.view(-1, *(1,) * (after.dim() - 1))
            kept[self._saved_slots] = torch.where(is_after, after[rows], before[rows])

    def _chunk(self, span: ChunkSpan, place: int, weights: DeltaWeights, tokens: _Tokens) -> torch.Tensor:
        """Compute n tokens of a sequence: results [n, value heads, value_dim]."""
        kept_inputs, kept_matrices = self._states.inputs[place], self._states.matrices[place]
        source, size = self._sources[span.sequence], self._shape.kernel_size
        if source < 0:
            before, matrices = torch.zeros_like(kept_inputs[0]), torch.zeros_like(kept_matrices[0])
        else:
            before, matrices = kept_inputs[source], kept_matrices[source]
        window = torch.cat((before, tokens.inputs))  # [kernel size - 1 + n, width]
        mixed = tokens.inputs * weights.filters[-1]
        for i in range(size - 1):
            mixed.addcmul_(window[i : i + span.num_tokens], weights.filters[i])
        q, k, v = (part.transpose(0, 1) for part in self._heads(F.silu(mixed)))  # [value heads, n, dim]
        strengths, decays = tokens.strengths.t()[..., None], tokens.decays.t()
        saves = [*self._saves.get(span.sequence, ()), (span.num_tokens, self._slots[span.sequence])]
        parts, first = [], 0
        for end, slot in sorted(saves):
            for begin in range(first, end, PIECE):
                piece = slice(begin, min(begin + PIECE, end))
                part, matrices = delta_piece(
                    q[:, piece], k[:, piece], v[:, piece], strengths[:, piece], decays[:, piece], matrices
                )
                parts.append(part)
            kept_inputs[slot] = window[end : end + size - 1]
            kept_matrices[slot] = matrices
            first = end
        return torch.cat(parts, 1).transpose(0, 1)

    def _heads(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split [n, width] into queries, keys and values [n, value heads, dim], queries and keys normalised."""
        shape = self._shape
        q, k, v = mixed.split([shape.keys, shape.keys, shape.values], 1)  # type: ignore[no-untyped-call]
        q, k = (self._normalised(part.reshape(len(mixed), shape.key_heads, shape.key_dim)) for part in (q, k))
        return q * shape.key_dim**-0.5, k, v.reshape(len(mixed), shape.value_heads, shape.value_dim)

    def _normalised(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise heads to length 1 and repeat each for its value heads."""
        x = x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _EPSILON)
        return x.repeat_interleave(self._shape.value_heads // self._shape.key_heads, 1)


def linear_attention(
    architecture: ModelArchitecture, forward_input: ForwardInput, cache: KVCache, device: torch.device
) -> LinearAttention | None:
    """Return the linear attention of a step; None if no layer has it."""
    if architecture.delta is None:
        return None
    assert cache.states is not None
    return LinearAttention(architecture.delta, forward_input, cache.states, architecture.rms_norm_eps, device)


def delta_piece(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    strengths: torch.Tensor,
    decays: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute n tokens of H heads together.

    With G_t the product of the decays up to token t, the updates u_t solve the triangular system
    u_t + b_t Σ_{i<t} (G_t / G_i) (k_t · k_i) u_i = b_t (v_t - G_t Sᵀ k_t).

    Args:
        q, k: [H, n, key_dim].
        v: [H, n, value_dim].
        strengths: [H, n, 1].
        decays: [H, n], logarithms.
        state: [H, key_dim, value_dim] before the tokens.

    Returns:
        The results [H, n, value_dim], and the state after the tokens.
    """
    total = decays.cumsum(-1)  # log G
    later = torch.ones(decays.shape[-1], decays.shape[-1], dtype=torch.bool, device=q.device).triu(1)
    # Of the tokens before t. Later ones would overflow.
    ratio = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    grown = total.exp()[..., None]
    system = strengths * (k @ k.mT) * ratio  # its diagonal is taken as 1
    u = torch.linalg.solve_triangular(system, strengths * (v - grown * (k @ state)), upper=False, unitriangular=True)
    results = grown * (q @ state) + ((q @ k.mT) * ratio) @ u
    left = (total[..., -1:] - total).exp()[..., None]
    return results, state * grown[..., -1:, :] + (k * left).mT @ u

"""Sample the next token of each row on the device, without a synchronisation.

The parameters and their order are those of `fastgen.sampling.sampler`, and so are the tokens for the same logits and
seeds, with two exceptions that this module's tests bound:

- Where tokens have equal scores, top-k, top-p and min-p may choose another one of them: here ties are resolved by id,
  there in no defined order.
- Weights are exponentials in float32, which differ by rounding between devices. A token that is within rounding of a
  threshold, or of the uniform number drawn, may be kept here and dropped there.
"""

from __future__ import annotations

from collections import abc

import torch

from fastgen.core.step_output import TokenLogprobs
from fastgen.kernels.gpu.sampling.logits import process_logits
from fastgen.kernels.gpu.sampling.tokens import commit_tokens, sample_tokens
from fastgen.sampling.device_rows import DeviceRows


class DeviceSampler(DeviceRows):
    """Samples tokens for the sequences in the slots.

    A step takes five launches, plus one upload and at most six launches if sequences were admitted since the last step.
    """

    def sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        masks: torch.Tensor | None = None,
        mask_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a token [R] int32 for each row, on the device, and record it for the next step.

        Args:
            logits: [R, V] of float32, bfloat16 or float16; not modified.
            slots: [R] int32 without repetition; -1 for padded rows, which get token 0.
            positions: [R] int32, position of the token to sample in its sequence: the number of its tokens.
            masks: grammar masks [M, ceil(V / 32)] int32: bit i % 32 of word i // 32 is set if token i is allowed.
            mask_rows: [R] int32, row of `masks` for each row, or -1 for rows without a grammar.
        """
        self.flush()
        scores = process_logits(logits, slots, positions, self.columns, self.lists, self.counts, masks, mask_rows)
        tokens = sample_tokens(*scores, slots, positions, self.columns)
        commit_tokens(tokens, slots, positions, self.columns, self.lists, self.counts, self.last_tokens)
        return tokens


def unpack_logprobs(packed: torch.Tensor, token_ids: abc.Sequence[int], top: abc.Sequence[int]) -> list[TokenLogprobs]:
    """Return the results of the GPU operator `token_logprobs`, copied to the host.

    Args:
        packed: [Q, 2 + 2 * num_top] float64.
        token_ids: [Q], the tokens that were scored.
        top: [Q], number of top tokens to return per row, at most `num_top`.
    """
    num_top = packed.shape[1] // 2 - 1
    unpacked = []
    for row, token, count in zip(packed.tolist(), token_ids, top, strict=True):
        ids, logprobs = row[2 : 2 + num_top], row[2 + num_top :]
        named = [(int(i), value) for i, value in zip(ids[:count], logprobs[:count], strict=True) if i >= 0]
        unpacked.append(TokenLogprobs(token, row[0], int(row[1]), tuple(named)))
    return unpacked

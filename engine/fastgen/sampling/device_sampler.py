"""Sample the next token of each row on the device, without a synchronisation.

The parameters and their order are those of `fastgen.sampling.host_sampler`, and so are the tokens for the same logits
and seeds. On a GPU there is an exception: weights are exponentials in float32, which differ by rounding between
devices. A token that is within rounding of a threshold, or of the uniform number drawn, may be kept here and dropped
there. Tests bound how often.
"""

from __future__ import annotations

import torch

from fastgen.kernels.gpu.sampling.logits import process_logits
from fastgen.kernels.gpu.sampling.tokens import commit_tokens, sample_tokens
from fastgen.sampling.slots import SamplingSlots


class DeviceSampler(SamplingSlots):
    """Samples tokens for the sequences in the slots.

    A step takes five launches, plus one upload and at most six launches if sequences were admitted since the last step.
    Growing `lists` or `counts` takes a few more.
    """

    def sample_without_lists(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Do as `sample` for slots that have no lists (`has_lists`). Call `flush` before.

        All state that it reads and writes stays at its address, so a CUDA graph can repeat the launches.
        """
        lists, counts = self.last_tokens.new_empty(0), self.last_tokens.new_empty(0, self._vocab_size)
        return self._sample(logits, slots, positions, lists, counts)

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
        return self._sample(logits, slots, positions, self.lists, self.counts, masks, mask_rows)

    def record(self, tokens: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Record tokens that were sampled elsewhere, for slots that were never flushed; arguments as for `sample`."""
        lists, counts = self.last_tokens.new_empty(0), self.last_tokens.new_empty(0, self._vocab_size)
        commit_tokens(tokens, slots, positions, self.columns, lists, counts, self.last_tokens)

    def _sample(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        lists: torch.Tensor,
        counts: torch.Tensor,
        masks: torch.Tensor | None = None,
        mask_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        logits = logits.float()  # no operation for the logits of a model
        scores = process_logits(logits, slots, positions, self.columns, lists, counts, masks, mask_rows)
        tokens = sample_tokens(logits, *scores, slots, positions, self.columns)
        commit_tokens(tokens, slots, positions, self.columns, lists, counts, self.last_tokens)
        return tokens

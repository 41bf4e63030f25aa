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
from collections.abc import Collection

import torch

from fastgen.core.request import SamplingParams
from fastgen.core.step_output import TokenLogprobs
from fastgen.kernels.gpu.sampling.logits import process_logits
from fastgen.kernels.gpu.sampling.logprobs import token_logprobs
from fastgen.kernels.gpu.sampling.tokens import commit_tokens, sample_tokens
from fastgen.sampling.device_rows import DeviceRows


class DeviceSampler:
    """Samples tokens for sequences in slots.

    A step is five launches, plus one upload and at most six launches if sequences were admitted since the last step.

    Args:
        vocab_size: number of logits of a row, V.
        max_rows: number of slots.
        device: of the logits.
        end_tokens: the model's end-of-sequence tokens.
    """

    def __init__(self, vocab_size: int, max_rows: int, device: torch.device, end_tokens: Collection[int]) -> None:
        self._rows = DeviceRows(vocab_size, max_rows, device, end_tokens)

    @property
    def last_tokens(self) -> torch.Tensor:
        """The token sampled last in each slot [max_rows] int32, always the same tensor."""
        return self._rows.last_tokens

    def admit(
        self,
        slot: int,
        sampling: SamplingParams,
        seed: int,
        prompt: abc.Sequence[int],
        generated: abc.Sequence[int] = (),
    ) -> None:
        """Give `slot` to a sequence with these tokens so far.

        Call it again after a preemption, with all tokens.

        Raises:
            torch.OutOfMemoryError: if the device has no memory for the biases, bad words or penalties.
        """
        self._rows.admit(slot, sampling, seed, prompt, generated)

    def release(self, slot: int) -> None:
        """Free the memory of `slot`, whose sequence is sampled no more."""
        self._rows.release(slot)

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
        rows = self._rows
        rows.flush()
        scores = process_logits(logits, slots, positions, rows.columns, rows.lists, rows.counts, masks, mask_rows)
        tokens = sample_tokens(*scores, slots, positions, rows.columns)
        commit_tokens(tokens, slots, positions, rows.columns, rows.lists, rows.counts, rows.last_tokens)
        return tokens

    def logprobs(self, logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, num_top: int) -> torch.Tensor:
        """Return log-probabilities [Q, 2 + 2 * num_top] float64 on the device; `unpack_logprobs` reads them.

        Args:
            logits: [R, V], unmodified.
            rows: [Q] int32, the rows of `logits` to score; -1 for padding.
            tokens: [Q] int32, the token of each of `rows`.
            num_top: number of top tokens, at most `MOST_LOGPROBS`.
        """
        return token_logprobs(logits, rows, tokens, num_top)


def unpack_logprobs(packed: torch.Tensor, token_ids: abc.Sequence[int], top: abc.Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of `DeviceSampler.logprobs`, copied to the host.

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

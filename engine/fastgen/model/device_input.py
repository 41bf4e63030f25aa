"""The input of a forward pass on a GPU, from state that stays there between steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fastgen.kernels.gpu.transfers import upload
from fastgen.model.step_input import StepInput


@dataclass(frozen=True, slots=True)
class DeviceInput:
    """One step with T tokens of S sequences, on the device. All int32.

    Attributes:
        token_ids: [T]; -1 stands for the token sampled last for the token's row.
        source_rows: [T], row of each token's sequence.
        last_ids: [rows], token sampled last for each row.
        positions: [T], position of each token in its sequence.
        slot_mapping: [T], cache slot of each token's key and value.
        query_starts: [S + 1], first token of each sequence, and T.
        seq_lens: [S], keys of each sequence after the step.
        block_tables: [S, M], blocks of each sequence in order; entries beyond its length are arbitrary.
        logit_rows: [N + P], tokens that need logits: those that sample, then those with prompt logprobs.
        sampled_rows, sampled_positions: [N], row and position of each token to sample.
    """

    token_ids: torch.Tensor
    source_rows: torch.Tensor
    last_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor
    sampled_rows: torch.Tensor
    sampled_positions: torch.Tensor


class DeviceRows:
    """The block tables of all rows, on the device.

    Args:
        max_rows: number of rows.
        max_blocks: blocks of the longest sequence.
        last_ids: [max_rows] int32, on the device, which the sampler writes.
    """

    def __init__(self, max_rows: int, max_blocks: int, last_ids: torch.Tensor) -> None:
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=last_ids.device)
        self._last_ids = last_ids

    def apply(self, step: StepInput) -> DeviceInput:
        """Apply the updates of a step and return its input, with one upload and without waiting for the device."""
        counts = np.diff(step.query_starts)
        first = step.query_starts[:-1]
        rows, columns, blocks = step.table_updates
        ends = step.query_starts[1:][step.sampled] - 1
        parts = (
            step.token_ids,
            np.repeat(step.rows, counts),
            np.repeat(step.seq_lens - counts - first, counts) + np.arange(step.num_tokens, dtype=np.int32),
            step.slot_mapping,
            step.query_starts,
            step.seq_lens,
            step.rows,
            np.concatenate((ends, step.scored_tokens)),
            step.rows[step.sampled],
            step.seq_lens[step.sampled],
            rows * self._tables.shape[1] + columns,
            blocks,
        )
        uploaded = upload(np.concatenate(parts, dtype=np.int32), self._tables.device)
        (
            token_ids, source_rows, positions, slots, starts, lengths, sequence_rows, logit_rows, sampled_rows,
            sampled_positions, places, values,
        ) = torch.split(uploaded, [len(part) for part in parts])  # fmt: skip
        if len(rows):
            self._tables.view(-1).index_copy_(0, places.long(), values)
        return DeviceInput(
            token_ids=token_ids,
            source_rows=source_rows,
            last_ids=self._last_ids,
            positions=positions,
            slot_mapping=slots,
            query_starts=starts,
            seq_lens=lengths,
            block_tables=self._tables.index_select(0, sequence_rows),
            logit_rows=logit_rows,
            sampled_rows=sampled_rows,
            sampled_positions=sampled_positions,
        )

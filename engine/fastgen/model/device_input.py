"""The input of a forward pass on a GPU, from state that stays there between steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fastgen.kernels.gpu.transfers import upload
from fastgen.model.step_input import IntArray, StepInput

# Alignment of the arrays of an input, in elements: for addresses that are not multiples of 16 bytes, kernels would be
# compiled again.
_ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class DeviceInput:
    """One step with T tokens of S sequences, on the device. All int32.

    Padding, if any, follows the values: tokens with slot -1, sequences without tokens and keys, logit rows 0, and
    sampled rows -1.

    Attributes:
        token_ids: [T]; -1 stands for the token sampled last for the token's row.
        source_rows: [T], row of each token's sequence.
        last_ids: [rows], token sampled last for each row.
        positions: [T], position of each token in its sequence.
        slot_mapping: [T], cache slot of each token's key and value; -1: they are not written.
        query_starts: [S + 1], first token of each sequence, and the number of tokens without padding.
        seq_lens: [S], keys of each sequence after the step.
        block_tables: [S, M], blocks of each sequence in order; entries beyond its length are arbitrary.
        logit_rows: [R], tokens whose last hidden states are needed: those that sample, then those that are scored
            (`StepInput.scored_tokens`), then those that are pooled.
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


class InputLayout:
    """Layout of a packed input: the offset of each of its arrays in one int32 array.

    Attributes:
        num_tokens, num_sequences, num_logit_rows, num_sampled, num_updates: numbers of these, padding included.
        places: where each array is.
        num_elements: length of the packed array.
    """

    def __init__(
        self, *, num_tokens: int, num_sequences: int, num_logit_rows: int, num_sampled: int, num_updates: int
    ) -> None:
        self.num_tokens, self.num_sequences = num_tokens, num_sequences
        self.num_logit_rows, self.num_sampled, self.num_updates = num_logit_rows, num_sampled, num_updates
        # What is sampled comes first: it is at the same addresses in all layouts with the same `num_sampled`.
        sizes = {
            "sampled_rows": num_sampled,
            "sampled_positions": num_sampled,
            "token_ids": num_tokens,
            "source_rows": num_tokens,
            "positions": num_tokens,
            "slot_mapping": num_tokens,
            "query_starts": num_sequences + 1,
            "seq_lens": num_sequences,
            "rows": num_sequences,
            "logit_rows": num_logit_rows,
            "update_places": num_updates,
            "update_blocks": num_updates,
        }
        self.places: dict[str, slice] = {}
        end = 0
        for name, size in sizes.items():
            self.places[name] = slice(end, end + size)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.num_elements = end

    @classmethod
    def exact(cls, step: StepInput) -> InputLayout:
        """Return the layout of a step without padding."""
        return cls(
            num_tokens=step.num_tokens,
            num_sequences=len(step.rows),
            num_logit_rows=len(step.sampled) + len(step.scored_tokens) + len(step.pooled_tokens),
            num_sampled=len(step.sampled),
            num_updates=step.table_updates.shape[1],
        )

    @classmethod
    def padded(cls, num_tokens: int, max_rows: int, block_size: int) -> InputLayout:
        """Return the layout for steps of up to `num_tokens` tokens and `max_rows` sequences.

        It has room for one logit row for each sequence; prompt logprobs and pooling may need more. `num_sampled` is
        `max_rows`, so that graphs of the sampler find its input for any number of tokens. It has room for the
        blocks of these tokens; a sequence with a prefix from the cache, or one that is swapped in, has more.
        """
        most = min(num_tokens, max_rows)
        return cls(
            num_tokens=num_tokens,
            num_sequences=most,
            num_logit_rows=most,
            num_sampled=max_rows,
            num_updates=most + num_tokens // block_size,
        )

    def part(self, array: torch.Tensor, name: str) -> torch.Tensor:
        """Return the view of one array in `array` [num_elements]."""
        return array[self.places[name]]

    def pack(self, step: StepInput, table_length: int, unused_place: int) -> IntArray:
        """Return the arrays of a step, padded. Updates of block tables beyond `num_updates` are left out.

        Args:
            step: a step that fits, except for its updates.
            table_length: entries of a row of the block tables.
            unused_place: index in the flat block tables that padded updates write to.
        """
        counts = np.diff(step.query_starts)
        rows, columns, blocks = step.table_updates[:, : self.num_updates]
        packed = np.zeros(self.num_elements, np.int32)
        parts = {name: packed[part] for name, part in self.places.items()}
        parts["slot_mapping"][:] = -1
        parts["query_starts"][:] = step.num_tokens
        parts["sampled_rows"][:] = -1
        parts["update_places"][:] = unused_place
        for name, values in (
            ("token_ids", step.token_ids),
            ("source_rows", np.repeat(step.rows, counts)),
            ("positions", np.repeat(step.seq_lens - step.query_starts[1:], counts) + np.arange(step.num_tokens)),
            ("slot_mapping", step.slot_mapping),
            ("query_starts", step.query_starts),
            ("seq_lens", step.seq_lens),
            ("rows", step.rows),
            (
                "logit_rows",
                np.concatenate((step.query_starts[1:][step.sampled] - 1, step.scored_tokens, step.pooled_tokens)),
            ),
            ("sampled_rows", step.rows[step.sampled]),
            ("sampled_positions", step.seq_lens[step.sampled]),
            ("update_places", rows * table_length + columns),
            ("update_blocks", blocks),
        ):
            parts[name][: len(values)] = values
        return packed


class DeviceRows:
    """The block tables of all rows, on the device.

    Args:
        max_rows: number of rows.
        max_blocks: blocks of the longest sequence.
        last_ids: [max_rows] int32, on the device, which the sampler writes.
    """

    def __init__(self, max_rows: int, max_blocks: int, last_ids: torch.Tensor) -> None:
        # One more row, which only padded updates write.
        self._tables = torch.zeros(max_rows + 1, max_blocks, dtype=torch.int32, device=last_ids.device)
        self._last_ids = last_ids

    @property
    def max_rows(self) -> int:
        """Number of rows."""
        return len(self._last_ids)

    def apply(self, step: StepInput) -> DeviceInput:
        """Apply the updates of a step and return its input.

        This takes one upload and does not wait for the device.
        """
        layout = InputLayout.exact(step)
        return self.read(upload(self.pack(step, layout), self._tables.device), layout)

    def pack(self, step: StepInput, layout: InputLayout) -> IntArray:
        """Return the arrays of a step for `read`; see `InputLayout.pack`."""
        max_blocks = self._tables.shape[1]
        return layout.pack(step, max_blocks, unused_place=self.max_rows * max_blocks)

    def read(self, packed: torch.Tensor, layout: InputLayout) -> DeviceInput:
        """Apply the updates in `packed` [layout.num_elements], on the device.

        Return the input. Its arrays are views of `packed`, except for `last_ids` and `block_tables`.
        """
        parts = {name: packed[place] for name, place in layout.places.items()}
        places, blocks, rows = parts.pop("update_places"), parts.pop("update_blocks"), parts.pop("rows")
        if layout.num_updates:
            self._write(places, blocks)
        return DeviceInput(last_ids=self._last_ids, block_tables=self._tables.index_select(0, rows), **parts)

    def update(self, table_updates: IntArray) -> None:
        """Write entries [3, n] of block tables, as in `StepInput`, with an upload of their own."""
        rows, columns, blocks = table_updates
        packed = upload(np.concatenate((rows * self._tables.shape[1] + columns, blocks)), self._tables.device)
        self._write(packed[: len(rows)], packed[len(rows) :])

    def _write(self, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Write `blocks` [n] to `places` [n] of the flat block tables."""
        self._tables.view(-1).index_copy_(0, places.long(), blocks)

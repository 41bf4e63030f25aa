"""The work list of paged attention: equal shares of a step's KV tiles for the programs of each launch.

The rows of a sequence are cut into tiles of some tokens, and a tile has a range of KV tiles: those with keys that its
tokens attend to. All tiles of a launch are put in a row, each with its KV tiles and `ITEM_COST` more for what a program
does once for a tile. The row is cut into equal shares, one for each persistent program (Stream-K: Osama et al., 2023).
A cut within a tile splits it: programs that follow each other compute parts of its range, and the last one to finish
adds them. So no program has more than its share and the cost of a tile that another has begun.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import torch

from fastgen.kernels.gpu.attention_tiles import ITEM_FIELDS, TileClass, classes_of
from fastgen.kernels.gpu.operators import operator

# Cost of a tile besides its KV tiles, in KV tiles: its addresses, its queries, the start of the loads, its result.
ITEM_COST = 2
# Smallest share: a shorter range is not worth the addition of its partial result.
LEAST_SHARE = 4


@dataclass(frozen=True, slots=True)
class WorkItem:
    """A tile, or a part of its range of keys. It is stored as ITEM_FIELDS elements, in this order.

    Attributes:
        sequence: its number in the step.
        row: first row of the tile in the step.
        num_tokens: rows of the tile.
        position: of its first token.
        first_tile, end_tile: range of KV tiles.
        split, num_splits: which part of the tile's range this is, and of how many. Parts are computed by programs that
            follow each other: part 0 by the program `split` programs before.
    """

    sequence: int
    row: int
    num_tokens: int
    position: int
    first_tile: int
    end_tile: int
    split: int
    num_splits: int


@operator()
def list_attention_work(
    query: torch.Tensor, key_cache: torch.Tensor, query_starts: torch.Tensor, seq_lens: torch.Tensor, window: int = 0
) -> torch.Tensor:
    """Return the work list of a step: int32, with a part for each of `classes_of(...)`.

    On a GPU this is one launch, which needs no lengths on the host. The list serves all layers with this window.

    Args:
        query, key_cache: as in `paged_attention`; only their shapes and types matter.
        query_starts, seq_lens, window: as in `paged_attention`.
    """
    work = []
    for tiles in classes_of(query, key_cache, len(seq_lens)):
        part = query_starts.new_zeros(tiles.work_elements(len(seq_lens)))
        programs = part[: 2 * tiles.num_programs].view(-1, 2)
        items = part[2 * tiles.num_programs :]
        number = 0
        for program, its_items in enumerate(work_items(query_starts.tolist(), seq_lens.tolist(), tiles, window)):
            programs[program, 0], programs[program, 1] = number, number + len(its_items)
            for item in its_items:
                items[number * ITEM_FIELDS :][:ITEM_FIELDS] = torch.tensor(astuple(item))
                number += 1
        work.append(part)
    return torch.cat(work)


def work_items(
    query_starts: Sequence[int], seq_lens: Sequence[int], tiles: TileClass, window: int
) -> list[list[WorkItem]]:
    """Return the items of each program of a KV head; arguments as in `list_attention_work`."""
    whole, block_n = [], tiles.configuration.block_n
    for sequence, length in enumerate(seq_lens):
        start, rows = query_starts[sequence], query_starts[sequence + 1] - query_starts[sequence]
        if not tiles.least_rows <= rows <= tiles.most_rows:
            continue
        for first in range(0, rows, tiles.block_q):
            position, num_tokens = length - rows + first, min(tiles.block_q, rows - first)
            first_key = max(position - window + 1, 0) if window else 0
            end_tile = -(-(position + num_tokens) // block_n)
            whole.append(WorkItem(sequence, start + first, num_tokens, position, first_key // block_n, end_tile, 0, 1))
    total = sum(item.end_tile - item.first_tile + ITEM_COST for item in whole)
    share = max(-(-total // tiles.num_programs), LEAST_SHARE)
    programs: list[list[WorkItem]] = [[] for _ in range(tiles.num_programs)]
    place = 0  # where the tile begins in the row of all tiles
    for item in whole:
        count = item.end_tile - item.first_tile
        first_program, last_program = place // share, (place + count - 1) // share
        for program in range(first_program, last_program + 1):
            begin, end = max(program * share - place, 0), min((program + 1) * share - place, count)
            part = {"split": program - first_program, "num_splits": last_program - first_program + 1}
            keys = {"first_tile": item.first_tile + begin, "end_tile": item.first_tile + end}
            programs[program].append(replace(item, **keys, **part))
        place += count + ITEM_COST
    return programs

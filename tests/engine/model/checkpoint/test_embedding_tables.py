"""Embedding tables: every row is exact, and memory holds the stored format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fastgen.model.checkpoint.checkpoint import EmbeddingTable
from fastgen.model.config.architecture import EMBEDDING
from fastgen.model.native import open_checkpoint
from fastgen.model.source import ModelSource
from support.tiny_models import saved

ROWS = torch.tensor([5, 0, 5, 156, 80])


def held(table: EmbeddingTable) -> int:
    """Return the bytes of the arrays that a table keeps."""
    cells = [cell.cell_contents for cell in getattr(table, "__closure__", ())]
    return sum(cell.nbytes for cell in cells if isinstance(cell, np.ndarray | torch.Tensor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_of_a_safetensors_embedding_equal_those_of_the_matrix(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = saved("llama", tmp_path)
    weights = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    stored = open_checkpoint(ModelSource.open(str(folder))).stored(EMBEDDING)
    table = stored.table()
    assert table(ROWS).dtype == torch.float32
    assert torch.equal(table(ROWS), stored.float32()[ROWS])
    assert held(table) == stored.float32().numel() * dtype.itemsize


def test_rows_of_a_gguf_embedding_equal_those_of_the_matrix_and_stay_quantised(demo_source: ModelSource) -> None:
    stored = open_checkpoint(demo_source).stored(EMBEDDING)
    table, whole = stored.table(), stored.float32()
    rows = torch.tensor([0, 49151, 7, 7, 12345])
    assert torch.equal(table(rows), whole[rows])
    assert held(table) < whole.nbytes / 3

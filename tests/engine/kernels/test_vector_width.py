"""Kernels in the form for processors with 512-bit vectors, which LLVM can compile for others too."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

WIDE = """
import fastgen.kernels.cpu.vector_width as lanes
lanes.has_wide_vectors = lambda: True
lanes.WIDTH, lanes.TILE_COLUMNS = 16, 48

import numpy as np
import torch

from fastgen.kernels import reference
from fastgen.kernels.cpu.attention.prefill import attend_chunks
from fastgen.kernels.cpu.attention.work_items import cut_chunks
from fastgen.kernels.cpu.vector_width import TILE_COLUMNS
from fastgen.model.layers.linear import TiledLinear

assert TILE_COLUMNS == 48
torch.manual_seed(0)
weight, x = torch.randn(100, 300), torch.randn(7, 300)
torch.testing.assert_close(TiledLinear(weight)(x), x @ weight.T, atol=1e-4, rtol=0)

keys, values, queries = torch.randn(4, 2, 64, 32), torch.randn(4, 2, 64, 32), torch.randn(70, 6, 32)
table, out, scale = np.array([2, 0, 3]), torch.empty(70, 6, 32), 32**-0.5
items = cut_chunks(np.array([(0, 70, 90, 0)]), lanes=TILE_COLUMNS, num_kv_heads=2, group=3, num_threads=2)
arrays = (array.numpy() for array in (queries, keys, values))
sinks = torch.randn(6)
attend_chunks(*arrays, table, items, out.numpy(), np.float32(scale), np.float32(0), sinks.numpy(), False)
expected = reference.paged_attention(queries, keys, values, torch.from_numpy(table), 90, scale, sinks=sinks)
torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
"""


@pytest.mark.slow
def test_wide_tiles_give_the_results_of_narrow_ones() -> None:
    # A separate folder: otherwise the compiled code would later be used as that of this processor.
    folder = Path(os.environ["NUMBA_CACHE_DIR"]) / f"wide-{hashlib.sha256(WIDE.encode()).hexdigest()[:8]}"
    subprocess.run([sys.executable, "-c", WIDE], env={**os.environ, "NUMBA_CACHE_DIR": str(folder)}, check=True)

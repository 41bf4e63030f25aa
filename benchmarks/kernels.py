"""CPU kernels compared with the library calls that they replace: `python benchmarks/kernels.py`.

Matrix products are compared with oneDNN's packed ones, and attention of a prefill chunk with torch's. Values are
random, shapes are those of SmolLM2-135M, and all 30 layers run in sequence so that no weight stays in a cache. The two
are called alternately; each figure is the median ratio of consecutive times, with its quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from fastgen.kernels.cpu import environment

environment.prepare()

import numpy as np  # noqa: E402  (OpenMP reads the environment when it is imported)
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from fastgen.kernels.cpu import prefill_work_items  # noqa: E402
from fastgen.kernels.cpu.prefill_attention import attend_chunks  # noqa: E402
from fastgen.kernels.cpu.vector_width import LANES  # noqa: E402
from fastgen.model.layers.linear import OneDNNLinear, TiledLinear  # noqa: E402

LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 64
# [out, in] of a layer's products: fused QKV, attention output, fused gate and up, down.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
ROWS = (1, 8, 16, 64, 128, 256)
# Tokens of a chunk, and of the context before it.
CHUNKS = ((56, 256), (120, 128), (248, 0), (248, 256), (248, 1024))

Run = Callable[[], object]


def ratio(ours: Run, theirs: Run, seconds: float) -> str:
    """Return median and quartiles of the time ratios of two alternating calls."""

    def timed(run: Run) -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    ours(), theirs()
    ratios: list[float] = []
    end = time.perf_counter() + seconds
    while len(ratios) < 5 or time.perf_counter() < end:
        ratios.append(timed(ours) / timed(theirs))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def products(kind: type[TiledLinear] | type[OneDNNLinear]) -> Callable[[int], Run]:
    """Return a factory of functions that compute all layers' products for a number of rows."""
    generator = torch.Generator().manual_seed(0)
    layers = [kind(torch.randn(shape, generator=generator)) for _ in range(LAYERS) for shape in SHAPES]
    shapes = SHAPES * LAYERS

    def of(rows: int) -> Run:
        inputs = {width: torch.randn(rows, width) for _, width in SHAPES}

        def run() -> None:
            for layer, (_, width) in zip(layers, shapes, strict=True):
                layer(inputs[width])

        return run

    return of


def attention(tokens: int, context: int) -> tuple[Run, Run]:
    """Return two functions that compute all layers' attention of one chunk: our kernel and torch's. Checks equality."""
    generator = torch.Generator().manual_seed(0)
    blocks = -(-(context + tokens) // BLOCK_SIZE)
    shape = (LAYERS, blocks, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    queries = torch.randn(tokens, HEADS, HEAD_DIM, generator=generator)
    table = torch.randperm(blocks, generator=generator)
    out = torch.empty_like(queries)
    scale = HEAD_DIM**-0.5

    def ours() -> torch.Tensor:
        items = prefill_work_items.cut(
            np.array([(0, tokens, context, 0)], np.int64),
            lanes=LANES,
            num_kv_heads=KV_HEADS,
            group=HEADS // KV_HEADS,
            num_threads=torch.get_num_threads(),
            window=None,
        )
        for layer in range(LAYERS):
            pages = keys[layer].numpy(), values[layer].numpy()
            attend_chunks(queries.numpy(), *pages, table.numpy(), items, out.numpy(), np.float32(scale), np.float32(0))
        return out

    def gathered(pages: torch.Tensor) -> torch.Tensor:
        """Return keys or values [heads, context + tokens, head_dim], repeated for the heads of a group."""
        rows = pages[table].transpose(0, 1).reshape(KV_HEADS, -1, HEAD_DIM)[:, : context + tokens]
        return rows.repeat_interleave(HEADS // KV_HEADS, 0)

    def theirs() -> torch.Tensor:
        mask = torch.ones(tokens, context + tokens, dtype=torch.bool).tril_(context)
        for layer in range(LAYERS):
            attended = F.scaled_dot_product_attention(
                queries.transpose(0, 1)[None], gathered(keys[layer])[None], gathered(values[layer])[None], mask
            )
        return attended[0].transpose(0, 1).contiguous()

    torch.testing.assert_close(ours(), theirs(), atol=1e-5, rtol=0)
    return ours, theirs


def main() -> None:
    """Print both tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each figure (default: 5)")
    seconds: float = parser.parse_args().seconds
    torch.set_num_threads(environment.usable_cpus())
    torch.set_grad_enabled(False)

    tiled, onednn = products(TiledLinear), products(OneDNNLinear)
    print("| rows | " + " | ".join(map(str, ROWS)) + " |")
    print("|---" * (len(ROWS) + 1) + "|")
    print("| products : oneDNN | " + " | ".join(ratio(tiled(n), onednn(n), seconds) for n in ROWS) + " |\n")
    print("| chunk | " + " | ".join(f"{tokens} after {context}" for tokens, context in CHUNKS) + " |")
    print("|---" * (len(CHUNKS) + 1) + "|")
    print("| attention : torch's | " + " | ".join(ratio(*attention(*chunk), seconds) for chunk in CHUNKS) + " |")


if __name__ == "__main__":
    main()

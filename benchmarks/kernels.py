"""CPU kernels compared with the library calls that they replace: `python benchmarks/kernels.py`.

Matrix products are compared with oneDNN's packed ones, and those with quantised activations, on processors with
AVX512-VNNI, with oneDNN's in bfloat16 and with our weight-only product, those of 4 bits with both; the head in
bfloat16, which returns float32, on processors with AVX512-BF16, with oneDNN's, which rounds, and a conversion to
float32; those with int8 weights, attention and the element-wise kernels with torch's operations. Values are random,
shapes are those of SmolLM2-135M, and all layers run in sequence so that no weight stays in a cache. The two are called
alternately; each figure is the median ratio of consecutive times, with its quartiles.

`--one-thread`: see `paired_timing`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from paired_timing import NUM_THREADS, clock, quartiles  # isort: skip  (before torch)

import numpy as np
import torch
import torch.nn.functional as F

from fastgen.kernels.cpu import elementwise
from fastgen.kernels.cpu.attention.decode import NO_SINK, attend_decodes
from fastgen.kernels.cpu.attention.prefill import attend_chunks
from fastgen.kernels.cpu.attention.work_items import DecodeItems, cut_chunks
from fastgen.kernels.cpu.vector_width import TILE_COLUMNS, has_bfloat16, has_vnni
from fastgen.model.checkpoint.int8_blocks import Int8Blocks
from fastgen.model.checkpoint.packed_blocks import Factors, PackedBlocks
from fastgen.model.layers.bfloat16_linear import BFloat16Head
from fastgen.model.layers.int8_linear import Int8Linear, Int8VNNILinear
from fastgen.model.layers.linear import OneDNNLinear, TiledLinear
from fastgen.model.layers.packed_linear import PackedLinear

HIDDEN, INTERMEDIATE, VOCABULARY = 576, 1536, 49152
LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 30, 9, 3, 64, 64
NO_SINKS = np.full(HEADS, NO_SINK, np.float32)
# [out, in] of a layer's products: fused QKV, attention output, fused gate and up, down.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
ROWS = (1, 8, 16, 64, 128, 256)
# Tokens of a chunk, and of the context before it.
CHUNKS = ((56, 256), (120, 128), (248, 0), (248, 256), (248, 1024))
# Decodes, and the context of each.
DECODES = ((1, 512), (8, 512), (8, 2048))
ELEMENTWISE_ROWS = (1, 8, 64, 256)

Run = Callable[[], object]


def ratio(ours: Run, theirs: Run, seconds: float) -> str:
    """Return median and quartiles of the time ratios of two alternating calls."""

    def timed(run: Run) -> float:
        started = clock()
        run()
        return clock() - started

    ours(), theirs()
    ratios: list[float] = []
    end = clock() + seconds
    while len(ratios) < 5 or clock() < end:
        ratios.append(timed(ours) / timed(theirs))
    return quartiles(ratios)


class TorchInt8:
    """torch's product with int8 weights, one scale for each output, which computes in bfloat16."""

    def __init__(self, weight: torch.Tensor) -> None:
        scales = weight.abs().amax(1) / 127
        self._values, self._scales = (weight / scales[:, None]).round().to(torch.int8), scales.bfloat16()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the product."""
        return torch._weight_int8pack_mm(x.bfloat16(), self._values, self._scales).float()


def our_int8(weight: torch.Tensor) -> Int8Linear:
    """Return our product with the weight in int8 blocks."""
    return Int8Linear(Int8Blocks.quantise(weight.numpy()))


def our_vnni(weight: torch.Tensor) -> Int8VNNILinear:
    """Return our product of quantised activations with the weight in int8 blocks."""
    return Int8VNNILinear(Int8Blocks.quantise(weight.numpy()))


def our_four_bits(weight: torch.Tensor) -> PackedLinear:
    """Return our product of quantised activations with weights like Q4_0's, whose values are random."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 16, tuple(weight.shape), dtype=np.uint8)
    halves = rng.uniform(0.01, 0.02, (len(weight), weight.shape[1] // 32)).astype(np.float16)
    return PackedLinear(PackedBlocks(4, values, 8, Factors(halves)))


def onednn_bfloat16(weight: torch.Tensor) -> OneDNNLinear:
    """Return oneDNN's product in bfloat16."""
    return OneDNNLinear(weight.bfloat16())


def heads() -> Callable[[int], tuple[Run, Run]]:
    """Return a factory of functions that compute float32 logits of a number of rows: our head, and oneDNN's product."""
    weight = torch.randn(VOCABULARY, HIDDEN).bfloat16()
    ours, theirs = BFloat16Head(weight), OneDNNLinear(weight)

    def of(rows: int) -> tuple[Run, Run]:
        hidden = torch.randn(rows, HIDDEN).bfloat16()
        return lambda: ours(hidden), lambda: theirs(hidden).float()

    return of


def products(
    kind: Callable[[torch.Tensor], Callable[[torch.Tensor], torch.Tensor]], dtype: torch.dtype = torch.float32
) -> Callable[[int], Run]:
    """Return a factory of functions that compute all layers' products for a number of rows in `dtype`."""
    generator = torch.Generator().manual_seed(0)
    layers = [kind(torch.randn(shape, generator=generator)) for _ in range(LAYERS) for shape in SHAPES]
    shapes = SHAPES * LAYERS

    def of(rows: int) -> Run:
        inputs = {width: torch.randn(rows, width).to(dtype) for _, width in SHAPES}

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
        items = cut_chunks(
            np.array([(0, tokens, context, 0)], np.int64),
            lanes=TILE_COLUMNS,
            num_kv_heads=KV_HEADS,
            group=HEADS // KV_HEADS,
            num_threads=torch.get_num_threads(),
            window=None,
        )
        for layer in range(LAYERS):
            pages = keys[layer].numpy(), values[layer].numpy()
            factors = np.float32(scale), np.float32(0), NO_SINKS
            attend_chunks(queries.numpy(), *pages, table.numpy(), items, out.numpy(), *factors, False)
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


def decoding(count: int, context: int) -> tuple[Run, Run]:
    """Return two functions that compute all layers' attention of `count` decodes: our kernel and torch's."""
    generator = torch.Generator().manual_seed(0)
    each = -(-context // BLOCK_SIZE)
    shape = (LAYERS, count * each, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    queries = torch.randn(count, HEADS, HEAD_DIM, generator=generator)
    tables = torch.randperm(count * each, generator=generator)
    out, group, scale = torch.empty_like(queries), HEADS // KV_HEADS, HEAD_DIM**-0.5

    def ours() -> torch.Tensor:
        work = DecodeItems.cut(
            np.full(count, context),
            np.arange(count) * each,
            num_kv_heads=KV_HEADS,
            num_threads=torch.get_num_threads(),
        )
        parts = np.empty((work.num_parts, group, HEAD_DIM + 2), np.float32)
        for layer in range(LAYERS):
            pages = keys[layer].numpy(), values[layer].numpy()
            items = tables.numpy(), work.items, work.merges, parts, out.numpy()
            attend_decodes(queries.numpy(), *pages, *items, np.float32(scale), np.float32(0), NO_SINKS)
        return out

    def gathered(pages: torch.Tensor) -> torch.Tensor:
        """Return keys or values [count, kv heads, context, head_dim]."""
        rows = pages[tables].view(count, each, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        return rows.transpose(1, 2).reshape(count, KV_HEADS, -1, HEAD_DIM)[:, :, :context]

    def theirs() -> torch.Tensor:
        for layer in range(LAYERS):
            # The queries of a group are the rows of one head: none sees the future.
            grouped = queries.view(count, KV_HEADS, group, HEAD_DIM)
            attended = F.scaled_dot_product_attention(grouped, gathered(keys[layer]), gathered(values[layer]))
        return attended.reshape(count, HEADS, HEAD_DIM)

    torch.testing.assert_close(ours(), theirs(), atol=1e-5, rtol=0)
    return ours, theirs


def norms(rows: int) -> tuple[Run, Run]:
    """Return two functions that add and normalise as often as a step does: our kernel and torch's operations."""
    stream, update, weight = torch.randn(rows, HIDDEN), torch.zeros(rows, HIDDEN), torch.rand(HIDDEN)
    out, epsilon = torch.empty(rows, HIDDEN), np.float32(1e-5)
    arrays = stream.numpy(), update.numpy(), weight.numpy()

    def ours() -> None:
        for _ in range(2 * LAYERS):
            elementwise.add_rms_norm(*arrays, epsilon, out.numpy())

    def theirs() -> None:
        for _ in range(2 * LAYERS):
            F.rms_norm(stream.add_(update), (HIDDEN,), weight, 1e-5)

    return ours, theirs


def gates(rows: int) -> tuple[Run, Run]:
    """Return two functions that compute all layers' gates: our kernel and torch's operations."""
    gate_up, out = torch.randn(rows, 2 * INTERMEDIATE), torch.empty(rows, INTERMEDIATE)

    def ours() -> None:
        for _ in range(LAYERS):
            elementwise.silu_multiply(gate_up.numpy(), out.numpy())

    def theirs() -> None:
        for _ in range(LAYERS):
            gate, up = gate_up.chunk(2, -1)
            F.silu(gate).mul_(up)

    return ours, theirs


def print_row(name: str, headings: list[str], cells: list[str]) -> None:
    """Print a table of one row as Markdown."""
    print("| | " + " | ".join(headings) + " |")
    print("|---" * (len(headings) + 1) + "|")
    print(f"| {name} | " + " | ".join(cells) + " |\n", flush=True)


def main() -> None:
    """Print the tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each figure (default: 5)")
    parser.add_argument("--one-thread", action="store_true", help="compare the processor time of one thread")
    seconds: float = parser.parse_args().seconds
    torch.set_num_threads(NUM_THREADS)
    torch.set_grad_enabled(False)

    rows = [str(count) for count in ROWS]
    ours, theirs = products(TiledLinear), products(OneDNNLinear)
    print_row("products : oneDNN's", rows, [ratio(ours(n), theirs(n), seconds) for n in ROWS])
    ours, theirs = products(our_int8), products(TorchInt8)
    print_row("int8 products : torch's", rows, [ratio(ours(n), theirs(n), seconds) for n in ROWS])
    if has_vnni():
        quantised = products(our_vnni)
        print_row("VNNI : weight-only int8", rows, [ratio(quantised(n), ours(n), seconds) for n in ROWS])
        ours, theirs = products(our_vnni, torch.bfloat16), products(onednn_bfloat16, torch.bfloat16)
        print_row("VNNI : oneDNN's in bfloat16", rows, [ratio(ours(n), theirs(n), seconds) for n in ROWS])
        packed = products(our_four_bits, torch.bfloat16)
        print_row("4 bits : VNNI with 8 bits", rows, [ratio(packed(n), ours(n), seconds) for n in ROWS])
        print_row("4 bits : oneDNN's in bfloat16", rows, [ratio(packed(n), theirs(n), seconds) for n in ROWS])
    if has_bfloat16():
        head = heads()
        print_row("head in bfloat16 : oneDNN's", rows, [ratio(*head(n), seconds) for n in ROWS])
    chunks = [f"{tokens} after {context}" for tokens, context in CHUNKS]
    print_row("attention of a chunk : torch's", chunks, [ratio(*attention(*chunk), seconds) for chunk in CHUNKS])
    decodes = [f"{count} decodes @{context}" for count, context in DECODES]
    print_row("attention of decodes : torch's", decodes, [ratio(*decoding(*each), seconds) for each in DECODES])
    rows = [str(count) for count in ELEMENTWISE_ROWS]
    print_row("norms : torch's", rows, [ratio(*norms(n), seconds) for n in ELEMENTWISE_ROWS])
    print_row("gates : torch's", rows, [ratio(*gates(n), seconds) for n in ELEMENTWISE_ROWS])


if __name__ == "__main__":
    main()

"""Time of one forward pass, and its share of matrix products: `python benchmarks/forward_pass.py MODEL`.

The floor is the time of the step's packed products alone, measured in the same run right after the step. The rest is
attention, element-wise operations and Python. Each figure is the minimum of its repeats, because other load on the
machine only adds time.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

from timing import least_seconds

from fastgen.kernels.cpu import environment

environment.prepare()

import torch  # noqa: E402  (OpenMP reads the environment when it is imported)

from fastgen.core.request import Request  # noqa: E402
from fastgen.core.sampling_params import SamplingParams  # noqa: E402
from fastgen.core.sequence import Sequence  # noqa: E402
from fastgen.core.step_plan import Chunk, StepPlan  # noqa: E402
from fastgen.kv_cache.tensors import KVCache  # noqa: E402
from fastgen.model.forward_input import HostRows  # noqa: E402
from fastgen.model.layers.cpu_backend import CPUBackend  # noqa: E402
from fastgen.model.layers.decoder import Decoder  # noqa: E402
from fastgen.model.layers.linear import PackedFormat  # noqa: E402
from fastgen.model.layers.weights import MLP, DecoderWeights  # noqa: E402
from fastgen.model.native import make_ropes, open_checkpoint  # noqa: E402
from fastgen.model.source import ModelSource  # noqa: E402
from fastgen.model.step_input import StepInputBuilder  # noqa: E402

BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Scenario:
    """A step: contexts of its decodes (including their own token), and (context, tokens) of its chunks."""

    name: str
    decodes: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...] = ()


EIGHT = (512,) * 8
SCENARIOS = (
    Scenario("1 decode @512", (512,)),
    Scenario("1 decode @4096", (4096,)),
    Scenario("8 decodes @512", EIGHT),
    Scenario("8 decodes + 56 @0", EIGHT, ((0, 56),)),
    Scenario("8 decodes + 56 @256", EIGHT, ((256, 56),)),
    Scenario("64 decodes @512", (512,) * 64),
    Scenario("8 decodes + 120 @128", EIGHT, ((128, 120),)),
    Scenario("8 decodes + 248 @0", EIGHT, ((0, 248),)),
    Scenario("8 decodes + 248 @256", EIGHT, ((256, 248),)),
    Scenario("8 decodes + 248 @1024", EIGHT, ((1024, 248),)),
    Scenario("8 decodes + 504 @0", EIGHT, ((0, 504),)),
)


def make_plan(scenario: Scenario, vocabulary: int) -> tuple[StepPlan, int]:
    """Return the step plan, with blocks in random order, and the number of blocks it needs."""
    lengths = [(context - 1, 1) for context in scenario.decodes] + list(scenario.chunks)
    sizes = [-(-(start + count) // BLOCK_SIZE) for start, count in lengths]
    blocks = iter(random.Random(0).sample(range(sum(sizes)), sum(sizes)))
    chunks = []
    for number, ((start, count), size) in enumerate(zip(lengths, sizes, strict=True)):
        tokens = random.Random(number).choices(range(vocabulary), k=start + count)
        request = Request(id=str(number), prompt_token_ids=tokens, sampling=SamplingParams(temperature=0))
        sequence = Sequence(request, ordinal=number, arrival=0.0, seed=0)
        sequence.block_table = [next(blocks) for _ in range(size)]
        sequence.num_computed_tokens = start
        chunks.append(Chunk(sequence, start, count))
    return StepPlan(tuple(chunks)), sum(sizes)


def products_only(weights: DecoderWeights, num_rows: int, num_sampled: int, dtype: torch.dtype) -> Callable[[], None]:
    """Return a function that computes the step's matrix products on prepared rows."""
    a = weights.architecture
    shapes = (
        (num_rows, a.hidden_size),
        (num_rows, a.intermediate_size),
        (num_rows, a.num_heads * a.head_dim),
        (num_sampled, a.hidden_size),
    )
    hidden, inner, attended, sampled = (torch.randn(shape).to(dtype) for shape in shapes)

    def run() -> None:
        for layer in weights.layers:
            layer.qkv(hidden)
            layer.attention_output(attended)
            assert isinstance(layer.mlp, MLP), "mixtures of experts have no fixed products"
            layer.mlp.gate_up(hidden)
            layer.mlp.down(inner)
        weights.head(sampled)

    return run


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file or a Hugging Face directory")
    parser.add_argument("--seconds", type=float, default=1.5, help="time for each measurement (default: 1.5)")
    parser.add_argument("--only", default="", help="run the scenarios whose name contains this")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    arguments = parser.parse_args()

    num_threads = environment.usable_cpus()
    torch.set_num_threads(num_threads)
    torch.set_grad_enabled(False)
    dtype = getattr(torch, arguments.dtype)
    source = ModelSource.open(arguments.model)
    architecture = source.architecture
    checkpoint = open_checkpoint(source)
    weight_format = PackedFormat(dtype)
    weights = DecoderWeights.load(architecture, checkpoint, weight_format, lambda _fraction: None)
    ropes = make_ropes(architecture, None, checkpoint.rope_factors)
    backend = CPUBackend(architecture, ropes, dtype, weight_format.pads_rows)
    model = Decoder(weights, backend, device=torch.device("cpu"), dtype=dtype)
    size = f"{architecture.num_parameters / 1e6:.0f} M parameters"
    print(f"{arguments.model}: {size}, {arguments.dtype}, {num_threads} threads")
    print(f"{'pass':24} {'tokens':>6} {'ms':>8} {'tokens/s':>9} {'products ms':>12} {'share':>6}")
    for scenario in SCENARIOS:
        if arguments.only not in scenario.name:
            continue
        plan, num_blocks = make_plan(scenario, architecture.vocab_size)
        cache = KVCache(model.kv_shape, num_blocks, BLOCK_SIZE, dtype=dtype)
        cache.keys.normal_()
        cache.values.normal_()

        # Sequences remember which blocks they have sent, so all repeats share a builder.
        builder, rows = StepInputBuilder(BLOCK_SIZE), HostRows(BLOCK_SIZE)

        def run(
            plan: StepPlan = plan, cache: KVCache = cache, builder: StepInputBuilder = builder, rows: HostRows = rows
        ) -> torch.Tensor:
            return model.head(model.forward(rows.apply(builder.build(plan)), cache))

        seconds = least_seconds(run, arguments.seconds)
        num_sampled = sum(chunk.samples for chunk in plan.chunks)
        floor = least_seconds(products_only(weights, plan.num_tokens, num_sampled, dtype), arguments.seconds)
        print(
            f"{scenario.name:24} {plan.num_tokens:6} {seconds * 1e3:8.1f} {plan.num_tokens / seconds:9.0f} "
            f"{floor * 1e3:12.1f} {floor / seconds:6.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()

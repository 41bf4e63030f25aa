"""Bytes and floating-point operations of a step, from the shapes of its tensors.

A step must read each weight that it uses once, read and write the KV cache, and move the inputs and outputs of its
operators and products through the GPU's memory. The table's shares of the peaks are of these counts. Nothing that a
kernel reads twice, and nothing that a cache on the chip may save, is considered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.operator_bytes import (
    add_rms_norm_bytes,
    attention_bytes,
    embed_bytes,
    experts_bytes,
    gated_activation_bytes,
    rotary_cache_bytes,
    route_experts_bytes,
)
from fastgen.model.config.architecture import Experts, ModelArchitecture

_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Work:
    """What a step, or several, must move and compute.

    Attributes:
        weights: bytes of weights.
        cache: bytes of keys and values that attention reads.
        activations: bytes of everything else.
        operations: floating-point operations of products and attention.
    """

    weights: int = 0
    cache: int = 0
    activations: int = 0
    operations: int = 0

    @property
    def num_bytes(self) -> int:
        """All bytes."""
        return self.weights + self.cache + self.activations

    def __add__(self, other: Work) -> Work:
        return Work(
            self.weights + other.weights,
            self.cache + other.cache,
            self.activations + other.activations,
            self.operations + other.operations,
        )

    def floor_seconds(self, bytes_per_second: float, operations_per_second: float) -> float:
        """Return the least time at these peaks: of the memory or of the arithmetic, whichever is longer."""
        return max(self.num_bytes / bytes_per_second, self.operations / operations_per_second)


def step_work(
    architecture: ModelArchitecture,
    sequences: Sequence[tuple[int, int]],
    *,
    num_sampled: int | None = None,
    element_bytes: int = 2,
) -> Work:
    """Count one step.

    A mixture of experts reads the experts that have a token: on average, if each token chooses its own evenly.

    Args:
        architecture: of the model.
        sequences: tokens of each sequence in the step, and its length after it.
        num_sampled: sequences that sample a token; None for all.
        element_bytes: size of one element of weights, activations and cache.
    """
    a, size = architecture, element_bytes
    rows = sum(count for count, _ in sequences)
    sampled = len(sequences) if num_sampled is None else num_sampled
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    rotated = a.rope_configs[0].dimensions
    work = Work(activations=embed_bytes(rows, a.hidden_size, size))
    for index in range(a.num_layers):
        # Beyond its keys and values, the last layer is computed for sampled tokens only.
        after = sampled if index == a.num_layers - 1 else rows
        work += _norm(a, rows, size, with_update=index > 0)
        work += _product(rows, a.hidden_size, queries + 2 * keys, size)
        work += Work(activations=rotary_cache_bytes(rows, a.num_heads, a.num_kv_heads, a.head_dim, rotated, size, size))
        work += attention_work(a, sequences, element_bytes=size)
        work += _product(after, queries, a.hidden_size, size)
        work += _norm(a, after, size, with_update=True)
        mixture = a.layers[index].experts
        work += _mlp(after, a.hidden_size, a.mlp_size, size) if mixture is None else _mixture(after, a, mixture, size)
    if sampled:
        work += _norm(a, sampled, size, with_update=True)
        work += _product(sampled, a.hidden_size, a.vocab_size, size)
        # The sampler reads the logits. It writes scores of rows with penalties or other lists only.
        work += Work(activations=sampled * a.vocab_size * _FLOAT32)
    return work


def attention_work(
    architecture: ModelArchitecture, sequences: Sequence[tuple[int, int]], *, element_bytes: int = 2
) -> Work:
    """Count the attention of one layer; arguments as in `step_work`."""
    a = architecture
    counts, lengths = [count for count, _ in sequences], [length for _, length in sequences]
    total = attention_bytes(lengths, counts, a.num_kv_heads, a.num_heads, a.head_dim, element_bytes)
    cache = attention_bytes(lengths, counts, a.num_kv_heads, 0, a.head_dim, element_bytes)
    # Row i of n sees the length - n + i + 1 keys up to its own; each costs a product with the query and the value.
    pairs = sum(count * (length - count) + count * (count + 1) // 2 for count, length in sequences)
    return Work(cache=cache, activations=total - cache, operations=4 * a.num_heads * a.head_dim * pairs)


def _product(rows: int, inputs: int, outputs: int, size: int) -> Work:
    if not rows:
        return Work()
    return Work(
        weights=inputs * outputs * size,
        activations=rows * (inputs + outputs) * size,
        operations=2 * rows * inputs * outputs,
    )


def _mlp(rows: int, hidden: int, width: int, size: int) -> Work:
    gate_up, down = _product(rows, hidden, 2 * width, size), _product(rows, width, hidden, size)
    return gate_up + Work(activations=gated_activation_bytes(rows, width, size)) + down


def _mixture(rows: int, architecture: ModelArchitecture, experts: Experts, size: int) -> Work:
    hidden, width, shared = architecture.hidden_size, experts.intermediate_size, experts.shared_intermediate_size
    busy = round(experts.count * (1 - (1 - experts.top_k / experts.count) ** rows))
    weights = 3 * busy * hidden * width * size
    moved = experts_bytes(rows, experts.top_k, busy, hidden, width, size)
    work = _product(rows, hidden, experts.count, size)
    work += Work(activations=route_experts_bytes(rows, experts.count, experts.top_k, size))
    work += Work(weights, activations=moved - weights, operations=6 * rows * experts.top_k * hidden * width)
    if shared:
        work += _mlp(rows, hidden, shared, size) + _product(rows, hidden, 1, size)
        work += Work(activations=3 * rows * hidden * size)  # the shared expert's output is scaled and added
    return work


def _norm(architecture: ModelArchitecture, rows: int, size: int, *, with_update: bool) -> Work:
    moved = add_rms_norm_bytes(rows, architecture.hidden_size, size, with_update=with_update, with_norm=False)
    return Work(activations=moved)

"""Counter-based random numbers."""

from __future__ import annotations

import random

import torch

from fastgen.kernels.gpu.sampling.rng import uniform, uniforms


def test_random_numbers_are_uniform_and_depend_on_seed_and_position() -> None:
    numbers = torch.tensor([[uniform(seed, position) for position in range(100)] for seed in range(100)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert (numbers.flatten().histc(10, 0, 1) / 10_000 - 0.1).abs().max() < 0.015
    assert len(numbers.flatten().unique()) > 9_900
    assert abs(torch.corrcoef(torch.stack([numbers[:, 0], numbers[:, 1]]))[0, 1]) < 0.3
    assert uniform(2**63 - 1, 2**20) == uniform(2**63 - 1, 2**20)


def test_vectorised_random_numbers_equal_single_ones() -> None:
    source = random.Random(0)
    seeds = [0, 1, 2**63 - 1, *(source.getrandbits(63) for _ in range(500))]
    positions = [0, 2**20, 2**40, *(source.getrandbits(20) for _ in range(500))]
    assert uniforms(seeds, positions).tolist() == [uniform(*key) for key in zip(seeds, positions, strict=True)]

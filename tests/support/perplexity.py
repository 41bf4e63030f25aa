"""Perplexity of a runner's model on a fixed text: the quality of a number format."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.model.source import ModelSource
from fastgen.runner.runner import ModelRunner
from fastgen.text.tokenizer import Tokenizer
from support.driving import forward_input, sequence

TEXT = (
    "A lighthouse is a tower with a bright light at the top. It is built on the coast or on a rock in the sea, where "
    "it warns ships of shallow water and guides them into a harbour at night. The first lighthouses were open fires on "
    "hills. Later, people burned wood or coal in an iron basket, and then oil in lamps with a mirror behind them. In "
    "1822 a French engineer built a lens of many glass rings, which gathers the light of a small lamp into a strong "
    "beam. With it, sailors could see the light from more than thirty kilometres away. Each tower turns its beam at "
    "its own speed, so that a captain can tell from the rhythm of the flashes where he is. A keeper used to live in "
    "the tower. Every evening he climbed the stairs, trimmed the wick and wound up the clockwork that turned the lens. "
    "Today electric lamps and motors do the work, and most of the keepers are gone."
)


def text_tokens(source: ModelSource) -> list[int]:
    """Return the tokens of TEXT."""
    return Tokenizer.load(source.tokenizer).encode(TEXT, add_special_tokens=False)


@torch.inference_mode()
def perplexity(runner: ModelRunner, tokens: list[int]) -> float:
    """Return the exponential of the mean negative log likelihood of every token but the first, over one chunk."""
    blocks = list(range(-(-len(tokens) // runner.block_size)))
    step = forward_input(StepPlan((Chunk(sequence(tokens, blocks), 0, len(tokens)),)), runner.block_size)
    step = replace(step, logit_rows=np.arange(len(tokens) - 1))
    logits = runner._model.head(runner._model.forward(step, runner._cache)).float()
    return math.exp(torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:])))

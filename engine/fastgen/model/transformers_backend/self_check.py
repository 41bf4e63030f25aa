"""The self-check of an adapted model: a prompt by transformers' own attention and by ours must agree."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import torch

from fastgen.core.request import Request, SamplingParams
from fastgen.core.scheduler import Chunk, StepPlan
from fastgen.core.sequence import Sequence
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.step_input import StepInput
from fastgen.model.transformers_backend.paged_attention import IMPLEMENTATION, NotServedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fastgen.model.transformers_backend.model import TransformersModel

_BLOCK_SIZE = 16
_PROMPT, _NEIGHBOUR = 41, 23
_SIZES = (7, 1, 12, 1, 1, 19)
# Largest root mean square of the error, as a share of the logits' own. Rounding of half precision goes through all
# layers; a wrong mask or position gives errors of the logits' own size.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@torch.inference_mode()
def check(adapted: TransformersModel, model: PreTrainedModel) -> None:
    """Computes a random prompt in one go as transformers does, and in odd chunks beside another prompt as we do.

    Args:
        adapted: the model over our attention.
        model: the same model of transformers.

    Raises:
        NotServedError: when the two differ, or transformers' code fails.
    """
    numbers = random.Random(0)
    prompt, neighbour = (numbers.choices(range(adapted.architecture.vocab_size), k=k) for k in (_PROMPT, _NEIGHBOUR))
    longest = adapted.architecture.max_position_embeddings
    prompt, neighbour = prompt[:longest], neighbour[:longest]
    try:
        expected = _by_transformers(model, prompt, adapted.device)
        actual = _by_chunks(adapted, prompt, neighbour)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
        lines = str(error).splitlines() or [type(error).__name__]
        raise NotServedError(f"something else than a flat pass of tokens and positions ({lines[0]})") from error
    off = (actual - expected).square().mean().sqrt() / expected.std()
    if not off <= _TOLERANCE[adapted.dtype]:
        raise NotServedError(f"something that paged attention does not give: logits are off by {off:.1%}")


def _by_transformers(model: PreTrainedModel, prompt: list[int], device: torch.device) -> torch.Tensor:
    """[n, vocabulary] by transformers' plainest attention."""
    model.config._attn_implementation = "eager"
    try:
        logits: torch.Tensor = model(torch.tensor([prompt], device=device), use_cache=False).logits
    finally:
        model.config._attn_implementation = IMPLEMENTATION
    return logits[0].float()


def _by_chunks(adapted: TransformersModel, prompt: list[int], neighbour: list[int]) -> torch.Tensor:
    """[n, vocabulary] in chunks, the neighbour's tokens in the same passes."""
    num_blocks = -(-(len(prompt) + _BLOCK_SIZE) // _BLOCK_SIZE) * 2
    cache = KVCache(adapted.kv_shape, num_blocks, _BLOCK_SIZE, device=adapted.device, dtype=adapted.dtype)
    ours, theirs = _sequence(prompt, range(1, num_blocks, 2)), _sequence(neighbour, range(0, num_blocks, 2))
    rows = []
    for size in _SIZES:
        chunks = [
            Chunk(subject, subject.num_computed_tokens, min(most, subject.num_pending_tokens))
            for subject, most in ((ours, size), (theirs, 5))
            if subject.num_pending_tokens
        ]
        if not chunks:
            break
        plan = StepPlan(tuple(sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)))
        batch = StepInput.from_plan(plan, block_size=_BLOCK_SIZE)
        hidden = adapted.forward(batch, cache)
        # Scored rows, all but a prompt's last, come behind the sampled ones; only `ours` is scored.
        scored = adapted.head(hidden[batch.num_sampled :])
        sampled = adapted.head(hidden[: batch.num_sampled])
        rows.append(scored)
        last = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        if ours in last:
            rows.append(sampled[last.index(ours)][None])
        for chunk in plan.chunks:
            chunk.sequence.advance(chunk.num_tokens)
    return torch.cat(rows)


def _sequence(tokens: list[int], blocks: range) -> Sequence:
    sampling = SamplingParams(prompt_logprobs=0 if blocks.start else None)
    made = Sequence(Request(id="", prompt_token_ids=tokens, sampling=sampling), ordinal=0, arrival=0.0, seed=0)
    made.block_table = list(blocks)
    return made

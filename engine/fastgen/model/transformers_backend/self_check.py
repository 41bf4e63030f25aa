"""Self-check of a transformers model: logits with transformers' and with paged attention must agree."""

from __future__ import annotations

import random

import torch
from transformers import PreTrainedModel

from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.sequence import Sequence
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.kv_cache.tensors import KVCache
from fastgen.model.forward_input import HostRows
from fastgen.model.step_input import StepInputBuilder
from fastgen.model.transformers_backend.model import TransformersModel
from fastgen.model.transformers_backend.paged_attention import IMPLEMENTATION, NotServedError

_BLOCK_SIZE = 16
_PROMPT_TOKENS, _NEIGHBOUR_TOKENS = 41, 23
_CHUNK_SIZES = (7, 1, 12, 1, 1, 19)
# Upper bound of the root mean square error relative to the standard deviation of the logits. Half precision rounds in
# every layer; a wrong mask or position gives a relative error of about 1.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}


@torch.inference_mode()
def check(adapted: TransformersModel, model: PreTrainedModel) -> None:
    """Compare logits of a random prompt with those of `model`, from which `adapted` is made.

    `model` computes the prompt at once; `adapted` computes it in chunks of different sizes beside another prompt.

    Raises:
        NotServedError: if the logits differ by more than rounding, or attention needs what is not implemented.
            Errors of the model's code pass through.
    """
    numbers, vocabulary = random.Random(0), range(adapted.architecture.vocab_size)
    prompt, neighbour = (numbers.choices(vocabulary, k=size) for size in (_PROMPT_TOKENS, _NEIGHBOUR_TOKENS))
    longest = adapted.architecture.max_position_embeddings
    prompt, neighbour = prompt[:longest], neighbour[:longest]
    expected = _by_transformers(model, prompt, adapted.device)
    actual = _by_chunks(adapted, prompt, neighbour)
    deviation = (actual - expected).square().mean().sqrt() / expected.std()
    if not deviation <= _TOLERANCE[adapted.dtype]:
        raise NotServedError(f"more than paged attention computes: logits are off by {deviation:.1%}")


def _by_transformers(model: PreTrainedModel, prompt: list[int], device: torch.device) -> torch.Tensor:
    """Return logits [n, vocabulary] with transformers' eager attention."""
    model.config._attn_implementation = "eager"
    try:
        logits: torch.Tensor = model(torch.tensor([prompt], device=device), use_cache=False).logits
    finally:
        model.config._attn_implementation = IMPLEMENTATION
    return logits[0].float()


def _by_chunks(adapted: TransformersModel, prompt: list[int], neighbour: list[int]) -> torch.Tensor:
    """Return logits [n, vocabulary] of `prompt`, computed in chunks that share steps with `neighbour`."""
    num_blocks = -(-(len(prompt) + _BLOCK_SIZE) // _BLOCK_SIZE) * 2
    cache = KVCache(adapted.kv_shape, num_blocks, _BLOCK_SIZE, device=adapted.device, dtype=adapted.dtype)
    ours, theirs = _sequence(prompt, range(1, num_blocks, 2)), _sequence(neighbour, range(0, num_blocks, 2))
    builder, host_rows = StepInputBuilder(_BLOCK_SIZE), HostRows(_BLOCK_SIZE)
    rows = []
    for size in _CHUNK_SIZES:
        chunks = [
            Chunk(subject, subject.num_computed_tokens, min(most, subject.num_pending_tokens))
            for subject, most in ((ours, size), (theirs, 5))
            if subject.num_pending_tokens
        ]
        if not chunks:
            break
        plan = StepPlan(tuple(sorted(chunks, key=lambda chunk: chunk.num_tokens > 1)))
        step = builder.build(plan)
        hidden = adapted.forward(host_rows.apply(step), cache)
        # Scored rows, all but a prompt's last, follow the sampled ones; only `ours` is scored.
        scored = adapted.head(hidden[len(step.sampled) :])
        sampled = adapted.head(hidden[: len(step.sampled)])
        rows.append(scored)
        last = [chunk.sequence for chunk in plan.chunks if chunk.samples]
        if ours in last:
            rows.append(sampled[last.index(ours)][None])
        for chunk in plan.chunks:
            chunk.sequence.num_computed_tokens += chunk.num_tokens
    return torch.cat(rows)


def _sequence(tokens: list[int], blocks: range) -> Sequence:
    sampling = SamplingParams(prompt_logprobs=0 if blocks.start else None)
    made = Sequence(Request(id="", prompt_token_ids=tokens, sampling=sampling), ordinal=0, arrival=0.0, seed=0)
    made.block_table = list(blocks)
    return made

"""Runs requests and single steps on a runner."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fastgen.core.blocks.window_pool import WindowGroup
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.sequence import Sequence
from fastgen.core.step_output import StepOutput
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.engine.core import Engine
from fastgen.model.forward_input import ForwardInput, HostRows
from fastgen.model.layers.decoder import Decoder
from fastgen.model.native import load_on_cpu, load_on_torch, open_checkpoint
from fastgen.model.source import ModelSource
from fastgen.model.step_input import StepInput, StepInputBuilder
from fastgen.runner.interface import Ticket
from fastgen.runner.loader import load_runner
from fastgen.runner.runner import ModelRunner
from fastgen.settings import EngineConfig

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM, PreTrainedModel

# How a native model is loaded for each backend of CPUs.
LOADS: dict[str, abc.Callable[..., Decoder[Any]]] = {
    "kernels": load_on_cpu,
    "torch": partial(load_on_torch, device=torch.device("cpu"), dtype=torch.float32),
}


def load(
    path: Path,
    *,
    kv_cache_memory: int = 256 << 20,
    block_size: int = 64,
    dtype: str = "float32",
    quantization: str = "none",
    max_model_length: int | None = None,
    swap_space: int = 0,
    deterministic: bool = False,
) -> ModelRunner:
    """Return a runner for the model at `path`."""
    config = EngineConfig(
        model=str(path),
        kv_cache_memory=kv_cache_memory,
        block_size=block_size,
        dtype=dtype,
        quantization=quantization,
        max_model_length=max_model_length,
        swap_space=swap_space,
        deterministic=deterministic,
    )
    runner = load_runner(ModelSource.open(str(path)), config, lambda _stage, _fraction: None)
    assert isinstance(runner, ModelRunner)
    return runner


_slots = cycle(range(64))


@dataclass
class FewBlocks:
    """A runner that reports fewer blocks than it has: a small cache without reloading the weights."""

    runner: ModelRunner
    num_blocks: int
    num_host_blocks: int = 0
    seconds_per_block: float = 0.0
    window_group: WindowGroup | None = None  # also with fewer blocks; by default those of the runner

    def __post_init__(self) -> None:
        self.vocab_size, self.eos_token_ids = self.runner.vocab_size, self.runner.eos_token_ids
        self.num_state_slots = self.runner.num_state_slots
        self.window_group = self.window_group or self.runner.window_group
        self.block_size, self.steps_in_flight = self.runner.block_size, self.runner.steps_in_flight
        self.max_model_length = self.num_blocks * self.block_size

    def launch(self, step: StepInput) -> Ticket:
        return self.runner.launch(step)


@dataclass(frozen=True)
class Outcome:
    """Generated and cached tokens of each prompt, the number of preemptions, and how many of them swapped."""

    tokens: list[list[int]]
    cached: list[int]
    preemptions: int
    swapped: int = 0


def generate(
    runner: ModelRunner | FewBlocks,
    prompts: abc.Sequence[list[int]],
    sampling: SamplingParams,
    *,
    token_budget: int,
    at_once: int,
    **settings: Any,
) -> Outcome:
    """Run all prompts through the real engine, at most `at_once` of them concurrently.

    `settings` are further fields of EngineConfig.
    """
    config = EngineConfig(model="", token_budget=token_budget, max_sequences=at_once, **settings)
    engine = Engine(runner, config)
    for number, prompt in enumerate(prompts):
        engine.add(Request(id=str(number), prompt_token_ids=prompt, sampling=sampling))
    tokens: list[list[int]] = [[] for _ in prompts]
    cached = [0 for _ in prompts]
    preemptions = swapped = 0
    while engine.has_work:
        report = engine.step()
        preemptions += report.step.preemptions
        swapped += report.step.swapped_out
        for output in report.outputs:
            tokens[int(output.request_id)] += output.token_ids
            cached[int(output.request_id)] += output.cached_tokens or 0
    return Outcome(tokens, cached, preemptions, swapped)


def sequence(
    tokens: list[int], blocks: list[int], *, sampling: SamplingParams | None = None, seed: int = 0
) -> Sequence:
    """Return a sequence that holds `blocks`, as the scheduler would set it up."""
    request = Request(id="", prompt_token_ids=tokens, sampling=sampling or SamplingParams(temperature=0))
    made = Sequence(request, ordinal=0, arrival=0.0, seed=seed)
    made.block_table = blocks
    made.state_slot = next(_slots)  # models without recurrent states ignore it
    return made


def step_input(plan: StepPlan, block_size: int, *, has_window: bool = False) -> StepInput:
    """Return the input of a hand-made plan for a runner that knows none of its sequences.

    Layers with a window have blocks of the same numbers.
    """
    for chunk in plan.chunks:
        chunk.sequence.row, chunk.sequence.num_sent_blocks = None, 0
        chunk.sequence.window_table = chunk.sequence.block_table
    return StepInputBuilder(block_size, has_window=has_window).build(plan)


def input_of(runner: ModelRunner, plan: StepPlan) -> StepInput:
    """Return the input of a hand-made plan for a runner, whose kernels write wherever it says."""
    group = runner.window_group
    num_blocks = runner.num_blocks if group is None else min(runner.num_blocks, group.num_blocks)
    for chunk in plan.chunks:
        assert max(chunk.sequence.block_table) < num_blocks
        assert chunk.sequence.state_slot is not None
        assert chunk.sequence.state_slot < (runner.num_state_slots or math.inf)
    return step_input(plan, runner.block_size, has_window=group is not None)


def forward_input(plan: StepPlan, block_size: int) -> ForwardInput:
    """Return the input of the forward pass of a hand-made plan."""
    return HostRows(block_size).apply(step_input(plan, block_size))


def execute(runner: ModelRunner, plan: StepPlan) -> StepOutput:
    """Run a hand-made plan."""
    ticket = runner.launch(input_of(runner, plan))
    ticket.sample([])
    return ticket.result()


def logits(runner: ModelRunner, plan: StepPlan) -> torch.Tensor:
    """Return the logits [S, vocabulary] of a hand-made plan, one row for each chunk that samples."""
    return runner.logits(input_of(runner, plan))


def run_in_chunks(runner: ModelRunner, tokens: list[int], blocks: list[int], sizes: abc.Sequence[int]) -> torch.Tensor:
    """Return logits [vocabulary] after `tokens`, computed in chunks of `sizes`, cyclically."""
    subject, index = sequence(tokens, blocks), 0
    while subject.num_pending_tokens:
        size = min(sizes[index % len(sizes)], subject.num_pending_tokens)
        rows = logits(runner, StepPlan((Chunk(subject, subject.num_computed_tokens, size),)))
        subject.num_computed_tokens += size
        index += 1
    assert rows.shape == (1, runner.vocab_size)
    return rows[0]


def logits_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] of a model of transformers."""
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return found


def assert_greedy(model: PreTrainedModel, start: list[int], output: list[int], num_tokens: int) -> None:
    """Assert that each of `num_tokens` tokens has the highest logit in transformers, given all tokens before it."""
    assert len(output) == num_tokens
    best = logits_of(model, start + output[:-1])[len(start) - 1 :].argmax(-1)
    assert output == best.tolist()


def transformers_twin(source: ModelSource) -> LlamaForCausalLM:
    """Return transformers' model with the same float32 tensors as ours."""
    from transformers import LlamaConfig, LlamaForCausalLM  # seconds, which processes that run only ours do not need

    a = source.architecture
    config = LlamaConfig(  # type: ignore[call-arg]
        vocab_size=a.vocab_size,
        hidden_size=a.hidden_size,
        intermediate_size=a.intermediate_size,
        num_hidden_layers=a.num_layers,
        num_attention_heads=a.num_heads,
        num_key_value_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        max_position_embeddings=a.max_position_embeddings,
        rms_norm_eps=a.rms_norm_eps,
        rope_theta=a.rope_configs[0].theta,
        tie_word_embeddings=a.tie_word_embeddings,
        eos_token_id=sorted(a.eos_token_ids),
    )
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    weights = open_checkpoint(source)
    missing, unexpected = model.load_state_dict(
        {name: weights.tensor(name) for name in a.tensor_shapes()}, strict=False
    )
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}, "only a tied head follows from the embedding"
    model.tie_weights()
    return model

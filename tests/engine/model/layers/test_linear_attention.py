"""The gated delta rule: pieces of a chunk equal the recurrence token by token, and copies of states are exact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastgen.core.sampling_params import SamplingParams
from fastgen.core.step_plan import Chunk, StateSave, StepPlan
from fastgen.model.layers.linear_attention import delta_piece
from fastgen.model.source import ModelSource
from fastgen.runner.loader import load_runner
from fastgen.runner.runner import ModelRunner
from fastgen.settings import ConfigError, EngineConfig
from support.driving import generate, load, logits, sequence
from support.tiny_models import VOCABULARY, prompt, saved


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: torch.Tensor, decays: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute n tokens one by one; arguments and results as those of `delta_piece`."""
    results = []
    for t in range(q.shape[1]):
        state = state * decays[:, t].exp()[:, None, None]
        update = b[:, t] * (v[:, t] - torch.einsum("hkv,hk->hv", state, k[:, t]))
        state = state + k[:, t, :, None] * update[:, None]
        results.append(torch.einsum("hkv,hk->hv", state, q[:, t]))
    return torch.stack(results, 1), state


@pytest.mark.parametrize("strongest", [0.01, 1.0, 40.0])
@pytest.mark.parametrize("count", [1, 2, 17, 64])
def test_a_piece_equals_the_recurrence(count: int, strongest: float) -> None:
    torch.manual_seed(count)
    q, k = (torch.nn.functional.normalize(torch.randn(3, count, 8, dtype=torch.float64), dim=-1) for _ in range(2))
    v, b = torch.randn(3, count, 5, dtype=torch.float64), torch.rand(3, count, 1, dtype=torch.float64)
    decays = -strongest * torch.rand(3, count, dtype=torch.float64)
    state = torch.randn(3, 8, 5, dtype=torch.float64)
    for ours, expected in zip(
        delta_piece(q, k, v, b, decays, state), recurrence(q, k, v, b, decays, state), strict=True
    ):
        torch.testing.assert_close(ours, expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("qwen3-5-text", tmp_path_factory.mktemp("linear"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return load(folder, kv_cache_memory=4 << 20, block_size=16)


@pytest.mark.parametrize("before", [5, 30, 39])
def test_a_copy_of_the_states_within_a_chunk_is_where_another_sequence_starts(runner: ModelRunner, before: int) -> None:
    """The states are copied within the first chunk or the second, or before a chunk of one token."""
    tokens, slot = prompt(40), 99
    subject = sequence(tokens, [0, 1, 2])
    start = 20 if before < 39 else 39
    for first, end in ((0, start), (start, 40)):
        subject.num_computed_tokens = first
        saves = [StateSave(subject, before, slot, is_snapshot=True)] if first <= before < end else []
        plan = StepPlan((Chunk(subject, first, end - first),), state_saves=saves)
        expected = logits(runner, plan)
    other = sequence(tokens, [0, 1, 2])
    other.num_computed_tokens = before
    plan = StepPlan((Chunk(other, before, 40 - before),), state_sources={other: slot})
    torch.testing.assert_close(logits(runner, plan), expected, atol=1e-4, rtol=0)


def test_a_decode_reads_one_slot_and_writes_others(runner: ModelRunner) -> None:
    """One token of each of three sequences, one of which starts anew: the slots of no other sequence change."""
    tokens = prompt(9)
    subjects = [sequence(tokens[:length], [number]) for number, length in enumerate((9, 1, 6))]
    assert runner._cache.states is not None
    matrices = runner._cache.states.matrices
    for subject in subjects:
        if len(subject.tokens) > 1:
            logits(runner, StepPlan((Chunk(subject, 0, len(subject.tokens) - 1),)))
            subject.num_computed_tokens = len(subject.tokens) - 1
    matrices[:, 98] = 7
    own = [subject.state_slot for subject in subjects]
    source = matrices[:, own[0]].clone()
    save = StateSave(subjects[0], 8, 97, is_snapshot=False)
    chunks = tuple(Chunk(subject, subject.num_computed_tokens, 1) for subject in subjects)
    together = logits(runner, StepPlan(chunks, state_saves=[save]))
    assert torch.equal(matrices[:, 97], source)
    assert not torch.equal(matrices[:, own[0]], source)
    assert bool((matrices[:, 98] == 7).all())
    for row, subject in zip(together, subjects, strict=True):
        alone = logits(runner, StepPlan((Chunk(fresh := sequence(subject.tokens, [9]), 0, len(fresh.tokens)),)))
        torch.testing.assert_close(row, alone[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "quantization"), [("bfloat16", "none"), ("float32", "int8")])
def test_other_formats_stay_close_to_float32(folder: Path, runner: ModelRunner, dtype: str, quantization: str) -> None:
    other = load(folder, kv_cache_memory=4 << 20, block_size=16, dtype=dtype, quantization=quantization)
    subject = sequence(prompt(50), [0, 1, 2, 3])
    plan = StepPlan((Chunk(subject, 0, 50),))
    expected, found = logits(runner, plan), logits(other, plan)
    assert (found - expected).square().mean().sqrt() < 0.1 * expected.std()
    outcome = generate(
        other, [prompt(20), prompt(21)], SamplingParams(temperature=0, max_tokens=4), token_budget=13, at_once=2
    )
    assert all(token < VOCABULARY for output in outcome.tokens for token in output)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "cuda"}, "--device cuda: not available for qwen3_5_text models.*: use --device cpu"),
        ({"swap_space": 1 << 20}, "--swap-space: not available for qwen3_5_text models.*: remove it"),
    ],
)
def test_settings_that_states_do_not_allow_are_rejected_by_name(
    folder: Path, settings: dict[str, object], words: str
) -> None:
    config = EngineConfig(model=str(folder), **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        load_runner(ModelSource.open(str(folder)), config, lambda _stage, _fraction: None)

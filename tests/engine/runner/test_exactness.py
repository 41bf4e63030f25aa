"""Greedy output equals transformers' on the same float32 weights, token for token.

The reference is transformers' logits for prompt and output together: if at each position the largest logit is that of
the token that we generated next, then transformers' greedy search generates the same tokens, by induction. Another
token is accepted only if transformers' logits of the two differ by less than `TIE`. The induction itself is tested
against transformers' `generate`.

How prompts are cut and mixed with decodes does not depend on the number of layers. So one test runs the whole model,
and the others its first layers: a third of the work.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastgen.core.sampling_params import SamplingParams
from fastgen.model.source import ModelSource
from fastgen.runner.runner import ModelRunner
from fastgen.text.tokenizer import Tokenizer
from support.driving import FewBlocks, Outcome, generate, load, transformers_twin
from support.prompts import PROMPTS

NUM_TOKENS = 32
TIE = 1e-4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
NUM_SHALLOW_LAYERS = 6

pytestmark = [pytest.mark.slow]


class Reference:
    """Compares outputs with transformers' logits. The start of an output that was compared is not compared again."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self._equal: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)

    def gap(self, prompt: list[int], output: list[int]) -> float:
        """Return the largest distance of any of our tokens from transformers' best logit."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(output)[:, None])[:, 0]
        return (logits.amax(1) - chosen).max().item()

    def assert_equal(self, prompts: list[list[int]], outcome: Outcome, num_tokens: int = NUM_TOKENS) -> None:
        for number, (prompt, output) in enumerate(zip(prompts, outcome.tokens, strict=True)):
            assert len(output) == num_tokens
            compared = self._equal[tuple(prompt)]
            if any(other[:num_tokens] == output for other in compared):
                continue
            gap = self.gap(prompt, output)
            assert gap < TIE, f"prompt {number}: a token {gap} below transformers' best"
            compared.append(output)


@pytest.fixture(scope="module")
def reference(demo_source: ModelSource) -> Reference:
    return Reference(transformers_twin(demo_source))


@pytest.fixture(scope="module")
def shallow_reference(reference: Reference) -> Reference:
    """The demo model's embedding, first layers and head."""
    settings = {**reference.model.config.to_dict(), "num_hidden_layers": NUM_SHALLOW_LAYERS}
    model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**settings)).eval()  # type: ignore[no-untyped-call]
    missing, _ = model.load_state_dict(reference.model.state_dict(), strict=False)
    assert missing == []
    return Reference(model)


@pytest.fixture(scope="module")
def shallow_runner(shallow_reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = tmp_path_factory.mktemp("shallow")
    shallow_reference.model.save_pretrained(folder)
    return load(folder, kv_cache_memory=64 << 20)


@pytest.fixture(scope="module")
def prompts(demo_source: ModelSource) -> list[list[int]]:
    tokenizer = Tokenizer.load(demo_source.tokenizer)
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in PROMPTS]
    assert len(encoded) == 20
    assert min(map(len, encoded)) == 1
    assert max(map(len, encoded)) > 500
    return encoded


# The budget decides how prompts are cut and which of them share a step with decodes. So one budget decodes all tokens,
# and the others enough to mix decodes with the prompts of the next sequences.
def test_greedy_output_equals_transformers_with_eight_prompts_at_once(
    demo_runner: ModelRunner, reference: Reference, prompts: list[list[int]]
) -> None:
    some = prompts[::2]
    outcome = generate(demo_runner, some, GREEDY, token_budget=64, at_once=8)
    reference.assert_equal(some, outcome)


@pytest.mark.parametrize("token_budget", [16, 512])
def test_greedy_output_equals_transformers_with_other_budgets(
    shallow_runner: ModelRunner, shallow_reference: Reference, prompts: list[list[int]], token_budget: int
) -> None:
    outcome = generate(shallow_runner, prompts, replace(GREEDY, max_tokens=8), token_budget=token_budget, at_once=8)
    shallow_reference.assert_equal(prompts, outcome, 8)


# Alone, a sequence's decodes are the same steps with any budget; only the chunks of its prompt differ. So one budget
# decodes further, and the others far enough to read the whole prompt back from the cache. Two prompts decode to the end
# in the comparison with transformers' greedy search below.
@pytest.mark.parametrize(("token_budget", "num_tokens"), [(16, 2), (64, 5), (512, 2)])
def test_greedy_output_equals_transformers_one_prompt_at_a_time(
    shallow_runner: ModelRunner,
    shallow_reference: Reference,
    prompts: list[list[int]],
    token_budget: int,
    num_tokens: int,
) -> None:
    sampling = replace(GREEDY, max_tokens=num_tokens)
    outcome = generate(shallow_runner, prompts, sampling, token_budget=token_budget, at_once=1)
    shallow_reference.assert_equal(prompts, outcome, num_tokens)


def test_greedy_output_equals_transformers_when_sequences_are_preempted(
    shallow_runner: ModelRunner, shallow_reference: Reference, prompts: list[list[int]]
) -> None:
    longest = max(map(len, prompts)) + NUM_TOKENS
    few = FewBlocks(shallow_runner, -(-longest // shallow_runner.block_size))
    outcome = generate(few, prompts, GREEDY, token_budget=64, at_once=8)
    assert outcome.preemptions > 0
    shallow_reference.assert_equal(prompts, outcome)


@pytest.mark.parametrize("number", [2, 13])
def test_the_reference_agrees_with_transformers_greedy_search(
    demo_runner: ModelRunner, reference: Reference, prompts: list[list[int]], number: int
) -> None:
    prompt = torch.tensor([prompts[number]])
    with torch.inference_mode():
        whole = reference.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    theirs = whole[0, prompt.shape[1] :].tolist()
    (ours,) = generate(demo_runner, [prompts[number]], GREEDY, token_budget=256, at_once=1).tokens
    assert ours == theirs
    assert reference.gap(prompts[number], theirs) < TIE


def test_the_reference_rejects_a_wrong_token(
    demo_runner: ModelRunner, reference: Reference, prompts: list[list[int]]
) -> None:
    (output,) = generate(demo_runner, [prompts[13]], GREEDY, token_budget=256, at_once=1).tokens
    changed = [*output[:10], (output[10] + 1) % demo_runner.architecture.vocab_size, *output[11:]]
    assert reference.gap(prompts[13], changed) > TIE

"""Grammars with the real engine and the demo model's vocabulary. Its weights are random: grammars must hold anyway."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fastgen.core.request import FinishReason, Request
from fastgen.core.sampling_params import Grammar, SamplingParams
from fastgen.engine.core import Engine
from fastgen.model.source import ModelSource
from fastgen.runner.runner import ModelRunner
from fastgen.settings import EngineConfig
from fastgen.text.grammars.compiled import CompiledGrammars
from fastgen.text.tokenizer import Tokenizer
from support.driving import FewBlocks, load

pytestmark = pytest.mark.slow

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "maximum": 120, "minimum": 0},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
COLOURS = {"type": "array", "items": {"enum": ["red", "grün", "緑"]}, "minItems": 2, "maxItems": 4}
POINT = {
    "type": "object",
    "properties": {"at": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2}},
    "required": ["at"],
    "additionalProperties": False,
}
CODE = r"[A-Z]{2}-[0-9]{3}"
CHOICE = "(yes|no|perhaps)"
EMOJI = "(🙂|🚀|é){2,4}"


@dataclass(frozen=True)
class Said:
    """The outcome of one request."""

    text: str
    tokens: list[int]
    reason: FinishReason | None


@dataclass(frozen=True)
class Structured:
    """A small model with grammars."""

    runner: ModelRunner
    tokenizer: Tokenizer
    grammars: CompiledGrammars

    def prompt(self, number: int) -> list[int]:
        """Return a prompt of nearly one block, so that most generations need a second one."""
        text = f"Question {number}. Tell me of Anna, who is thirty years old and lives in a house by the sea. " * 3
        return self.tokenizer.encode(text, add_special_tokens=False)[:58]

    def run(self, asked: list[SamplingParams], *, num_blocks: int | None = None) -> tuple[list[Said], int]:
        """Run all requests at once, each with its own prompt; also return the number of preemptions."""
        runner = self.runner if num_blocks is None else FewBlocks(self.runner, num_blocks)
        config = EngineConfig(model="", token_budget=64, max_sequences=16)
        engine = Engine(runner, config, grammars=self.grammars)
        for number, sampling in enumerate(asked):
            engine.add(Request(id=str(number), prompt_token_ids=self.prompt(number), sampling=sampling))
        tokens: list[list[int]] = [[] for _ in asked]
        reasons: list[FinishReason | None] = [None for _ in asked]
        preemptions = 0
        while engine.has_work:
            report = engine.step()
            preemptions += report.step.preemptions
            for output in report.outputs:
                tokens[int(output.request_id)] += output.token_ids
                reasons[int(output.request_id)] = output.finish_reason
        said = [Said(self.tokenizer.decode(own), own, reason) for own, reason in zip(tokens, reasons, strict=True)]
        return said, preemptions


@pytest.fixture(scope="module")
def structured(small_model: Path) -> Structured:
    runner = load(small_model, kv_cache_memory=8 << 20)
    tokenizer = Tokenizer.load(ModelSource.open(str(small_model)).tokenizer)
    shape = runner.architecture
    return Structured(runner, tokenizer, CompiledGrammars(lambda: tokenizer, shape.vocab_size, shape.eos_token_ids))


def schema(value: dict[str, Any], **settings: Any) -> SamplingParams:
    return regex("", grammar=Grammar(kind="json_schema", text=json.dumps(value)), **settings)


def regex(pattern: str, **settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 90, "grammar": Grammar(kind="regex", text=pattern), **settings})


GREEDY = {"temperature": 0}
ASKED = [
    (schema(PERSON, **GREEDY), PERSON),
    (schema(PERSON, temperature=1.2, seed=1), PERSON),
    (schema(COLOURS, temperature=1.0, top_p=0.9, seed=2), COLOURS),
    (schema(POINT, temperature=0.8, repetition_penalty=1.1, min_p=0.02, seed=3), POINT),
    (regex(CODE, **GREEDY), CODE),
    (regex(CODE, temperature=1.5, seed=4), CODE),
    (regex(CHOICE, temperature=1.0, seed=5), CHOICE),
    (regex(EMOJI, temperature=1.0, seed=6), EMOJI),
    (SamplingParams(max_tokens=24, temperature=0), None),
    (SamplingParams(max_tokens=24, temperature=0.9, seed=7), None),
]


@pytest.fixture(scope="module")
def together(structured: Structured) -> list[Said]:
    said, preemptions = structured.run([sampling for sampling, _ in ASKED])
    assert preemptions == 0
    return said


def assert_matches(said: Said, wanted: dict[str, Any] | str) -> None:
    assert said.reason is FinishReason.STOP
    if isinstance(wanted, str):
        assert re.fullmatch(wanted, said.text)
    else:
        jsonschema.validate(json.loads(said.text), wanted)


def test_every_grammar_is_matched_greedy_and_sampled_in_one_batch(together: list[Said]) -> None:
    for said, (_, wanted) in zip(together, ASKED, strict=True):
        if wanted is not None:
            assert_matches(said, wanted)


def test_requests_without_a_grammar_are_unaffected_by_those_with_one(
    structured: Structured, together: list[Said]
) -> None:
    number = len(ASKED) - 2
    engine = Engine(structured.runner, EngineConfig(model="", token_budget=64, max_sequences=16))
    engine.add(Request(id="alone", prompt_token_ids=structured.prompt(number), sampling=ASKED[number][0]))
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step().outputs:
            tokens += output.token_ids
    assert tokens == together[number].tokens


def test_a_preempted_generation_stays_within_its_grammar(structured: Structured, together: list[Said]) -> None:
    said, preemptions = structured.run([sampling for sampling, _ in ASKED], num_blocks=8)
    assert preemptions > 0
    for own, before, (sampling, wanted) in zip(said, together, ASKED, strict=True):
        if wanted is not None:
            assert_matches(own, wanted)
        if sampling.temperature == 0:
            assert own.tokens == before.tokens


def test_a_complete_match_ends_despite_ignore_eos_and_min_tokens(structured: Structured) -> None:
    (end,) = structured.runner.architecture.eos_token_ids
    wants_to_end = {"temperature": 0, "logit_bias": ((end, 100.0),)}
    asked = [
        regex(CHOICE, ignore_eos=True, min_tokens=30, **GREEDY),
        regex("[a-z ]*", **wants_to_end),
        regex("[a-z ]*", min_tokens=5, **wants_to_end),
    ]
    (complete, at_once, held_back), _ = structured.run(asked)
    assert_matches(complete, CHOICE)
    assert at_once.tokens == [end]
    assert len(held_back.tokens) == 6, "a match that may go on goes on until min_tokens"
    assert held_back.tokens[-1] == end


def test_a_match_cut_by_max_tokens_finishes_with_length(structured: Structured) -> None:
    (said,), _ = structured.run([schema(PERSON, max_tokens=3, **GREEDY)])
    assert said.reason is FinishReason.LENGTH
    assert len(said.tokens) == 3

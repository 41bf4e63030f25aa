"""What a grammar of calls allows, the parser of the format reads as a call of that function with those arguments."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from engine.text.matching import END, byte_tokenizer
from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars.compiled import CompiledGrammars
from fastgen.text.grammars.schemas.errors import SchemaError
from fastgen.text.output_events import Collected
from fastgen.text.reasoning.format import Start
from fastgen.text.reasoning.harmony import HarmonyReasoning
from fastgen.text.tools.format import OfferedTool, ToolFormat
from fastgen.text.tools.harmony import Harmony
from fastgen.text.tools.hermes import Hermes
from fastgen.text.tools.mistral import Mistral, MistralArguments
from fastgen.text.tools.plain_json import Llama3Json, PlainJson
from fastgen.text.tools.qwen3_coder import Qwen3Coder
from fastgen.text.tools.registry import call_grammar

FORMATS = (Hermes(), Qwen3Coder(), Mistral(), MistralArguments(), Llama3Json(), PlainJson(), Harmony())
TOKENIZER = byte_tokenizer(None)
GRAMMARS = CompiledGrammars(lambda: TOKENIZER, TOKENIZER.vocab_size, [END])
NAMES = ("f", "get_weather", "a.b", "mcp__x-1", "functions.f", "\u00e9", "f g", "f>", 'f"', "f<", "f\\", "f{", "f\n",
         "[ARGS]", "</tool_call>", "x" * 256)  # fmt: skip
# Names that a format cannot have in a call.
REFUSED = {
    Qwen3Coder: {"f>", "f\n", "</tool_call>"},
    MistralArguments: {"f{", "f\n", "[ARGS]"},
    Harmony: {"f g", "f<", "f\n", "</tool_call>"},
}
VALUES = (
    {"enum": ["none", None, "low"]},
    {"enum": [1.5, "1", True, "</parameter>"]},
    {"const": "true"},
    {"type": ["string", "null"], "maxLength": 3},
    {"type": "string", "pattern": "^[<>/a-z]{0,4}$"},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 2}]},
    {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    {"type": "object", "properties": {"a>": {"type": "integer"}}, "required": ["a>"], "additionalProperties": False},
)


def random_match(grammar: Grammar, source: random.Random) -> str:
    """Return a random text that matches; it ends as soon as it can, and prefers what closes strings and objects."""
    constraint, text = GRAMMARS(grammar), bytearray()
    closing = [TOKENIZER.encode(mark, add_special_tokens=False)[0] for mark in '"}]<\n/p']
    while len(text) < 600:
        mask = np.zeros(-(-TOKENIZER.vocab_size // 32), np.uint32)
        constraint.fill_mask(mask.data)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        if END in allowed:
            return text.decode()
        preferred = [token for token in closing if token in allowed]
        token = source.choice(preferred if preferred and source.random() < 0.7 else allowed)
        constraint.accept(token)
        text += TOKENIZER.vocabulary.token_bytes(token)
    return ""


def parsed(text: str, format: ToolFormat, tools: tuple[OfferedTool, ...]) -> Collected:
    if isinstance(format, Harmony):
        reasoning = HarmonyReasoning().parser(Start.OPEN)
        text = reasoning.push(text)[1] + reasoning.finish()[1]
    parser = format.parser(tools)
    return Collected(parser.push(text) + parser.finish())


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: type(format).__name__)
def test_a_call_that_the_grammar_allows_is_parsed_as_that_call(format: ToolFormat) -> None:
    source, num_calls = random.Random(3), 0
    for name in NAMES:
        assert format.can_call(name) == (name not in REFUSED.get(type(format), ())), name
        if not format.can_call(name):
            continue
        for value in source.sample(VALUES, 3):
            schema = {"type": "object", "properties": {"a": value, "b c": {"type": "null"}}, "required": ["a"]}
            tools = (OfferedTool(name, schema, strict=True), OfferedTool("other", {"type": "object"}, strict=True))
            text = random_match(call_grammar(format, tools[:1], TOKENIZER, most_calls=1), source)
            if text:
                found, num_calls = parsed(text, format, tools), num_calls + 1
                assert [call.name for call in found.calls] == [name], text
                Draft202012Validator(schema).validate(json.loads(found.calls[0].arguments))
                assert not found.content.strip(), text
    assert num_calls > 10


def test_a_parameter_whose_name_a_tag_cannot_have_is_not_enforced() -> None:
    for name in ("a>", "a" * 250):
        tool = OfferedTool("f", {"type": "object", "properties": {name: {"type": "string"}}}, strict=True)
        with pytest.raises(SchemaError, match="a tag cannot have this name"):
            call_grammar(Qwen3Coder(), [tool], TOKENIZER, most_calls=1)

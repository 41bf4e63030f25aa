"""Choose the tool-call format of a model, and build its grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pkgutil import resolve_name

from fastgen.core.sampling_params import Grammar
from fastgen.settings import TOOL_FORMATS
from fastgen.text import harmony
from fastgen.text.grammars.lark import escaped, json_body, quoted, spelled_mark
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tools.format import OfferedTool, ToolFormat
from fastgen.text.tools.mistral import MistralArguments


def choose_format(name: str, tokenizer: Tokenizer) -> ToolFormat:
    """Return the format of `--tool-parser`; `auto` detects it from the template and vocabulary."""
    name = _detect(tokenizer) if name == "auto" else name
    if name == "mistral" and _has(tokenizer, "[ARGS]"):
        return MistralArguments()
    kind: type[ToolFormat] = resolve_name(f"{__package__}.{TOOL_FORMATS[name]}")
    return kind()


def _detect(tokenizer: Tokenizer) -> str:
    template = "" if tokenizer.chat_template is None else tokenizer.chat_template.tool_source
    if harmony.CHANNEL in template:
        return "harmony"
    if "<tool_call>" in template:
        return "qwen3_coder" if "<function=" in template else "hermes"
    if "[TOOL_CALLS]" in template or _has(tokenizer, "[TOOL_CALLS]"):
        return "mistral"
    if "<|python_tag|>" in template or _has(tokenizer, "<|python_tag|>"):
        return "llama3_json"
    return "json"


def _has(tokenizer: Tokenizer, token: str) -> bool:
    return tokenizer.backend.token_to_id(token) is not None


def call_grammar(
    format: ToolFormat,
    tools: Sequence[OfferedTool],
    tokenizer: Tokenizer,
    *,
    most_calls: int | None,
    answer: Grammar | None = None,
) -> Grammar:
    """Return the grammar of calls of these tools; with `answer`, a JSON grammar, of calls or the answer.

    Raises:
        SchemaError: if the schema of a tool or of the answer cannot be enforced.
    """
    rules = [
        f"start: calls{'' if answer is None else ' | answer'}\n",
        format.rules(tools, partial(spelled_mark, tokenizer), most_calls=most_calls),
    ]
    if answer is not None:
        body = json_body(json.loads(answer.text) if answer.text else {"type": "object"})
        rules.append(f"answer: {_answer_head(format, tokenizer)}{body}\n")
    return Grammar(kind="lark", text="".join(rules))


def free_grammar(
    format: ToolFormat,
    tools: Sequence[OfferedTool],
    tokenizer: Tokenizer,
    *,
    most_calls: int | None,
    excluded: Sequence[str] = (),
) -> Grammar:
    """Return the grammar of text that may end with calls of these tools; calls of strict tools match their schema.

    The text before the calls can contain neither the format's `opening` nor the `excluded` marks. Without an opening,
    the generation is calls, or text that does not begin as calls do. Where answers have a head, it is calls or an
    answer.

    Raises:
        SchemaError: if the schema of a strict tool cannot be enforced.
    """
    tools = [replace(tool, enforced=tool.strict) for tool in tools]
    if format.answer_head:
        rules = [
            f"start: calls | {_answer_head(format, tokenizer)}TEXT?\n",
            f"TEXT: {_text_without(excluded)}\n",
            format.rules(tools, partial(spelled_mark, tokenizer), most_calls=most_calls),
        ]
        return Grammar(kind="lark", text="".join(rules))
    if not format.opening:
        return _calls_or_text(format, tools, tokenizer, most_calls, excluded)
    mark = spelled_mark(tokenizer, format.opening)
    excluded = [*excluded, *format.other_openings]
    is_token = mark != quoted(format.opening)
    # A mark of text ends the lexeme before it. A mark that is a special token is never part of one.
    text = _text_without(excluded if is_token else [*excluded, format.opening])
    head = f"FREE? {mark}" if is_token else "head"
    rules = [
        f"start: {head} opened | FREE?\n",
        f"FREE: {text}\n",
        "" if is_token else f"head[suffix={quoted(format.opening)}]: HEAD\nHEAD: {_text_without(excluded)}\n",
        format.rules(tools, partial(spelled_mark, tokenizer), most_calls=most_calls),
    ]
    return Grammar(kind="lark", text="".join(rules))


def _answer_head(format: ToolFormat, tokenizer: Tokenizer) -> str:
    """Return what begins an answer in a rule, followed by a space; "" if the format has no such head."""
    return "".join(f"{spelled_mark(tokenizer, part)} " for part in format.answer_head)


def _calls_or_text(
    format: ToolFormat,
    tools: Sequence[OfferedTool],
    tokenizer: Tokenizer,
    most_calls: int | None,
    excluded: Sequence[str],
) -> Grammar:
    # The parser takes JSON at the beginning for a call.
    tokens = [token for mark in format.other_openings if (token := spelled_mark(tokenizer, mark)) != quoted(mark)]
    rules = [
        f"start: {''.join(f'{token}? ' for token in tokens)}calls | TEXT?\n",
        f"TEXT: {_text_without(excluded)} & ~/{format.head}[\\[{{](.|\\n)*/\n",
        format.rules(tools, partial(spelled_mark, tokenizer), most_calls=most_calls),
    ]
    return Grammar(kind="lark", text="".join(rules))


def _text_without(marks: Sequence[str]) -> str:
    """Return the body of a terminal: any text without these marks."""
    mentioned = "|".join(escaped(mark) for mark in marks)
    return f"/(.|\\n)*/ & ~/(.|\\n)*({mentioned})(.|\\n)*/" if marks else "/(.|\\n)*/"


def describe_tools(format: ToolFormat, tools: Sequence[dict[str, object]]) -> str:
    """Return the system text that describes tools to a model whose template does not."""
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions, given as JSON with the schema of their parameters:\n{listed}\n\n"
        f"To call one, answer with nothing but:\n{format.example}"
    )

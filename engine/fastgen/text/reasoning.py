"""Reasoning of models that think between two marks before they answer, as Qwen3 and DeepSeek-R1 do.

The parser splits a generation into reasoning and content. The grammar lets a model think freely, or for a number of
tokens, before its answer has to match another grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from fastgen.core.sampling_params import Grammar
from fastgen.settings import ConfigError
from fastgen.text.grammars.lark import escaped, json_body
from fastgen.text.stop_strings import possible_start
from fastgen.text.tokenizer import Tokenizer

# Harmony (gpt-oss) separates reasoning, calls and answers by this token and a name.
_CHANNEL = "<|channel|>"
# Models write line breaks after the marks, which are not part of the answer.
_SPACE = "SPACE: /[ \\t\\r\\n]{1,8}/\n"


class Start(Enum):
    """Where a generation starts, which the end of its prompt decides."""

    OPEN = "open"  # the model may open its reasoning, or answer at once
    INSIDE = "inside"  # the prompt has opened the reasoning
    AFTER = "after"  # the prompt has closed it, or the model has none: all text is the answer


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around a model's reasoning."""

    opening: str = "<think>"
    closing: str = "</think>"

    def start_after(self, prompt: str) -> Start:
        """Return whether a generation after `prompt` starts before, inside or after the reasoning."""
        tail = prompt.rstrip()
        if tail.endswith(self.opening):
            return Start.INSIDE
        return Start.AFTER if tail.endswith(self.closing) else Start.OPEN

    def start_within(self, message: str) -> Start:
        """Return where a generation starts that continues the text of an assistant's message."""
        opened = message.rfind(self.opening)
        if opened < 0:
            return Start.AFTER if message.strip() else Start.OPEN
        return Start.INSIDE if message.find(self.closing, opened) < 0 else Start.AFTER

    @property
    def marks(self) -> tuple[str, str]:
        """Both marks. If they are special tokens, the detokenizer must still show them."""
        return self.opening, self.closing

    def closing_token(self, tokenizer: Tokenizer) -> int | None:
        """Return the token that ends the reasoning, or None if it takes several."""
        return tokenizer.backend.token_to_id(self.closing)

    def num_tokens(self, token_ids: Sequence[int], start: Start, tokenizer: Tokenizer) -> int:
        """Return how many tokens of a generation are reasoning, with its marks."""
        if start is Start.AFTER:
            return 0
        opening, closing = self.opening.encode(), self.closing.encode()
        inside, text = start is Start.INSIDE, b""
        for position, token in enumerate(token_ids):
            text += tokenizer.vocabulary.token_bytes(token)
            if not inside:
                body = text.lstrip()
                if not (body.startswith(opening) or opening.startswith(body)):
                    return 0
                inside = body.startswith(opening)
            elif closing in text:
                return position + 1
            else:
                text = text[-len(closing) :]
        return len(token_ids) if inside else 0


class ReasoningParser:
    """Splits one generation. White space around the reasoning is dropped."""

    def __init__(self, format: ReasoningFormat, start: Start) -> None:
        self._format = format
        self._state = start
        self._buffer = ""
        self._at_start = True  # no reasoning has been emitted yet
        self._skips_space = False  # white space before the content belongs to the mark

    @property
    def is_undecided(self) -> bool:
        """Whether the generation may still open its reasoning."""
        return self._state is Start.OPEN

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning that this text completes, and the content after it; either may be empty."""
        self._buffer += text
        if self._state is Start.OPEN:
            self._open()
        reasoning = self._think() if self._state is Start.INSIDE else ""
        return reasoning, self._content()

    def finish(self) -> tuple[str, str]:
        """Return the rest at the end of the generation; unfinished reasoning stays reasoning."""
        rest, self._buffer = self._buffer, ""
        return (rest.rstrip(), "") if self._state is Start.INSIDE else ("", rest)

    def _open(self) -> None:
        body, opening = self._buffer.lstrip(), self._format.opening
        if body.startswith(opening):
            self._state, self._buffer = Start.INSIDE, body.removeprefix(opening)
        elif not opening.startswith(body):
            self._state = Start.AFTER

    def _think(self) -> str:
        if self._at_start:
            self._buffer = self._buffer.lstrip()
        thought, closing, rest = self._buffer.partition(self._format.closing)
        if closing:
            self._state, self._buffer, self._skips_space = Start.AFTER, rest, True
            return thought.rstrip()
        certain = self._buffer[: len(self._buffer) - possible_start(self._buffer, self._format.closing)].rstrip()
        self._at_start = self._at_start and not certain
        self._buffer = self._buffer[len(certain) :]
        return certain

    def _content(self) -> str:
        if self._state is not Start.AFTER:
            return ""
        text, self._buffer = self._buffer, ""
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text


class AnswerFinder:
    """Finds where the answer begins in the text of one generation, without changing the text."""

    def __init__(self, format: ReasoningFormat, start: Start) -> None:
        self._parser = ReasoningParser(format, start)
        self._undecided = ""  # text that opens the reasoning, or already belongs to the answer

    def push(self, text: str) -> tuple[str, str]:
        """Return what this text decides: text before the answer, with marks and white space, then the answer's."""
        _, answer = self._parser.push(text)
        text, self._undecided = self._undecided + text, ""
        if self._parser.is_undecided:
            self._undecided = text
            return "", ""
        return text[: len(text) - len(answer)], answer

    def finish(self) -> str:
        """Return the rest at the end of the generation, which belongs to the answer."""
        return self._parser.finish()[1]


def reasoning_format(name: str, tokenizer: Tokenizer) -> ReasoningFormat | None:
    """Return the format of `--reasoning-parser`; None if reasoning is not parsed.

    `auto` parses it if the closing mark is in the template, or both marks are tokens of the vocabulary.

    Raises:
        ConfigError: if `auto` finds the channels of Harmony (gpt-oss), which are not parsed.
    """
    found = ReasoningFormat()
    if name == "auto":
        template = "" if tokenizer.chat_template is None else tokenizer.chat_template.source
        if _CHANNEL in template:
            raise ConfigError(
                "--reasoning-parser auto: the chat template has the channels of Harmony (gpt-oss), which are not "
                "parsed; set it to none to get reasoning, calls and answers as one text"
            )
        has_tokens = all(tokenizer.backend.token_to_id(mark) is not None for mark in found.marks)
        return found if found.closing in template or has_tokens else None
    return found if name == "think" else None


def after_reasoning(
    answer: Grammar | None, format: ReasoningFormat, tokenizer: Tokenizer, start: Start, budget: int | None
) -> Grammar | None:
    """Return the grammar of a generation with reasoning and an answer; None if any text is allowed.

    The answer has to match `answer`, if that is given. After `budget` tokens of reasoning, None for no limit, only the
    closing mark is allowed. A budget requires that the mark is a single token.
    """
    if start is Start.AFTER or (answer is None and budget is None):
        return answer
    rules = [_rest(answer), _thought(format, format.closing_token(tokenizer), budget), _SPACE]
    if start is Start.INSIDE:
        rules.append("start: thought rest\n")
        return Grammar(kind="lark", text="".join(rules))
    rules.append(_opened(format, tokenizer))
    if answer is None:
        # The opening mark must not pass as plain text, because the budget would not count then.
        mark = escaped(format.opening)
        rules.append("start: opened thought rest | PLAIN\n")
        rules.append(f"PLAIN: /(.|\\n)*/ & ~/[ \\t\\r\\n]*{mark}(.|\\n)*/\n")
    else:
        rules.append("start: (opened thought)? rest\n")
    return Grammar(kind="lark", text="".join(rules))


def _opened(format: ReasoningFormat, tokenizer: Tokenizer) -> str:
    for token in tokenizer.special_ids_of([format.opening]):
        return f"opened: SPACE? <[{token}]>\n"
    return f"opened: OPENED\nOPENED: /[ \\t\\r\\n]{{0,8}}{escaped(format.opening)}/\n"


def _thought(format: ReasoningFormat, closing_token: int | None, budget: int | None) -> str:
    mark = escaped(format.closing)
    if closing_token is None:
        assert budget is None, "a budget requires a closing token"
        return f"thought: body SPACE?\nbody[stop={json.dumps(format.closing)}]: /(.|\\n)*/\n"
    closing = f"<[{closing_token}]>"
    if budget == 0:
        return f"thought: {closing} SPACE?\n"
    limit = "" if budget is None else f"[max_tokens={budget}]"
    # The text of the mark must not pass as reasoning, because the end would go unnoticed.
    return f"thought: body {closing} SPACE?\nbody{limit}: BODY\nBODY: /(.|\\n)*/ & ~/(.|\\n)*{mark}(.|\\n)*/\n"


def _rest(answer: Grammar | None) -> str:
    if answer is None:
        return "rest: /(.|\\n)*/\n"
    if answer.kind == "lark":
        return f"rest: %lark {{\n{answer.text}\n}}\n"
    if answer.kind == "regex":
        pattern = answer.text.replace("\n", "\\n")
        return f"rest: /{_slashed(pattern)}/\n"
    schema = json.loads(answer.text) if answer.text else {"type": "object"}
    if not isinstance(schema, dict):
        schema = {"anyOf": [schema]}
    return f"rest: {json_body(schema)}\n"


def _slashed(pattern: str) -> str:
    """Escape the slashes of a regular expression that are not escaped yet."""
    pieces, escaped = [], False
    for character in pattern:
        pieces.append("\\/" if character == "/" and not escaped else character)
        escaped = character == "\\" and not escaped
    return "".join(pieces)

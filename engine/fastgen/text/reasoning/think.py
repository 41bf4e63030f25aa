"""Reasoning between two marks before the answer, as Qwen3 and DeepSeek-R1 write it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from fastgen.core.sampling_params import Grammar
from fastgen.text.grammars.lark import escaped
from fastgen.text.reasoning.answer_rule import answer_rule
from fastgen.text.reasoning.format import AnswerFinder, ReasoningFormat, ReasoningParser, Start
from fastgen.text.spelled_marks import marked_texts
from fastgen.text.stop_strings import possible_start
from fastgen.text.tokenizer import Tokenizer

# Models write line breaks after the marks, which are not part of the answer.
_SPACE = "SPACE: /[ \\t\\r\\n]{1,8}/\n"


@dataclass(frozen=True, slots=True)
class Think(ReasoningFormat):
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

    def num_tokens(self, token_ids: Sequence[int], start: Start, tokenizer: Tokenizer) -> int:
        """Return how many tokens of a generation are reasoning, with its marks."""
        if start is Start.AFTER:
            return 0
        inside, text = start is Start.INSIDE, ""
        for position, piece in enumerate(marked_texts(token_ids, tokenizer, self.marks)):
            text += piece
            if not inside:
                text = text.lstrip()
                if not (text.startswith(self.opening) or self.opening.startswith(text)):
                    return 0
                inside = text.startswith(self.opening)
            elif self.closing in text:
                return position + 1
            else:
                text = text[-len(self.closing) :]
        return len(token_ids) if inside else 0

    def excluded(self, start: Start) -> tuple[str, ...]:
        """Return marks that free text before a call must not contain: the model may open its reasoning itself."""
        return (self.opening,) if start is Start.OPEN else ()

    def parser(self, start: Start) -> ReasoningParser:
        """Return a parser of one generation."""
        return _Parser(self, start)

    def answer_finder(self, start: Start) -> AnswerFinder:
        """Return a finder for one generation."""
        return _AnswerFinder(self, start)

    def grammar(
        self, answer: Grammar | None, tokenizer: Tokenizer, start: Start, budget: int | None, *, offers_tools: bool
    ) -> Grammar | None:
        """Return the grammar of a generation; see `ReasoningFormat.grammar`."""
        del offers_tools
        if start is Start.AFTER or (answer is None and budget is None):
            return answer
        rules = [answer_rule(answer), _thought(self, self.closing_token(tokenizer), budget), _SPACE]
        if start is Start.INSIDE:
            rules.append("start: thought rest\n")
            return Grammar(kind="lark", text="".join(rules))
        rules.append(_opened(self, tokenizer))
        if answer is None:
            # The opening mark must not pass as plain text, because the budget would not count then.
            mark = escaped(self.opening)
            rules.append("start: opened thought rest | PLAIN\n")
            rules.append(f"PLAIN: /(.|\\n)*/ & ~/[ \\t\\r\\n]*{mark}(.|\\n)*/\n")
        else:
            rules.append("start: (opened thought)? rest\n")
        return Grammar(kind="lark", text="".join(rules))


class _Parser(ReasoningParser):
    """Splits one generation. White space around the reasoning is dropped."""

    def __init__(self, format: Think, start: Start) -> None:
        self._format = format
        self._state = start
        self._buffer = ""
        self._spaces: list[str] = []  # white space behind the buffer
        self._at_start = True  # no reasoning has been emitted yet
        self._skips_space = False  # white space before the content belongs to the mark

    @property
    def is_undecided(self) -> bool:
        """Whether the generation may still open its reasoning."""
        return self._state is Start.OPEN

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning that this text completes, and the content after it; either may be empty."""
        if self._state is not Start.AFTER and not text.strip():  # decides nothing
            self._spaces.append(text)
            return "", ""
        self._take(text)
        if self._state is Start.OPEN:
            self._open()
        reasoning = self._think() if self._state is Start.INSIDE else ""
        return reasoning, self._content()

    def finish(self) -> tuple[str, str]:
        """Return the rest at the end of the generation; unfinished reasoning stays reasoning."""
        self._take("")
        rest, self._buffer = self._buffer, ""
        return (rest.rstrip(), "") if self._state is Start.INSIDE else ("", rest)

    def _take(self, text: str) -> None:
        self._buffer = "".join([self._buffer, *self._spaces, text])
        self._spaces = []

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


class _AnswerFinder(AnswerFinder):
    """Finds where the answer begins in the text of one generation, without changing the text."""

    def __init__(self, format: Think, start: Start) -> None:
        self._parser = _Parser(format, start)
        self._undecided: list[str] = []  # text that opens the reasoning, or already belongs to the answer

    def push(self, text: str) -> tuple[str, str]:
        """Return what this text decides: text before the answer, with marks and white space, then the answer's."""
        _, answer = self._parser.push(text)
        self._undecided.append(text)
        if self._parser.is_undecided:
            return "", ""
        text, self._undecided = "".join(self._undecided), []
        return text[: len(text) - len(answer)], answer

    def finish(self) -> str:
        """Return the rest at the end of the generation, which belongs to the answer."""
        return self._parser.finish()[1]


def _opened(format: Think, tokenizer: Tokenizer) -> str:
    # After an added token that is named by its id and is not special, llguidance allows one token more than a budget.
    for token in tokenizer.special_token_ids & tokenizer.added_ids_of([format.opening]):
        return f"opened: SPACE? <[{token}]>\n"
    return f"opened: OPENED\nOPENED: /[ \\t\\r\\n]{{0,8}}{escaped(format.opening)}/\n"


def _thought(format: Think, closing_token: int | None, budget: int | None) -> str:
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

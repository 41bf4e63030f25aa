"""Reasoning of gpt-oss: messages on Harmony's channel `analysis`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fastgen.core.sampling_params import Grammar
from fastgen.text import harmony
from fastgen.text.grammars.lark import spelled_mark
from fastgen.text.harmony import Closed, Header, MessageReader, Opened, Piece, Text
from fastgen.text.reasoning.answer_rule import answer_rule
from fastgen.text.reasoning.format import AnswerFinder, ReasoningFormat, ReasoningParser, Start
from fastgen.text.spelled_marks import marked_texts
from fastgen.text.tokenizer import Tokenizer

_BETWEEN = "\n\n"  # thoughts, and pieces of content, of several messages
_FINAL = re.compile(
    rf"{re.escape(harmony.CHANNEL)}final\b.{{0,{harmony.LONGEST_HEAD}}}?{re.escape(harmony.MESSAGE)}", re.S
)
_OPEN: dict[Start, Header | None] = {
    Start.OPEN: None,
    Start.INSIDE: harmony.ANALYSIS,
    Start.AFTER: harmony.FINAL,
}


@dataclass(frozen=True, slots=True)
class HarmonyReasoning(ReasoningFormat):
    """Reasoning may be several messages, also between calls."""

    closing: str = harmony.END

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks of all messages."""
        return harmony.MARKS

    def excluded(self, start: Start) -> tuple[str, ...]:
        """Return nothing: text of a message cannot contain special tokens."""
        del start
        return ()

    def start_after(self, prompt: str) -> Start:
        """Return whether a generation after `prompt` starts before, inside or after the reasoning."""
        _, begun, head = prompt.rpartition(harmony.START)
        if not begun or harmony.MESSAGE not in head or any(end in head for end in (harmony.END, harmony.CALL)):
            return Start.OPEN
        return Start.INSIDE if Header.parse(head.partition(harmony.MESSAGE)[0]).is_reasoning else Start.AFTER

    def start_within(self, message: str) -> Start:
        """Return where a generation starts that continues the text of an assistant's message: an answer."""
        del message
        return Start.AFTER

    def num_tokens(self, token_ids: Sequence[int], start: Start, tokenizer: Tokenizer) -> int:
        """Return how many tokens of a generation belong to thoughts, with their headers and ends."""
        reader, count, undecided = MessageReader(_OPEN[start]), 0, 0
        marks = tokenizer.added_ids_of(harmony.MARKS)
        for token, text in zip(token_ids, marked_texts(token_ids, tokenizer, harmony.MARKS), strict=True):
            before, undecided = reader.header, undecided + 1
            if before is None or token in marks:  # other tokens of a message cannot end it
                reader.push(text)
            after = reader.header
            if any(header is not None and header.is_reasoning for header in (before, after)):
                count, undecided = count + undecided, 0
            elif before is not None or after is not None:
                undecided = 0
        return count

    def parser(self, start: Start) -> ReasoningParser:
        """Return a parser of one generation."""
        return _Parser(start)

    def answer_finder(self, start: Start) -> AnswerFinder:
        """Return a finder for one generation."""
        return _AnswerFinder(start)

    def grammar(
        self, answer: Grammar | None, tokenizer: Tokenizer, start: Start, budget: int | None, *, offers_tools: bool
    ) -> Grammar | None:
        """Return the grammar of a generation; see `ReasoningFormat.grammar`. With a budget, there is one thought."""
        if start is Start.AFTER or (answer is None and budget is None):
            return answer
        channel, message, constrain, end, begin = (
            spelled_mark(tokenizer, mark)
            for mark in (harmony.CHANNEL, harmony.MESSAGE, harmony.CONSTRAIN, harmony.END, harmony.START)
        )
        role = f'{end} {begin} "{harmony.ROLE}"'
        limit = "" if budget is None else f"[max_tokens={budget}]"
        rules = [
            f'thought: {channel} "{harmony.ANALYSIS.channel}" {message} ended\n',
            f"ended: {role}\n" if budget == 0 else f"ended: body {role}\nbody{limit}: BODY\nBODY: /(.|\\n)*/\n",
            f"start: {_thoughts(start, budget)} answer\n",
        ]
        if answer is None:  # any messages but thoughts
            rules.append(f"answer: other ({role} other)*\n")
            rules.append(f'other: {channel} OTHER ({constrain} "json")? {message} TEXT?\nTEXT: /(.|\\n)*/\n')
            rules.append("OTHER: /final|commentary( to=[^ ]+ ?)?/\n")
        else:
            head = "" if offers_tools else f'{channel} "{harmony.FINAL.channel}" {message} '
            rules += [f"answer: {head}rest\n", answer_rule(answer)]
        return Grammar(kind="lark", text="".join(rules))


def _thoughts(start: Start, budget: int | None) -> str:
    first = "ended " if start is Start.INSIDE else ""
    if budget is None:
        return f"{first}thought*"
    return first or ("thought?" if budget else "")


class _Parser(ReasoningParser):
    """Splits one generation. Messages that are calls stay in the content, with their headers."""

    def __init__(self, start: Start) -> None:
        self._reader = MessageReader(_OPEN[start])
        self._header = _OPEN[start] or harmony.FINAL
        self._has_text = {True: False, False: False}  # reasoning, and content, without the open message's
        self._begins = True  # the next text is the first of its message

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning that this text completes, and the content beside it; either may be empty."""
        return self._split(self._reader.push(text))

    def finish(self) -> tuple[str, str]:
        """Return the rest at the end of the generation; unfinished reasoning stays reasoning."""
        return self._split(self._reader.finish())

    def _split(self, pieces: list[Piece]) -> tuple[str, str]:
        found: dict[bool, list[str]] = {True: [], False: []}
        for piece in pieces:
            is_reasoning, is_call = self._header.is_reasoning, self._header.recipient is not None
            match piece:
                case Opened(header):
                    self._header, self._begins = header, True
                    if header.recipient is not None:
                        found[False].append(str(header))
                case Text(text) if is_call:
                    found[False].append(text)
                case Text(text):
                    between = _BETWEEN if self._begins and self._has_text[is_reasoning] else ""
                    self._begins, self._has_text[is_reasoning] = False, True
                    found[is_reasoning].append(between + text)
                case Closed() if is_call:
                    found[False].append(harmony.CALL)
        return "".join(found[True]), "".join(found[False])


class _AnswerFinder(AnswerFinder):
    """The answer begins after the header of the first message on the channel `final`."""

    def __init__(self, start: Start) -> None:
        self._is_found = start is Start.AFTER
        self._expects_head = start is Start.OPEN
        self._seen = ""

    def push(self, text: str) -> tuple[str, str]:
        """Return the text before the answer, and the answer's."""
        if self._is_found:
            return "", text
        seen = self._seen + text
        if self._expects_head and not harmony.may_be_head(seen.partition(harmony.MESSAGE)[0]):
            self._is_found = True
            return "", text
        self._expects_head = self._expects_head and harmony.MESSAGE not in seen
        if head := _FINAL.search(seen):
            self._is_found = True
            place = head.end() - len(self._seen)
            return text[:place], text[place:]
        self._seen = seen[-harmony.LONGEST_HEAD :]
        return text, ""

    def finish(self) -> str:
        """Return nothing: no text is held back."""
        return ""

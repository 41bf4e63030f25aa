"""Interface of a model's reasoning: its parser and its grammar.

The parser splits a generation into reasoning and content. The grammar lets a model think freely, or for a number of
tokens, before its answer has to match another grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from fastgen.core.sampling_params import Grammar
from fastgen.text.tokenizer import Tokenizer


class Start(Enum):
    """Where a generation starts, which the end of its prompt decides."""

    OPEN = "open"  # the model may open its reasoning, or answer at once
    INSIDE = "inside"  # the prompt has opened the reasoning
    AFTER = "after"  # the prompt has closed it, or the model has none: all text is the answer


class ReasoningParser(Protocol):
    """Splits one generation into reasoning and content, which contains the calls too."""

    def push(self, text: str) -> tuple[str, str]:
        """Return the reasoning that this text completes, and the content after it; either may be empty."""

    def finish(self) -> tuple[str, str]:
        """Return the rest at the end of the generation; unfinished reasoning stays reasoning."""


class AnswerFinder(Protocol):
    """Finds where the answer begins in the text of one generation, without changing the text."""

    def push(self, text: str) -> tuple[str, str]:
        """Return what this text decides: text before the answer, with marks and white space, then the answer's."""

    def finish(self) -> str:
        """Return the rest at the end of the generation, which belongs to the answer."""


class ReasoningFormat(Protocol):
    """Base class of the formats, which `REASONING_PARSERS` in `fastgen.settings` lists."""

    @property
    def closing(self) -> str:
        """The mark that ends the reasoning."""

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks. If they are special tokens, the detokenizer must still show them."""

    def excluded(self, start: Start) -> tuple[str, ...]:
        """Return marks that free text before a call must not contain."""

    def start_after(self, prompt: str) -> Start:
        """Return whether a generation after `prompt` starts before, inside or after the reasoning."""

    def start_within(self, message: str) -> Start:
        """Return where a generation starts that continues the text of an assistant's message."""

    def closing_token(self, tokenizer: Tokenizer) -> int | None:
        """Return the token that ends the reasoning, or None if it takes several."""
        return tokenizer.backend.token_to_id(self.closing)

    def num_tokens(self, token_ids: Sequence[int], start: Start, tokenizer: Tokenizer) -> int:
        """Return how many tokens of a generation are reasoning, with its marks."""

    def parser(self, start: Start) -> ReasoningParser:
        """Return a parser of one generation."""

    def answer_finder(self, start: Start) -> AnswerFinder:
        """Return a finder for one generation."""

    def grammar(
        self, answer: Grammar | None, tokenizer: Tokenizer, start: Start, budget: int | None, *, offers_tools: bool
    ) -> Grammar | None:
        """Return the grammar of a generation with reasoning and an answer; None if any text is allowed.

        Args:
            answer: what the answer has to match, if anything.
            tokenizer: of the model.
            start: where the generation starts.
            budget: most tokens of reasoning, after which only the closing mark is allowed; None for no limit. It
                requires that the mark is a single token.
            offers_tools: whether `answer` is made of the tool format's rules, and may be calls.
        """

"""Text of one generation: incremental detokenization, cut at stop strings.

Stop strings apply to the answer, not to the reasoning before it, as with hosted APIs (OpenAI's reasoning models reject
`stop`). vLLM matches them in the reasoning too and then returns no content: its issue 52393.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastgen.core.request import FinishReason
from fastgen.text.detokenizer import Detokenizer, incomplete_end
from fastgen.text.reasoning import AnswerFinder, ReasoningFormat, Start
from fastgen.text.special_stops import SpecialStops
from fastgen.text.stop_strings import StopStrings
from fastgen.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How generated tokens become text.

    Attributes:
        stop: stop strings; the first one found in the answer ends the text. One may name special tokens.
        include_stop: keep the stop string, or the text of the stop token, at the end of the text.
        min_tokens: number of tokens before which no stop string ends the text.
        skip_special_tokens: leave special tokens out of the text.
        shown_tokens: special tokens that appear in the text despite `skip_special_tokens`.
        follows_prompt: the text is read behind that of the prompt: it completes a character that the prompt begins.
        reasoning: marks of the reasoning before the answer, and where the generation starts; None if all is answer.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    shown_tokens: frozenset[int] = frozenset()
    follows_prompt: bool = False
    reasoning: tuple[ReasoningFormat, Start] | None = None


_DEFAULT_RULES = TextRules()


class OutputText:
    """Detokenizes one generation and detects its stop strings.

    Attributes:
        num_tokens: tokens consumed, up to and including the one that completed a stop string.
        stop_string: the stop string that ended the text, if any.
        finish_reason: why the generation ended; None while it runs.
    """

    __slots__ = (
        *("_answer", "_detokenizer", "_rules", "_special_stops", "_stops"),
        *("finish_reason", "num_tokens", "stop_string"),
    )

    def __init__(
        self, tokenizer: Tokenizer, rules: TextRules = _DEFAULT_RULES, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        hidden = tokenizer.special_token_ids - rules.shown_tokens if rules.skip_special_tokens else frozenset[int]()
        self._rules = rules
        incomplete = incomplete_end(prompt_token_ids, tokenizer, hidden) if rules.follows_prompt else b""
        self._detokenizer = Detokenizer(tokenizer, hidden, incomplete)
        self._special_stops = (
            SpecialStops.of(rules.stop, tokenizer.vocabulary, hidden) if rules.stop else SpecialStops(())
        )
        self._stops = StopStrings(self._special_stops.stops)
        self._answer = AnswerFinder(*rules.reasoning) if rules.stop and rules.reasoning else None
        self.num_tokens = 0
        self.stop_string: str | None = None
        self.finish_reason: FinishReason | None = None

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> str:
        """Add tokens from the engine and return the new text.

        A stop string sets `finish_reason` even if the engine has not finished. If the engine finished with `stop`, the
        last token is the end-of-sequence or stop token; it gives no text unless the rules include it, and it still
        completes a stop string that names it.
        """
        assert self.finish_reason is None, "this generation has finished"
        ends_with_stop_token = finish_reason is FinishReason.STOP and not self._rules.include_stop
        num_text_tokens = len(token_ids) - ends_with_stop_token
        if not self._rules.stop:  # all tokens at once
            self.num_tokens += len(token_ids)
            text = self._detokenizer.push(token_ids[:num_text_tokens] if ends_with_stop_token else token_ids)
            if finish_reason is not None:
                text += self._detokenizer.finish()
                self.finish_reason = finish_reason
            return text
        pieces: list[str] = []
        marks = self._special_stops.marks
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if token_id in marks:
                text = marks[token_id]
            else:
                text = self._detokenizer.push([token_id]) if position < num_text_tokens else ""
            if self._append(text, pieces):
                finish_reason = FinishReason.STOP
                break
        else:
            if finish_reason is not None and self._end(pieces):
                finish_reason = FinishReason.STOP
        self.finish_reason = finish_reason
        return self._special_stops.without_marks("".join(pieces)) + self._included

    def _append(self, text: str, pieces: list[str]) -> bool:
        """Append the part of `text` that may be shown; return whether a stop string ended it."""
        if self._answer is None:
            return self._append_answer(text, pieces)
        before, answer = self._answer.push(text)
        pieces.append(before)
        return self._append_answer(answer, pieces)

    def _append_answer(self, text: str, pieces: list[str]) -> bool:
        if self.num_tokens < self._rules.min_tokens:
            pieces.append(self._stops.let_pass(text))
            return False
        shown, found = self._stops.push(text)
        pieces.append(shown)
        if found is not None:
            self.stop_string = self._special_stops.as_given(found)
        return found is not None

    def _end(self, pieces: list[str]) -> bool:
        """Append the rest of a generation that the engine has ended; return whether a stop string ended it before."""
        rest = self._detokenizer.finish()
        if self._append(rest, pieces) or (
            self._answer is not None and self._append_answer(self._answer.finish(), pieces)
        ):
            return True
        pieces.append(self._stops.finish())
        return False

    @property
    def _included(self) -> str:
        """The stop string, if it ended the text and belongs to it."""
        return self.stop_string if self.stop_string is not None and self._rules.include_stop else ""

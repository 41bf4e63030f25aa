"""Text of one generation: incremental detokenization, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastgen.core.request import FinishReason
from fastgen.text.detokenizer import Detokenizer
from fastgen.text.stop_strings import StopStrings
from fastgen.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How generated tokens become text.

    Attributes:
        stop: stop strings; the first one found ends the text.
        include_stop: keep the stop string, or the text of the stop token, at the end of the text.
        min_tokens: number of tokens before which no stop string ends the text.
        skip_special_tokens: leave special tokens out of the text.
        shown_tokens: special tokens that appear in the text despite `skip_special_tokens`.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    shown_tokens: frozenset[int] = frozenset()


_DEFAULT_RULES = TextRules()


class OutputText:
    """Detokenizes one generation and detects its stop strings.

    Attributes:
        num_tokens: tokens consumed, up to and including the one that completed a stop string.
        stop_string: the stop string that ended the text, if any.
        finish_reason: why the generation ended; None while it runs.
    """

    __slots__ = ("_detokenizer", "_rules", "_stops", "finish_reason", "num_tokens", "stop_string")

    def __init__(self, tokenizer: Tokenizer, rules: TextRules = _DEFAULT_RULES) -> None:
        hidden = tokenizer.special_token_ids - rules.shown_tokens if rules.skip_special_tokens else frozenset[int]()
        self._rules = rules
        self._detokenizer = Detokenizer(tokenizer, hidden)
        self._stops = StopStrings(rules.stop)
        self.num_tokens = 0
        self.stop_string: str | None = None
        self.finish_reason: FinishReason | None = None

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> str:
        """Add tokens from the engine and return the new text.

        A stop string sets `finish_reason` even if the engine has not finished. If the engine finished with `stop`, the
        last token is the end-of-sequence or stop token; it gives no text unless the rules include it.
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
        for position, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if position < num_text_tokens and self._append(self._detokenizer.push([token_id]), pieces):
                self.finish_reason = FinishReason.STOP
                return "".join(pieces)
        if finish_reason is not None:
            if self._append(self._detokenizer.finish(), pieces):
                finish_reason = FinishReason.STOP
            else:
                pieces.append(self._stops.finish())
            self.finish_reason = finish_reason
        return "".join(pieces)

    def _append(self, text: str, pieces: list[str]) -> bool:
        """Append the part of `text` that may be shown; return whether a stop string ended it."""
        if self.num_tokens < self._rules.min_tokens:
            pieces.append(self._stops.let_pass(text))
            return False
        shown, found = self._stops.push(text)
        pieces.append(shown)
        if found is None:
            return False
        self.stop_string = found
        if self._rules.include_stop:
            pieces.append(found)
        return True

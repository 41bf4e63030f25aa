"""What a client gets of one generation: text, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastgen.core.request import FinishReason
from fastgen.text.detokenizer import Detokenizer
from fastgen.text.stop_strings import StopStrings
from fastgen.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRules:
    """How a generation's tokens become its text.

    Attributes:
        stop: strings that end the text.
        include_stop: does the text keep the stop string, or the text of the token, that ended it?
        min_tokens: tokens before which no stop string ends the text.
        skip_special_tokens: do special tokens give no text?
        shown_tokens: special tokens that give text all the same.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    shown_tokens: frozenset[int] = frozenset()


_PLAIN = TextRules()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of a generation's text; `finish_reason` is set on the last one."""

    text: str
    finish_reason: FinishReason | None = None


class OutputText:
    """One generation's text so far, as far as it may be shown.

    Attributes:
        num_tokens: tokens taken in, up to the one that completed a stop string.
        stop_string: the stop string that was found, if one was.
        finish_reason: why the generation ended, once it has.
    """

    __slots__ = ("_detokenizer", "_rules", "_stops", "finish_reason", "num_tokens", "stop_string")

    def __init__(self, tokenizer: Tokenizer, rules: TextRules = _PLAIN) -> None:
        hidden = tokenizer.special_token_ids - rules.shown_tokens if rules.skip_special_tokens else frozenset[int]()
        self._rules = rules
        self._detokenizer = Detokenizer(tokenizer, hidden)
        self._stops = StopStrings(rules.stop)
        self.num_tokens = 0
        self.stop_string: str | None = None
        self.finish_reason: FinishReason | None = None

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> TextDelta:
        """Takes in what the engine gave; a stop string found in it finishes the generation here.

        Where the engine says `stop`, the last token is the one that stopped it: a mark, which is no part of the text
        unless the rules include it.
        """
        assert self.finish_reason is None, "this generation has finished"
        pieces: list[str] = []
        ends_with_mark = finish_reason is FinishReason.STOP and not self._rules.include_stop
        last_text_token = len(token_ids) - ends_with_mark
        for place, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if place >= last_text_token:
                continue
            if self._show(self._detokenizer.push([token_id]), pieces):
                return self._finish(pieces, FinishReason.STOP)
        if finish_reason is None:
            return TextDelta("".join(pieces))
        if self._show(self._detokenizer.finish(), pieces):
            return self._finish(pieces, FinishReason.STOP)
        pieces.append(self._stops.finish())
        return self._finish(pieces, finish_reason)

    def _show(self, text: str, pieces: list[str]) -> bool:
        """Adds what may be shown of `text` to `pieces`; did a stop string end it?"""
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

    def _finish(self, pieces: list[str], reason: FinishReason) -> TextDelta:
        self.finish_reason = reason
        return TextDelta("".join(pieces), reason)

"""What a client gets of one generation: text, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastgen.core.request import FinishReason
from fastgen.text.detokenizer import Detokenizer
from fastgen.text.stop import StopStrings
from fastgen.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next piece of a generation's text; `finish_reason` is set on the last one."""

    text: str
    finish_reason: FinishReason | None = None


class OutputText:
    """One generation's text so far, as far as it may be shown.

    `num_tokens` counts the tokens taken in, up to the one that completed a stop string.
    """

    __slots__ = ("_detokenizer", "_stops", "finish_reason", "num_tokens")

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> TextDelta:
        """Takes in what the engine gave; a stop string found in it finishes the generation here.

        Where the engine says `stop`, the last token is the one that stopped it: a mark, which is no part of the text.
        """
        assert self.finish_reason is None, "this generation has finished"
        pieces: list[str] = []
        last_text_token = len(token_ids) - (finish_reason is FinishReason.STOP)
        for place, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if place >= last_text_token:
                continue
            text, found = self._stops.push(self._detokenizer.push([token_id]))
            pieces.append(text)
            if found is not None:
                return self._finish(pieces, FinishReason.STOP)
        if finish_reason is None:
            return TextDelta("".join(pieces))
        text, found = self._stops.push(self._detokenizer.finish())
        pieces += [text, self._stops.finish()]
        return self._finish(pieces, FinishReason.STOP if found is not None else finish_reason)

    def _finish(self, pieces: list[str], reason: FinishReason) -> TextDelta:
        self.finish_reason = reason
        return TextDelta("".join(pieces), reason)

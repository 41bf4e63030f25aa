"""Text of one generation: incremental detokenization, cut at stop strings.

Where parsers look for marks, the text has guards, see `fastgen.text.spelled_marks`.

Stop strings apply to the answer, not to the reasoning before it, as with hosted APIs (OpenAI's reasoning models reject
`stop`). vLLM matches them in the reasoning too and then returns no content: its issue 52393.
"""

from __future__ import annotations

from collections.abc import Sequence

from fastgen.core.request import FinishReason, Request
from fastgen.text.detokenizer import Detokenizer, incomplete_end
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.special_stops import SpecialStops
from fastgen.text.spelled_marks import Guards, SpelledMarks
from fastgen.text.stop_strings import StopStrings
from fastgen.text.tokenizer import Tokenizer


class OutputText:
    """Detokenizes one generation and detects its stop strings.

    Attributes:
        num_tokens: tokens consumed, up to and including the one that completed a stop string.
        stop_string: the stop string that ended the text, if any.
        finish_reason: why the generation ended; None while it runs.
    """

    __slots__ = (
        *("_answer", "_detokenizer", "_guards", "_include_stop", "_min_tokens", "_special_stops", "_spelled", "_stops"),
        *("finish_reason", "num_tokens", "stop_string"),
    )

    def __init__(self, tokenizer: Tokenizer, rendered: RenderedRequest, request: Request) -> None:
        hidden, stop = frozenset[int](), rendered.stop
        if rendered.skip_special_tokens:
            hidden = tokenizer.special_token_ids - tokenizer.added_ids_of(rendered.marks)
        incomplete = incomplete_end(request.prompt_token_ids, tokenizer, hidden) if rendered.echo else b""
        self._detokenizer = Detokenizer(tokenizer, hidden, incomplete)
        self._special_stops = SpecialStops.of(stop, tokenizer.vocabulary, hidden) if stop else SpecialStops(())
        self._stops = StopStrings(self._special_stops.stops)
        self._spelled, self._guards = SpelledMarks(tokenizer, rendered.marks), Guards()
        self._include_stop = rendered.include_stop
        self._min_tokens = request.sampling.min_tokens
        self._answer = rendered.reasoning.answer_finder(rendered.start) if stop and rendered.reasoning else None
        self.num_tokens = 0
        self.stop_string: str | None = None
        self.finish_reason: FinishReason | None = None

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> str:
        """Add tokens from the engine and return the new text.

        A stop string sets `finish_reason` even if the engine has not finished. If the engine finished with `stop`, the
        last token is the end-of-sequence or stop token; it gives no text unless it is to be included, and it still
        completes a stop string that names it.
        """
        assert self.finish_reason is None, "this generation has finished"
        ends_with_stop_token = finish_reason is FinishReason.STOP and not self._include_stop
        num_text_tokens = len(token_ids) - ends_with_stop_token
        if not self._special_stops.stops:  # all tokens at once
            self.num_tokens += len(token_ids)
            text = self._text(token_ids[:num_text_tokens] if ends_with_stop_token else token_ids)
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
                text = self._text([token_id]) if position < num_text_tokens else ""
            if self._append(text, pieces):
                finish_reason = FinishReason.STOP
                break
        else:
            if finish_reason is not None and self._end(pieces):
                finish_reason = FinishReason.STOP
        self.finish_reason = finish_reason
        return self._special_stops.without_marks("".join(pieces)) + self._included

    def _text(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens complete, guarded."""
        push, spelled = self._detokenizer.push, self._spelled
        if not spelled.token_ids:
            return push(token_ids)
        if spelled.token_ids.isdisjoint(token_ids):
            return spelled.guarded(push(token_ids))
        return "".join(
            spelled.own(push([token_id])) if token_id in spelled.token_ids else spelled.guarded(push([token_id]))
            for token_id in token_ids
        )

    def _append(self, text: str, pieces: list[str]) -> bool:
        """Append the part of `text` that may be shown; return whether a stop string ended it."""
        if self._answer is None:
            return self._append_answer(text, pieces)
        before, answer = self._answer.push(text)
        pieces.append(before)
        return self._append_answer(answer, pieces)

    def _append_answer(self, text: str, pieces: list[str]) -> bool:
        text = self._guards.take(text)
        if self.num_tokens < self._min_tokens:
            pieces.append(self._guards.put(self._stops.let_pass(text)))
            return False
        shown, found = self._stops.push(text)
        pieces.append(self._guards.put(shown))
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
        pieces.append(self._guards.put(self._stops.finish()))
        return False

    @property
    def _included(self) -> str:
        """The stop string, if it ended the text and belongs to it."""
        return self.stop_string if self.stop_string is not None and self._include_stop else ""

"""Computes the answers of a receipt again, and compares their tokens."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass

from fastgen.core.request import FinishReason, Request
from fastgen.core.sampling_params import MOST_LOGPROBS
from fastgen.core.step_output import TokenLogprobs
from fastgen.llm.llm import LLM
from fastgen.receipt import Receipt, ReceiptAnswer, ReceiptNumbers, ReceiptPrompt, engine_versions, shown_finish
from fastgen.settings import ConfigError
from fastgen.text.grammars.checker import CheckerUnavailable, GrammarChecker

_GIVEN_UP = (FinishReason.OUT_OF_MEMORY, FinishReason.GRAMMAR, FinishReason.REJECTED)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place at which an answer differs from the one that was computed again.

    Attributes:
        position: number of equal tokens before it.
        expected: the receipt's token; None if its answer ends here.
        found: the token that was computed, with the most likely ones; None if the generation ends here.
        reason: why the answer that ends here does, `stop` or `length`; empty if both have a token, or if only the stop
            string is missing.
    """

    position: int
    expected: int | None = None
    found: TokenLogprobs | None = None
    reason: str = ""

    @property
    def expected_logprob(self) -> float | None:
        """The logprob of the receipt's token here; None if it is not one of the most likely ones."""
        if self.found is None or self.expected is None:
            return None
        return dict(self.found.top).get(self.expected)


class Verifier:
    """Computes answers again, each alone in the engine.

    Args:
        model: the receipt's model, without any other requests.
    """

    def __init__(self, model: LLM) -> None:
        self._model = model
        self._grammars = GrammarChecker(model.tokenizer)
        self._num_requests = 0

    def first_difference(self, prompt: ReceiptPrompt, answer: ReceiptAnswer) -> Difference | None:
        """Return where an answer differs from the one that this engine computes, or None if it does not.

        After a stop string or a deadline, only the tokens before it are compared, and that the stop string is there.

        Raises:
            RequestError: if the model cannot serve the request.
            ConfigError: if it cannot be computed here.
        """
        expected = answer.token_ids
        with closing(self._generate(prompt, answer)) as generated:
            for position, (token, reason) in enumerate(generated):
                if position == len(expected) and answer.is_cut:
                    return self._missing_stop(prompt, answer)
                if token is None:
                    if position < len(expected):
                        return Difference(position, expected[position], reason=reason)
                    return None if reason == answer.finish_reason else Difference(position, reason=reason)
                if position == len(expected):
                    return Difference(position, found=token, reason=answer.finish_reason)
                if token.token_id != expected[position]:
                    return Difference(position, expected[position], token)
        raise AssertionError("a generation ends with a reason")

    def _missing_stop(self, prompt: ReceiptPrompt, answer: ReceiptAnswer) -> Difference | None:
        if answer.stop_string is None:
            return None
        # The first token may complete a character of the prompt.
        texts = (self._model.tokenizer.decode(tokens, skip_special_tokens=False)
                 for tokens in (answer.token_ids, prompt.token_ids + answer.token_ids))  # fmt: skip
        return None if any(answer.stop_string in text for text in texts) else Difference(len(answer.token_ids))

    def _generate(self, prompt: ReceiptPrompt, answer: ReceiptAnswer) -> Generator[tuple[TokenLogprobs | None, str]]:
        """Yield each token with an empty reason, then None with the finish reason."""
        sampling, engine = prompt.sampling_params(answer, logprobs=MOST_LOGPROBS), self._model.engine
        if sampling.grammar is not None:
            try:
                self._grammars.check(sampling.grammar)
            except CheckerUnavailable as error:
                raise ConfigError(f"the receipt's grammar: {error}: try again") from None
        self._num_requests += 1
        request = Request(id=f"verify-{self._num_requests}", prompt_token_ids=prompt.token_ids, sampling=sampling)
        engine.add(request)
        try:
            while True:
                for output in engine.step().outputs:
                    if output.request_id != request.id:  # of an answer that was cut
                        continue
                    for token in output.logprobs or ():
                        yield token, ""
                    if output.finish_reason in _GIVEN_UP:
                        raise ConfigError(f"the answer cannot be computed here: {output.finish_reason}")
                    if output.finish_reason is not None:
                        yield None, shown_finish(output.finish_reason)
                        return
        finally:
            engine.cancel(request.id)


def obstacles(receipt: Receipt, here: ReceiptNumbers) -> list[str]:
    """Return why equal tokens are not promised here, a phrase for each reason; empty if they are.

    They are promised with `--deterministic`, for equal formats, instruction sets and versions.
    """
    then, versions = receipt.numbers, engine_versions()
    found = []
    if not then.deterministic:
        found.append(
            "the receipt was made without --deterministic: other requests, and how its prompt was divided into chunks, "
            f"may have changed the last bits of its {then.dtype} logits"
        )
    for name in ReceiptNumbers.__struct_fields__:
        before, now = getattr(then, name), getattr(here, name)
        if before != now and not (name == "deterministic" and now):
            found.append(f"{name.replace('_', ' ')} is {now} here and {before} in the receipt")
    for name in sorted({*receipt.engine, *versions}):
        before, now = receipt.engine.get(name, "missing"), versions.get(name, "missing")
        if before != now:
            found.append(f"{name} is {now} here and {before} in the receipt")
    return found

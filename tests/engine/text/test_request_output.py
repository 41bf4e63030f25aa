"""The output of one request, accumulated from token outputs."""

from __future__ import annotations

from engine.text.matching import END, byte_tokenizer
from fastgen.core.request import FinishReason, Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.step_output import TokenLogprobs
from fastgen.link.messages import TokenOutput
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.request_output import OutputDelta, RequestOutput, Usage

TOKENIZER = byte_tokenizer(None)


def tokens(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def token_output(token_ids: list[int], finish_reason: FinishReason | None = None) -> TokenOutput:
    logprobs = [TokenLogprobs(token, -0.5, 1) for token in token_ids]
    return TokenOutput(request_id="a", token_ids=token_ids, finish_reason=finish_reason, logprobs=logprobs)


def request_output(*, stop: tuple[str, ...] = (), **sampling: object) -> RequestOutput:
    request = Request(id="a", prompt_token_ids=[1, 2, 3], sampling=SamplingParams(**sampling))  # type: ignore[arg-type]
    return RequestOutput(request, TOKENIZER, RenderedRequest(requests=[request], stop=stop))


def taken(output: RequestOutput, added: TokenOutput) -> OutputDelta:
    """Add an engine output and return the delta."""
    output.push(added)
    return output.take()


def test_outputs_that_were_not_taken_are_merged() -> None:
    output = request_output(logprobs=0)
    for letter in "abc":
        output.push(token_output(tokens(letter)))
    assert output.has_delta
    delta = output.take()
    assert (delta.text, [entry.token_id for entry in delta.logprobs]) == ("abc", tokens("abc"))
    assert not output.has_delta
    assert output.take().text == ""


def test_a_bounded_delta_leaves_the_rest_for_the_next() -> None:
    output = request_output(logprobs=0)
    for letter in "abcde":
        output.push(token_output(tokens(letter)))
    output.push(token_output(tokens("\u00e9")[:1], FinishReason.LENGTH))
    found = []
    while not found or output.is_cut:
        assert output.has_delta
        found.append(output.take(2))
    assert [(delta.text, len(delta.logprobs), delta.finish_reason) for delta in found] == [
        ("ab", 2, None),
        ("cd", 2, None),
        ("e\ufffd", 2, FinishReason.LENGTH),
    ]


def test_logprobs_of_tokens_without_text_are_bounded_as_well() -> None:
    output = request_output(logprobs=0)
    output.push(token_output([END] * 4))
    assert not output.has_delta
    output.push(token_output(tokens("a")))
    assert [(output.take(3).text, output.is_cut), (len(output.take(3).logprobs), output.is_cut)] == [
        ("a", True),
        (2, False),
    ]
    assert not output.has_delta


def test_logprobs_of_held_back_text_come_with_the_next_text() -> None:
    output = request_output(logprobs=0)
    first, second = tokens("é")
    held, shown = taken(output, token_output([first])), taken(output, token_output([second]))
    assert (held.text, list(held.logprobs)) == ("", [])
    assert (shown.text, [entry.token_id for entry in shown.logprobs]) == ("é", [first, second])


def test_tokens_after_a_stop_string_are_dropped() -> None:
    output = request_output(stop=("b",), logprobs=0)
    delta = taken(output, token_output(tokens("abc")))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", FinishReason.STOP, "b")
    assert output.token_ids == tokens("ab")
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == tokens("ab")


def test_stop_reason_is_the_stop_token_but_not_the_end_of_sequence_token() -> None:
    stopped, ended = request_output(stop_token_ids=(7,)), request_output(stop_token_ids=(7,))
    assert taken(stopped, token_output([*tokens("a"), 7], FinishReason.STOP)).stop_reason == 7
    assert taken(ended, token_output([*tokens("a"), END], FinishReason.STOP)).stop_reason is None


def test_deltas_add_up_to_the_complete_output() -> None:
    output = request_output(logprobs=0)
    deltas = [taken(output, token_output([token])) for token in tokens("naïve")]
    deltas.append(taken(output, token_output([], FinishReason.LENGTH)))
    complete = output.as_delta()
    assert "".join(delta.text for delta in deltas) == complete.text == output.text == "naïve"
    assert [entry for delta in deltas for entry in delta.logprobs] == list(complete.logprobs)
    assert complete.finish_reason is FinishReason.LENGTH


def test_usage_counts_prompt_completion_and_cached_tokens() -> None:
    output = request_output()
    output.push(TokenOutput(request_id="a", token_ids=tokens("ab"), cached_tokens=2, queue_seconds=0.5))
    assert output.usage == Usage(3, 2, 2)
    assert output.usage.total_tokens == 5
    assert (output.queue_seconds, output.logprobs, output.prompt_logprobs) == (0.5, None, None)

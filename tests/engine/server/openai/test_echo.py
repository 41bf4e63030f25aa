"""`echo`: prompt and generation are one text, wherever the prompt ends, and offsets index it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.server.serving import Serving
from fastgen.core.request import FinishReason, Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.core.step_output import TokenLogprobs
from fastgen.link.messages import TokenOutput
from fastgen.server.openai import echo
from fastgen.server.openai.completions import _ChoiceWriter
from fastgen.server.openai.generation_request import CompletionRequest
from fastgen.text.request_output import RequestOutput
from fastgen.text.tokenizer import Tokenizer

LOGPROBS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
# Characters of one, two, three and four bytes; most of them take several tokens.
TEXTS = st.text("ab \u00e9\u6f22\U0001f336\u0e01\u2028", min_size=2, max_size=12)


def complete(server: Serving, **fields: Any) -> dict[str, Any]:
    """Return the choice; its stream must add up to it."""
    body = {"max_tokens": 4, "echo": True, "logprobs": 1, **fields}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    lines = server.post("/v1/completions", {**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(chunk["text"] for chunk in chunks) == choice["text"]
    for name in LOGPROBS:
        assert [entry for c in chunks if c["logprobs"] for entry in c["logprobs"][name]] == choice["logprobs"][name]
    return choice


def assert_offsets_index_the_text(choice: dict[str, Any]) -> None:
    """Each token of whole characters begins at its offset; all others begin with the character they belong to."""
    logprobs, text = choice["logprobs"], choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or token.startswith("<|") or text.startswith(token, offset), (token, offset)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_a_character_that_the_prompt_begins_is_completed_by_the_generation(
    scripted: Serving, smollm2: Tokenizer
) -> None:
    """The scripted engine repeats the prompt, so it goes on with the character's last token."""
    chilli = smollm2.encode("\U0001f336", add_special_tokens=False)
    assert len(chilli) == 3
    prompt = [chilli[2], *smollm2.encode(" hi", add_special_tokens=False), *chilli[:2]]
    choice = complete(scripted, prompt=prompt, max_tokens=2)
    assert choice["text"] == "\ufffd hi\U0001f336 hi"
    assert_offsets_index_the_text(choice)
    # Without echo, the text is that of the generation alone.
    assert complete(scripted, prompt=prompt, max_tokens=2, echo=False)["text"] == "\ufffd hi"
    # Without a generation, nothing completes it.
    body = {"prompt": prompt, "max_tokens": 0, "echo": True}
    assert scripted.post("/v1/completions", body).json()["choices"][0]["text"] == "\ufffd hi\ufffd"


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, place=st.integers(0, 100), stop=st.sampled_from([None, "\u6f22"]), sizes=st.lists(st.integers(1, 3)))
def test_echo_and_generation_are_the_text_of_all_tokens(
    smollm2: Tokenizer, text: str, place: int, stop: str | None, sizes: list[int]
) -> None:
    ids = smollm2.encode(text, add_special_tokens=False)
    cut = 1 + place % len(ids)
    prompt, generated = ids[:cut], ids[cut:]
    body = CompletionRequest(prompt=prompt, echo=True, logprobs=0, stop=stop)  # type: ignore[arg-type]
    request = Request(id="", prompt_token_ids=prompt, sampling=SamplingParams(logprobs=0, prompt_logprobs=0))

    def made(pieces: list[list[int]]) -> tuple[str, dict[str, list[Any]]]:
        output, writer = (
            RequestOutput(request, smollm2, body.rendered([request], echo=bool(body.echo))),
            _ChoiceWriter(0, body, smollm2),
        )
        written = ["", {name: [] for name in LOGPROBS}]
        for number, piece in enumerate(pieces):
            is_last = number == len(pieces) - 1
            entries = [TokenLogprobs(token, -1.0, 1, ()) for token in piece]
            before = [TokenLogprobs(token, -1.0, 1, ()) for token in prompt[1:]] if not number else None
            output.push(
                TokenOutput(
                    request_id="",
                    token_ids=piece,
                    logprobs=entries,
                    prompt_logprobs=before,
                    finish_reason=FinishReason.LENGTH if is_last else None,
                )
            )
            if output.has_delta:
                choice = writer.write(output, output.take())
                written[0] += choice.text
                for name in LOGPROBS:
                    written[1][name] += getattr(choice.logprobs, name)
            if output.finish_reason is not None:
                break
        return written[0], written[1]

    pieces, rest = [], generated
    for size in sizes:
        pieces, rest = [*pieces, rest[:size]], rest[size:]
    whole = made([generated])
    assert made([*pieces, rest]) == whole
    if stop is None:
        assert whole[0] == text
        assert_offsets_index_the_text({"text": whole[0], "logprobs": whole[1]})
    else:
        prompt_length = len(echo.echoed(prompt, prompt, smollm2, frozenset()))
        found = text.find(stop, prompt_length)
        assert whole[0] == (text if found < 0 else text[:found])


PROMPT = "Caf\u00e9 \U0001f336 is <|im_start|>hot today"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 6, 7, 8, 9, 100])
def test_a_truncated_prompt_is_echoed_as_far_as_the_model_got_it(
    scripted: Serving, smollm2: Tokenizer, side: str, as_ids: bool, limit: int
) -> None:
    ids = smollm2.encode(PROMPT, add_special_tokens=False)
    kept = ids[-limit:] if side == "left" else ids[:limit]
    body = {"truncate_prompt_tokens": limit, "truncation_side": side, "skip_special_tokens": False, "max_tokens": 1}
    choice = complete(scripted, prompt=ids if as_ids else PROMPT, **body)
    assert choice["text"] == smollm2.decode([*kept, kept[0]], skip_special_tokens=False)
    assert len(choice["logprobs"]["tokens"]) == len(kept) + 1
    assert_offsets_index_the_text(choice)


def test_a_prompt_that_is_not_shortened_is_echoed_as_it_was_given(scripted: Serving) -> None:
    for prompt in (PROMPT, " two  spaces", "<|im_start|>"):
        choice = complete(scripted, prompt=prompt, truncate_prompt_tokens=-1, max_tokens=1)
        assert choice["text"].startswith(prompt)
        assert_offsets_index_the_text(choice)


def test_a_token_behind_bytes_that_are_no_character_begins_after_the_replacement(smollm2: Tokenizer) -> None:
    ids = [
        *smollm2.encode("\U0001f336", add_special_tokens=False)[:2],
        *smollm2.encode(" hi", add_special_tokens=False),
    ]
    text = echo.echoed(ids, ids, smollm2, frozenset())
    assert text == "\ufffd hi"
    assert echo.offsets(text, ids, smollm2, frozenset()) == [0, 0, 1]


def test_special_tokens_hidden_inside_a_character_do_not_shift_the_offsets(smollm2: Tokenizer) -> None:
    chilli = smollm2.encode("\U0001f336", add_special_tokens=False)
    hidden = smollm2.special_token_ids
    ids = [chilli[0], min(hidden), *chilli[1:], *smollm2.encode(" hi", add_special_tokens=False)]
    text = echo.echoed(ids, ids, smollm2, hidden)
    assert text == "\U0001f336 hi"
    assert echo.offsets(text, ids, smollm2, hidden) == [0, 0, 0, 0, 1]


SPACE, A, B, C = 259, 260, 261, 262
# A SentencePiece vocabulary, which adds a space before a text and drops it when decoding.
PIECES = Tokenizer.load(
    {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abc"],
        "tokenizer.ggml.scores": [0.0] * 263,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 4],
    }
)


@pytest.mark.parametrize(
    ("prompt", "shows_special", "text", "offsets"),
    [
        ("ab", True, "ab", [0, 0, 0, 1]),
        (" a", True, " a", [0, 0, 0, 1]),
        ("  a b", True, "  a b", [0, 0, 0, 1, 2, 3, 4]),
        ("<s>a", True, "<s>a", [0, 0, 3, 3]),
        ("<s><s>b", True, "<s><s>b", [0, 0, 3, 6, 6]),
        ("é a", True, "é a", [0, 0, 0, 0, 1, 2]),
        ([SPACE, SPACE, 0, SPACE, A], False, "  a", [0, 0, 1, 1, 2]),
        ([1, SPACE, A, SPACE, B], False, "a b", [0, 0, 0, 1, 2]),
        ([1, SPACE, A, 1, B], True, "<s> a<s>b", [0, 3, 4, 5, 8]),
        ([1, 1, A], True, "<s><s>a", [0, 3, 6]),
        ([A, 1, SPACE, B], False, "a b", [0, 1, 1, 2]),
        ([SPACE, SPACE, SPACE], True, "  ", [0, 0, 1]),
        ([SPACE, 3 + 0xC3, 3 + 0xA9, A], True, "éa", [0, 0, 0, 1]),
        ([SPACE, A, 3 + 0xC3], True, "a", [0, 0, 1]),
        ([3 + 0xC3, SPACE, A], True, "\ufffd a", [0, 1, 2]),
        ([3 + 0x20, A], True, "a", [0, 0]),
    ],
)
def test_offsets_skip_what_encoding_adds(
    prompt: str | list[int], shows_special: bool, text: str, offsets: list[int]
) -> None:
    hidden = frozenset[int]() if shows_special else PIECES.special_token_ids
    given = isinstance(prompt, str)
    ids = PIECES.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
    assert text == (prompt if given else echo.echoed(prompt, ids, PIECES, hidden))
    assert echo.offsets(text, ids, PIECES, frozenset() if given else hidden) == offsets

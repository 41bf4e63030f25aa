"""Several choices per prompt, usage, and deadlines."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import openai
import pytest

from engine.server.scripted_engine import scripted_logprobs
from engine.server.scripted_prompts import messages_for, prompt_for
from engine.server.serving import Serving
from support.waiting import wait_until

# A server that was stopped for a while sends the tokens of that time in one chunk.
MOST_ATTEMPTS = 20
COLOURS = prompt_for("red", "green and blue", "yellow of some kind", "violet", "no colour at all")


def complete(server: Serving, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", {"max_tokens": 20, **body})
    assert response.status_code == 200, response.text
    return dict(response.json())


def texts(done: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in done["choices"]] == list(range(len(done["choices"])))
    return [choice["text"] for choice in done["choices"]]


def test_n_choices_differ_and_the_first_equals_a_single_choice(scripted: Serving) -> None:
    one = complete(scripted, prompt=COLOURS, seed=3)
    several = complete(scripted, prompt=COLOURS, seed=3, n=8)
    assert texts(several)[0] == texts(one)[0]
    assert len(set(texts(several))) > 1
    assert several == several | complete(scripted, prompt=COLOURS, seed=3, n=8) | {
        name: several[name] for name in ("id", "created")
    }


def test_choices_of_several_prompts_are_grouped_by_prompt(scripted: Serving) -> None:
    done = complete(scripted, prompt=[prompt_for("a"), prompt_for("b")], n=2)
    assert texts(done) == ["a", "a", "b", "b"]


def test_a_prompt_with_several_choices_counts_once_in_usage(scripted: Serving) -> None:
    one, three = (complete(scripted, prompt=[prompt_for("a b"), prompt_for("c")], n=n)["usage"] for n in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]
    assert three["total_tokens"] == three["prompt_tokens"] + three["completion_tokens"]


def test_best_of_returns_the_choices_with_the_highest_mean_logprob(scripted: Serving) -> None:
    body = {"prompt": COLOURS, "seed": 11, "logprobs": 0}
    everything = complete(scripted, **body, n=12)
    best = complete(scripted, **body, n=2, best_of=12)
    by_likelihood = sorted(
        (-fmean(choice["logprobs"]["token_logprobs"]), choice["text"]) for choice in everything["choices"]
    )
    assert by_likelihood[0][0] < by_likelihood[-1][0]
    assert texts(best) == [text for _, text in by_likelihood[:2]]
    assert best["usage"] == everything["usage"]


def test_best_of_works_without_returning_logprobs(scripted: Serving) -> None:
    done = complete(scripted, prompt=COLOURS, seed=11, best_of=12)
    assert len(done["choices"]) == 1
    assert done["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"n": 100, "prompt": ["a"] * 11}, "prompt"),
    ],
)
def test_an_invalid_number_of_choices_is_rejected(scripted: Serving, fields: dict[str, Any], param: str) -> None:
    response = scripted.post("/v1/completions", {"prompt": "a", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_streamed_chat_choices_interleave_and_each_starts_with_its_role(scripted: Serving) -> None:
    chunks = list(
        scripted.client().chat.completions.create(
            model="smollm2", messages=messages_for("one", "two three"), n=4, seed=1, stream=True
        )
    )
    full = scripted.client().chat.completions.create(
        model="smollm2", messages=messages_for("one", "two three"), n=4, seed=1
    )
    for index in range(4):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(choice.delta.content or "" for choice in own) == full.choices[index].message.content
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + ["stop"]


def test_usage_can_be_sent_with_every_chunk(scripted: Serving) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    prompt = prompt_for(" ".join(["one two three"] * 20))
    counts = list[int]()
    for _ in range(MOST_ATTEMPTS):
        chunks = list(
            scripted.client().completions.create(
                model="smollm2", prompt=prompt, max_tokens=80, stream=True, stream_options=options
            )
        )
        counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
        assert len(counts) == len(chunks)
        assert counts == sorted(counts)
        if len(set(counts)) > 2:
            break
    assert len(set(counts)) > 2


def test_usage_reports_cached_tokens(scripted: Serving) -> None:
    body = {"prompt": "word " * 300, "max_tokens": 1}
    complete(scripted, **body)
    details = complete(scripted, **body)["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 200
    salted = complete(scripted, **body, cache_salt="another tenant")["usage"]["prompt_tokens_details"]
    assert salted["cached_tokens"] == 0


def test_a_deadline_ends_a_generation_with_its_output_so_far(slow: Serving) -> None:
    body = {"prompt": "go on", "max_tokens": 2000, "ignore_eos": True}
    for seconds in (0.5, 2, 8, 30):  # a busy machine may need the first ones for the first token
        response = slow.post("/v1/completions", {**body, "timeout": seconds})
        if response.status_code != 408 and response.json()["usage"]["completion_tokens"] > 1:
            break
    done = response.json()
    assert done["choices"][0]["finish_reason"] == "abort"
    assert 1 < done["usage"]["completion_tokens"] <= seconds / 0.02 + 1, "steps take 20 ms at least"


def test_a_deadline_before_the_first_token_is_a_408(slow: Serving) -> None:
    body = {"prompt": "go on", "timeout": 1e-6}
    response = slow.post("/v1/completions", body)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "deadline_exceeded")
    with pytest.raises(openai.APIError, match="timeout"):
        list(
            slow.client().completions.create(
                model=slow.client().models.list().data[0].id, prompt="go on", stream=True, extra_body=body
            )
        )
    response = slow.post("/v1/completions", {**body, "timeout": 0})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "timeout")
    assert "timeout is 0" in response.json()["error"]["message"]
    wait_until(lambda: slow.metric("fastgen_num_requests_running") == 0, "everything to be freed")


def test_scripted_logprobs_have_ranks() -> None:
    assert scripted_logprobs(8, 3).rank == 1
    assert scripted_logprobs(9, 3).rank == 2

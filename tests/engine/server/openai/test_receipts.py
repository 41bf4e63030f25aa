"""Receipts: what another machine needs to compute an answer again."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.server.openai_types import events
from engine.server.scripted_prompts import messages_for, prompt_for
from engine.server.serving import REAL, Serving, serving
from fastgen.llm.llm import LLM
from fastgen.llm.verification import Verifier, obstacles
from fastgen.model.file_digests import FilesAtStart
from fastgen.receipt import Receipt, ReceiptNumbers, parse_receipt
from fastgen.server.http.api_error import APIError
from fastgen.server.serving.file_digests import FileDigests

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "hot": {"type": "boolean"}},
    "required": ["name", "hot"],
    "additionalProperties": False,
}


def answered(server: Serving, path: str, body: dict[str, Any]) -> Any:
    # Processors without bfloat16 compute it slowly, and a busy machine checks a grammar late.
    response = httpx.post(server.url + path, json={**body, "receipt": True}, timeout=600)
    assert response.status_code == 200, response.text
    return response.json()


def receipt_of(response: Any) -> Receipt:
    receipt = parse_receipt(json.dumps(response["receipt"]).encode())
    assert receipt.digest == receipt.computed_digest()
    return receipt


# With the scripted engine.


def test_a_receipt_has_the_prompt_the_sampling_and_the_answer(scripted: Serving) -> None:
    body = {
        "prompt": [[504, 2365], [504]],
        "max_tokens": 3,
        "seed": 7,
        "temperature": 0.5,
        "logit_bias": {"504": 1},
        "return_token_ids": True,
    }
    response = answered(scripted, "/v1/completions", body)
    receipt = response["receipt"]
    assert (receipt["version"], receipt["model"]["name"]) == (1, "smollm2")
    assert receipt["numbers"]["dtype"] == "float32"
    assert receipt["numbers"]["arithmetic"]
    assert receipt["engine"]["fastgen"] == scripted.get("/version").json()["version"]
    for prompt, choice, tokens in zip(receipt["prompts"], response["choices"], body["prompt"], strict=True):  # type: ignore[arg-type]
        assert prompt["token_ids"] == tokens
        assert prompt["sampling"] == {"max_tokens": 3, "temperature": 0.5, "logit_bias": [[504, 1.0]]}
        assert prompt["answers"] == [
            {
                "index": choice["index"],
                "seed": "7",
                "token_ids": choice["token_ids"],
                "finish_reason": "length",
                "stop_string": None,
            }
        ]
    receipt_of(response)


def test_a_receipt_names_the_models_files(small_model: Path, tmp_path: Path) -> None:
    with serving(tmp_path, model=str(small_model)) as server:
        server.wait_status("/ready", 200)
        found = answered(server, "/v1/completions", {"prompt": "a"})["receipt"]["model"]["files"]
    assert [file["name"] for file in found] == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert found[3]["size"] == (small_model / "model.safetensors").stat().st_size


def test_choices_without_a_seed_have_a_seed_each(scripted: Serving) -> None:
    body = {"messages": messages_for("one", "two"), "n": 3}
    answers = answered(scripted, "/v1/chat/completions", body)["receipt"]["prompts"][0]["answers"]
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert len({answer["seed"] for answer in answers}) == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_ends_with_the_receipt_of_the_whole_response(scripted: Serving, path: str) -> None:
    prompt = {"messages": messages_for("one two", "three")}
    if path == "/v1/completions":
        prompt = {"prompt": prompt_for("one two", "three")}  # type: ignore[dict-item]
    body = {**prompt, "seed": 4, "n": 2, "max_tokens": 8, "receipt": True}
    whole = answered(scripted, path, body)["receipt"]
    chunks = events(scripted, path, body)
    assert [index for index, chunk in enumerate(chunks) if "receipt" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["receipt"] == whole
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    lines = scripted.post(path, {**body, "stream": True}).text.split("\n\n")
    last = json.loads(lines[-3].removeprefix("data: "))
    assert last["receipt"] == whole
    assert "usage" not in last
    assert lines[-2] == "data: [DONE]"


def test_a_response_has_the_receipt_of_its_chat_streamed_or_whole(scripted: Serving) -> None:
    words = ("one two", "three")
    sampled = {"seed": 4, "temperature": 0.7}
    response = answered(scripted, "/v1/responses", {"input": messages_for(*words), "max_output_tokens": 8, **sampled})
    chat = answered(scripted, "/v1/chat/completions", {"messages": messages_for(*words), "max_tokens": 8, **sampled})
    assert receipt_of(response) == receipt_of(chat)
    body = {"input": messages_for(*words), "max_output_tokens": 8, **sampled, "receipt": True, "stream": True}
    lines = scripted.post("/v1/responses", body).text.splitlines()
    found = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    with_receipt = [event for event in found if "receipt" in event.get("response", {})]
    assert with_receipt == found[-1:], "only the last event"
    assert receipt_of(found[-1]["response"]) == receipt_of(chat)
    assert "receipt" not in scripted.post("/v1/responses", {"input": "a"}).json()


def test_a_stop_string_is_in_the_receipt(scripted: Serving) -> None:
    body = {"prompt": prompt_for("one two three"), "stop": " two", "max_tokens": 8}
    (answer,) = answered(scripted, "/v1/completions", body)["receipt"]["prompts"][0]["answers"]
    assert (answer["finish_reason"], answer["stop_string"]) == ("stop", " two")


def test_only_a_request_for_a_receipt_gets_one(scripted: Serving) -> None:
    for fields in ({}, {"receipt": None}, {"receipt": False}):
        assert "receipt" not in scripted.post("/v1/completions", {"prompt": "a", **fields}).json()


@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        ("/v1/completions", {"receipt": "yes"}, "receipt: Input should be a valid boolean"),
        ("/v1/completions", {"receipt": 1}, "receipt: Input should be a valid boolean"),
        ("/v1/completions", {"receipt": True, "best_of": 2}, "receipt: not available with best_of above n"),
        ("/v1/completions", {"receipt": True, "echo": True, "max_tokens": 0}, "receipt: nothing is generated"),
        ("/v1/responses", {"receipt": "yes", "input": "a"}, "receipt: Input should be a valid boolean"),
    ],
)
def test_a_request_that_cannot_have_a_receipt_is_rejected_by_name(
    scripted: Serving, path: str, fields: dict[str, Any], said: str
) -> None:
    response = scripted.post(path, {"prompt": "a", **fields} if "input" not in fields else fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "receipt"
    assert said in response.json()["error"]["message"]


def test_vectors_have_no_receipts(embedder: Serving) -> None:
    response = embedder.post("/v1/embeddings", {"input": "a", "receipt": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "receipt")


def test_files_that_changed_since_the_start_have_no_receipts(small_model: Path, tmp_path: Path) -> None:
    """Their digests would not be those of the weights that compute."""
    copy = shutil.copytree(small_model, tmp_path / "copy")
    with serving(tmp_path, model=str(copy)) as server:
        server.wait_status("/ready", 200)
        (copy / "config.json").write_text((copy / "config.json").read_text() + "\n")
        response = server.post("/v1/completions", {"prompt": "a", "receipt": True})
        assert (response.status_code, response.json()["error"]["code"]) == (409, "model_changed")
        assert "config.json: has changed since the model was loaded" in response.json()["error"]["message"]
        assert server.post("/v1/completions", {"prompt": "a"}).status_code == 200


async def test_files_are_read_once_and_again_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    digests, read = FileDigests(FilesAtStart.of(path)), FilesAtStart.digests
    reads = []
    monkeypatch.setattr(FilesAtStart, "digests", lambda files: reads.append(files) or read(files))
    away = path.rename(tmp_path / "away")
    with pytest.raises(APIError, match=r"receipt: .*cannot be read"):
        await digests.get()
    away.rename(path)
    leaves = asyncio.ensure_future(digests.get())
    await asyncio.sleep(0)
    leaves.cancel()  # a client that disconnects does not end the reading for the others
    first, second = await asyncio.gather(digests.get(), digests.get())
    assert first is second
    assert await digests.get() is first
    assert len(reads) == 2


# With the real engine.


@dataclass
class Pair:
    """A server, and an engine in this process with the receipt's formats, as `fastgen verify` loads it."""

    server: Serving
    model: LLM

    def check(self, receipt: Receipt) -> None:
        """Verify each answer; tokens must be promised to be equal."""
        assert obstacles(receipt, ReceiptNumbers.of(self.model.info)) == []
        verifier = Verifier(self.model)
        for prompt in receipt.prompts:
            for answer in prompt.answers:
                assert verifier.first_difference(prompt, answer) is None


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    dtype: str = request.param
    options = ("--deterministic", "--dtype", dtype, "--max-model-length", "512", "--kv-cache-memory", "16MiB")
    folder = tmp_path_factory.mktemp(dtype)
    with serving(folder, *options, "--token-budget", "48", command=REAL, model=str(small_model)) as server:
        model = LLM(
            small_model,
            generation_config="none",
            deterministic=True,
            dtype=dtype,
            max_model_length=512,
            kv_cache_memory=16 << 20,
        )
        server.wait_status("/ready", 200, seconds=240)
        yield Pair(server, model)


@pytest.mark.slow
def test_answers_beside_other_requests_are_computed_again_alone(pair: Pair) -> None:
    sampled = {"temperature": 1.1, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.2}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": f"Number {index} " * (3 + 7 * index), "max_tokens": 24, **sampled})
        for index in range(6)
    ]
    bodies += [
        ("/v1/completions", {"prompt": "Greedy", "max_tokens": 40, "temperature": 0, "logit_bias": {"504": 5}}),
        ("/v1/completions", {"prompt": ["One", "Two and more"], "n": 2, "max_tokens": 12, "min_p": 0.01}),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "A city?"}],
                "response_format": {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
                "max_tokens": 80,
                "frequency_penalty": 0.3,
                "bad_words": ["city"],
                **sampled,
            },
        ),
    ]
    with ThreadPoolExecutor(len(bodies)) as pool:
        responses = list(pool.map(lambda case: answered(pair.server, *case), bodies))
    assert json.loads(responses[-1]["choices"][0]["message"]["content"]).keys() == {"name", "hot"}
    for response in responses:
        pair.check(receipt_of(response))


@pytest.mark.slow
def test_an_answer_that_a_stop_string_cuts_is_computed_again(pair: Pair) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 24, "seed": 3}
    text = answered(pair.server, "/v1/completions", body)["choices"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    receipt = receipt_of(answered(pair.server, "/v1/completions", {**body, "stop": stop}))
    (answer,) = receipt.prompts[0].answers
    assert answer.stop_string == stop
    assert len(answer.token_ids) < 24
    pair.check(receipt)

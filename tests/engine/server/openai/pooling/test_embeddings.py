"""/v1/embeddings, /v1/score and /v1/rerank, with the scripted engine: the vector of a text counts its token ids."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from openai.types import CreateEmbeddingResponse

from engine.server.openai.test_special_token_markers import CONFIG
from engine.server.scripted_engine import HIDDEN_SIZE, scripted_logprobs
from engine.server.serving import Serving, serving
from fastgen.server.openai.pooling.request import PoolingRequest
from fastgen.text.reranker import ENDING, beginning
from fastgen.text.tokenizer import Tokenizer
from support.waiting import wait_until

NO, YES = 1000, 2001  # of the vocabulary; logprobs of odd and even tokens differ


@pytest.fixture(scope="session")
def reranker(smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("reranker")
    described = json.loads(smollm2.backend.to_str())
    (folder / "tokenizer.json").write_text(json.dumps(described))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with serving(folder, "--task", "score", model=str(folder)) as server:
        server.wait_status("/ready", 200)
        yield server


def counts(tokens: list[int]) -> npt.NDArray[Any]:
    return np.bincount(np.array(tokens) % HIDDEN_SIZE, minlength=HIDDEN_SIZE).astype(np.float64)


def unit(values: npt.NDArray[Any]) -> list[float]:
    return list(values / np.linalg.norm(values))


def embedded(server: Serving, **body: Any) -> Any:
    response = server.post("/v1/embeddings", body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(server: Serving, path: str, **body: Any) -> Any:
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    return response.json()["error"]


TEXTS = ["The capital of France", "a", "Ünïcode, and a longer sentence to embed."]


def test_the_official_client_gets_the_vectors_of_its_texts(embedder: Serving, smollm2: Tokenizer) -> None:
    tokens = [smollm2.encode(text, add_special_tokens=True) for text in TEXTS]
    got = embedder.client().embeddings.create(model="embedder", input=TEXTS)
    assert [entry.index for entry in got.data] == [0, 1, 2]
    for entry, ids in zip(got.data, tokens, strict=True):
        assert entry.embedding == pytest.approx(unit(counts(ids)), abs=1e-6)
    assert got.usage.prompt_tokens == got.usage.total_tokens == sum(map(len, tokens))
    assert got.model == "embedder"


@pytest.mark.parametrize("encoding_format", ["float", "base64", None])
def test_replies_match_the_official_types(embedder: Serving, encoding_format: str | None) -> None:
    reply = embedded(embedder, input=TEXTS, encoding_format=encoding_format)
    numbers = embedded(embedder, input=TEXTS)
    if encoding_format == "base64":
        for entry in reply["data"]:
            entry["embedding"] = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").tolist()
    CreateEmbeddingResponse.model_validate(reply, strict=True)
    assert [entry["embedding"] for entry in reply["data"]] == [entry["embedding"] for entry in numbers["data"]]


def test_a_text_and_its_token_ids_have_the_same_vector(embedder: Serving, smollm2: Tokenizer) -> None:
    text = TEXTS[0]
    ids = smollm2.encode(text, add_special_tokens=True)
    forms: list[Any] = [text, [text], ids, [ids]]
    vectors = [embedded(embedder, input=form)["data"][0]["embedding"] for form in forms]
    assert all(vector == vectors[0] for vector in vectors)


def test_fewer_dimensions_are_the_first_ones_scaled_again(embedder: Serving, smollm2: Tokenizer) -> None:
    values = counts(smollm2.encode(TEXTS[2], add_special_tokens=True))
    (entry,) = embedded(embedder, input=TEXTS[2], dimensions=3)["data"]
    assert entry["embedding"] == pytest.approx(unit(values[:3]), abs=1e-6)
    (entry,) = embedded(embedder, input=TEXTS[2], normalize=False)["data"]
    assert entry["embedding"] == pytest.approx(list(values / values.sum()), abs=1e-6), "the mean, unscaled"
    error = refused(embedder, "/v1/embeddings", input="a", dimensions=HIDDEN_SIZE + 1)
    assert error["param"] == "dimensions"
    assert str(HIDDEN_SIZE) in error["message"]


def test_long_texts_are_refused_or_truncated(embedder: Serving) -> None:
    ids = list(range(10, 610))
    error = refused(embedder, "/v1/embeddings", input=ids)
    assert error["param"] == "input"
    assert error["message"] == "input: 600 tokens; the limit is 512; shorten it"
    for limit, side, kept in [(-1, None, ids[:512]), (100, None, ids[:100]), (100, "left", ids[-100:])]:
        reply = embedded(embedder, input=ids, truncate_prompt_tokens=limit, truncation_side=side)
        assert reply["data"][0]["embedding"] == pytest.approx(unit(counts(kept)), abs=1e-6)
        assert reply["usage"]["prompt_tokens"] == len(kept)


@pytest.mark.parametrize("nested", [False, True])
def test_an_input_of_too_many_tokens_is_rejected_by_its_length(embedder: Serving, nested: bool) -> None:
    tokens = [1] * 900_000
    error = refused(embedder, "/v1/embeddings", input=[tokens] if nested else tokens)
    assert error["message"] == "input: 900000 tokens; the model takes at most 512; send fewer"


@pytest.mark.parametrize("input", [[[1]] * 5000, ["a"] * 5000], ids=["token ids", "texts"])
def test_an_input_of_too_many_prompts_is_named(embedder: Serving, input: list[object]) -> None:
    error = refused(embedder, "/v1/embeddings", input=input)
    assert error["param"] == "input"
    assert error["message"].startswith("input: 5000 ")


def test_invalid_fields_are_named(embedder: Serving) -> None:
    for body, param in [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": [[1, 99999999]]}, "input"),
        ({"input": "a", "truncation_side": "left"}, "truncation_side"),
        ({"input": "a", "messages": []}, "messages"),
        ({"input": ["a"] * 5000}, "input"),
    ]:
        assert refused(embedder, "/v1/embeddings", **body)["param"] == param, body


def test_a_server_answers_for_its_task_only(scripted: Serving, embedder: Serving, reranker: Serving) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    pairs = {"text_1": "a", "text_2": "b"}
    for server, path, body, told in [
        (scripted, "/v1/embeddings", {"input": "a"}, "generates text; for this route, start one with --task embed"),
        (scripted, "/v1/rerank", {"query": "a", "documents": ["b"]}, "--task score or --task embed"),
        (embedder, "/v1/chat/completions", chat, "embeds texts; for this route, start one with --task generate"),
        (embedder, "/v1/completions", {"prompt": "a"}, "--task generate"),
        (embedder, "/v1/responses", {"input": "a"}, "--task generate"),
        (reranker, "/v1/embeddings", {"input": "a"}, "scores pairs of texts"),
    ]:  # fmt: skip
        response = server.post(path, body)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "wrong_task"
        assert told in response.json()["error"]["message"]
    assert embedder.post("/v1/score", pairs).status_code == 200


def test_similarities_of_an_embedder(embedder: Serving, smollm2: Tokenizer) -> None:
    a, b, c = (np.array(unit(counts(smollm2.encode(text, add_special_tokens=True)))) for text in TEXTS)
    reply = embedder.post("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json()
    assert [entry["score"] for entry in reply["data"]] == pytest.approx([float(a @ b), float(a @ c)], abs=1e-6)
    both = embedder.post("/score", {"queries": TEXTS[:2], "documents": TEXTS[1:]}).json()
    assert [entry["score"] for entry in both["data"]] == pytest.approx([float(a @ b), float(b @ c)], abs=1e-6)
    error = refused(embedder, "/v1/score", text_1=TEXTS, text_2=TEXTS[:2])
    assert error["param"] == "text_1"


def test_documents_are_ranked_by_similarity(embedder: Serving, smollm2: Tokenizer) -> None:
    query, documents = TEXTS[0], [*TEXTS[1:], TEXTS[0]]
    vectors = [np.array(unit(counts(smollm2.encode(text, add_special_tokens=True)))) for text in [query, *documents]]
    scores = [float(vectors[0] @ other) for other in vectors[1:]]
    order = sorted(range(3), key=lambda index: -scores[index])
    assert order[0] == 2
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        reply = embedder.post(path, {"query": query, "documents": documents}).json()
        assert [entry["index"] for entry in reply["results"]] == order
        assert [entry["relevance_score"] for entry in reply["results"]] == pytest.approx(
            [scores[index] for index in order], abs=1e-6
        )
        assert [entry["document"]["text"] for entry in reply["results"]] == [documents[index] for index in order]
        assert reply["usage"]["total_tokens"] > 0
    body = {"query": query, "documents": [{"text": text} for text in documents], "top_n": 1, "return_documents": False}
    (best,) = embedder.post("/v2/rerank", body).json()["results"]
    assert best["index"] == 2
    assert "document" not in best
    assert refused(embedder, "/v1/rerank", query="a", documents=["b"], instruction="c")["param"] == "instruction"
    assert refused(embedder, "/v1/rerank", query="a", documents=[])["param"] == "documents"


def test_a_reranker_is_asked_for_yes_or_no(reranker: Serving, smollm2: Tokenizer) -> None:
    no, yes = (smollm2.backend.token_to_id(answer) for answer in ("no", "yes"))
    expected = 1 / (1 + math.exp(scripted_logprobs(no, 0).logprob - scripted_logprobs(yes, 0).logprob))
    prompts = [beginning("q", text, None) + ENDING for text in ("one", "another one")]
    reply = reranker.post("/v1/score", {"text_1": "q", "text_2": ["one", "another one"]}).json()
    assert [entry["score"] for entry in reply["data"]] == pytest.approx([expected] * 2)
    lengths = [len(smollm2.encode(text, add_special_tokens=False)) for text in prompts]
    assert reply["usage"]["prompt_tokens"] == sum(lengths)
    told = reranker.post("/v1/rerank", {"query": "q", "documents": ["one"], "instruction": "Find a number"}).json()
    prompt = beginning("q", "one", "Find a number") + ENDING
    assert told["usage"]["prompt_tokens"] == len(smollm2.encode(prompt, add_special_tokens=False))


def test_a_truncated_document_keeps_the_end_of_the_question(reranker: Serving) -> None:
    body = {"query": "q", "documents": ["word " * 3000], "truncate_prompt_tokens": 200}
    reply = reranker.post("/v1/rerank", body).json()
    assert reply["usage"]["prompt_tokens"] == 200
    assert refused(reranker, "/v1/rerank", **body, truncation_side="left")["param"] == "truncation_side"


@pytest.mark.parametrize(
    ("limit", "side", "kept"),
    [
        (None, None, [1, 2, 3, 4, 5, 90, 91]),
        (7, None, [1, 2, 3, 4, 5, 90, 91]),
        (4, None, [1, 2, 90, 91]),
        (4, "left", [4, 5, 90, 91]),
        (-1, None, [1, 2, 3, 4, 90, 91]),
    ],
)
def test_what_follows_the_text_survives_truncation(limit: int | None, side: str | None, kept: list[int]) -> None:
    body = PoolingRequest.model_validate({"truncate_prompt_tokens": limit, "truncation_side": side})
    assert body.truncated([1, 2, 3, 4, 5, 90, 91], longest=6, num_ending=2) == kept


def test_embeddings_are_counted(tmp_path: Path) -> None:
    with serving(tmp_path, "--task", "embed", "--served-model-name", "embedder") as server:
        server.wait_status("/ready", 200)
        used = embedded(server, input=TEXTS)["usage"]["prompt_tokens"]
        assert server.metric("fastgen_prompt_tokens_total") == used
        assert server.metric("fastgen_arrived_prompt_tokens_total") == used
        assert server.metric("fastgen_generation_tokens_total") == 0
        assert server.metric("fastgen_time_to_first_token_seconds_count") == len(TEXTS)
        assert server.metric("fastgen_request_success_total", finish_reason="stop") == len(TEXTS)
        assert server.metric("fastgen_cancelled_prompt_tokens_total") == 0


def test_a_full_queue_rejects_embeddings_before_they_are_encoded(tmp_path: Path) -> None:
    options = ("--task", "embed", "--max-queued-requests", "0", "--max-sequences", "1", "--max-model-length", "512")
    pause = tmp_path / "pause"
    with serving(tmp_path, *options, environment={"SCRIPT_PAUSE": str(pause)}) as server, ThreadPoolExecutor() as pool:
        server.wait_status("/ready", 200)
        long_text = {"input": "x" * 100_000}
        assert server.post("/v1/embeddings", long_text).status_code == 400
        pause.touch()
        running = pool.submit(server.post, "/v1/embeddings", {"input": "a"})
        wait_until(lambda: server.post("/v1/embeddings", long_text).status_code == 429, "the only place to be taken")
        pause.unlink()
        assert running.result().status_code == 200


def test_more_texts_than_can_ever_be_admitted_are_refused_by_name(embedder: Serving) -> None:
    error = refused(embedder, "/v1/rerank", query="a", documents=["b"] * 1100)
    assert error["param"] == "documents"
    assert "1101" in error["message"]

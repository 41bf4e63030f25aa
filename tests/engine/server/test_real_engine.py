"""The server with the real engine and real weights."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.server.malformed import CHAT, COMPLETIONS, INVALID, JSON, RAW, is_rejected
from engine.server.openai_types import check_chat, check_completion
from engine.server.serving import REAL, Serving, serving
from support.demo_weights import demo_model
from support.waiting import wait_until

pytestmark = pytest.mark.slow

CAPITAL = [{"role": "user", "content": "What is the capital of Germany?"}]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    began = time.monotonic()
    options = ("--served-model-name", "smollm2", "--max-model-length", "2048", "--kv-cache-memory", "512MiB")
    with serving(tmp_path_factory.mktemp("real"), *options, command=REAL) as server:
        server.wait_status("/ready", 200, seconds=240)
        print(f"from process start to /ready: {time.monotonic() - began:.1f} s")
        yield server


@pytest.fixture(scope="module")
def small(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server for tests that need no particular text: random weights, whose steps take a fraction of the time."""
    options = ("--served-model-name", "smollm2", "--max-model-length", "2048", "--kv-cache-memory", "64MiB")
    with serving(tmp_path_factory.mktemp("small"), *options, command=REAL, model=str(small_model)) as server:
        server.wait_status("/ready", 200, seconds=240)
        yield server


def libraries(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


def test_ready_describes_the_model(real: Serving) -> None:
    ready = real.get("/ready").json()
    described = ready.pop("model")
    assert ready == {"status": "ready"}
    size = Path(str(demo_model())).stat().st_size
    assert {"family": "llama", "format": "GGUF Q4_1", "bytes": size}.items() <= described.items()
    assert 1.3e8 < described["parameters"] < 1.4e8
    assert described["max_model_len"] == real.get("/v1/models").json()["data"][0]["max_model_len"]


def test_chat_uses_the_chat_template(real: Serving) -> None:
    done = real.client().chat.completions.create(model="smollm2", messages=CAPITAL, temperature=0, max_tokens=32)  # type: ignore[arg-type]
    assert done.choices[0].message.content == "The capital of Germany is Berlin."
    assert done.choices[0].finish_reason == "stop"


def test_a_streamed_chat_gives_the_same_text(real: Serving) -> None:
    for _ in range(10):  # a server that was stopped for a while sends the tokens of that time in one chunk
        chunks = list(
            real.client().chat.completions.create(
                model="smollm2", messages=CAPITAL, temperature=0, max_tokens=32, stream=True
            )  # type: ignore[call-overload]
        )
        pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
        assert "".join(pieces) == "The capital of Germany is Berlin."
        if len(pieces) > 4:
            break
    assert len(pieces) > 4


def test_concurrent_streams_give_the_same_text_as_each_alone(small: Serving) -> None:
    client = small.client()
    prompts = ["The sun is", "def add(a, b):\n", "Once upon a time", "1, 2, 3, 4,", "Berlin is the capital of"]

    def stream(prompt: str) -> str:
        chunks = client.completions.create(model="smollm2", prompt=prompt, temperature=0, max_tokens=10, stream=True)
        return "".join(chunk.choices[0].text for chunk in chunks)

    alone = [stream(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(stream, prompts)) == alone


def test_the_same_seed_gives_the_same_text(small: Serving) -> None:
    body = {"prompt": "My favourite animal is", "max_tokens": 16, "temperature": 1.2, "seed": 7}
    texts = {small.post("/v1/completions", body).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1
    assert small.post("/v1/completions", {**body, "seed": 8}).json()["choices"][0]["text"] not in texts


def test_a_disconnect_frees_the_sequence(real: Serving) -> None:
    stream = real.client().completions.create(
        model="smollm2", prompt="Once", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    wait_until(lambda: real.metric("fastgen_num_requests_running") == 1, "the sequence to run")
    stream.close()
    wait_until(lambda: real.metric("fastgen_num_requests_running") == 0, "the sequence to be freed")
    assert real.metric("fastgen_kv_cache_tokens") == 0


def test_only_the_engine_process_loads_torch(real: Serving) -> None:
    heavy = re.compile(r"libtorch|libllvmlite|numba")
    assert not heavy.search(libraries(real.process.pid))
    assert heavy.search(libraries(real.engine_pid()))


def test_a_prompt_is_scored_by_the_model(real: Serving) -> None:
    """Capitals score higher than nonsense, and scores equal the logprobs of generation."""

    def score(continuation: str) -> float:
        body = {"prompt": f"The capital of France is{continuation}", "max_tokens": 0, "echo": True, "logprobs": 1}
        logprobs = real.post("/v1/completions", body).json()["choices"][0]["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        return sum(p for p, at in zip(logprobs["token_logprobs"], logprobs["text_offset"], strict=True) if at >= 24)

    assert score(" Paris") > score(" Berlin") > score(" banana")
    greedy = {"prompt": "The capital of France is", "max_tokens": 1, "temperature": 0, "logprobs": 1}
    choice = real.post("/v1/completions", greedy).json()["choices"][0]
    assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(score(choice["text"]), abs=1e-3)


IS_HOT = {
    "type": "object",
    "properties": {"hot": {"type": "boolean"}},
    "required": ["hot"],
    "additionalProperties": False,
}
HOT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": IS_HOT}}
STRUCTURES: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "[0-9]{3}-[0-9]{2}"}, r"\d{3}-\d{2}"),
    ({"guided_choice": ["Rome (Italy)", "Oslo"]}, r"Rome \(Italy\)|Oslo"),
    ({"guided_grammar": 'start: "<" /[a-c]+/ ">"'}, "<[a-c]+>"),
    ({"guided_grammar": 'root ::= "yes" | "no" mark\nmark ::= [!?]'}, r"yes|no[!?]"),
    ({"response_format": HOT}, r'\{\s*"hot"\s*:\s*(true|false)\s*\}'),
    ({"guided_json": {"type": "boolean"}}, "true|false"),
    ({"structured_outputs": {"regex": "(ab){2}"}}, "abab"),
]


# Random weights would fill the white space that JSON allows until the last token.
OF_JSON = {"response_format", "guided_json"}


@pytest.mark.parametrize(("fields", "pattern"), STRUCTURES, ids=[next(iter(fields)) for fields, _ in STRUCTURES])
def test_every_structured_output_field_is_enforced_on_both_endpoints(
    real: Serving, small: Serving, fields: dict[str, Any], pattern: str
) -> None:
    server = real if fields.keys() <= OF_JSON else small
    body = {"temperature": 1.5, "seed": 3, "max_tokens": 400, **fields}
    for path, question in (("completions", {"prompt": "The capital is"}), ("chat/completions", {"messages": CAPITAL})):
        choice = server.post(f"/v1/{path}", {**question, **body}).json()["choices"][0]
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        assert re.fullmatch(pattern, text), text
        assert choice["finish_reason"] == "stop"


def test_bad_words_are_never_generated_on_either_endpoint(real: Serving) -> None:
    words = {"temperature": 0, "max_tokens": 24, "bad_words": ["Paris"]}
    chat = real.post("/v1/chat/completions", {"messages": CAPITAL, **words}).json()["choices"][0]
    assert "Paris" not in chat["message"]["content"]
    text = {"prompt": "The capital of France is"}
    plain = real.post("/v1/completions", {**text, **words, "bad_words": []}).json()["choices"][0]
    assert "Paris" in plain["text"]
    assert "Paris" not in real.post("/v1/completions", {**text, **words}).json()["choices"][0]["text"]


def test_a_json_schema_and_a_required_tool_call_are_enforced(real: Serving) -> None:
    properties = {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 99}}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    body: dict[str, Any] = {"messages": CAPITAL, "temperature": 0, "max_tokens": 60}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    done = real.post("/v1/chat/completions", {**body, "response_format": form}).json()["choices"][0]
    jsonschema.validate(json.loads(done["message"]["content"]), schema)
    assert done["finish_reason"] == "stop"
    tool = {"type": "function", "function": {"name": "remember", "parameters": schema}}
    called = real.post("/v1/chat/completions", {**body, "tools": [tool], "tool_choice": "required"}).json()["choices"][
        0
    ]
    call = called["message"]["tool_calls"][0]["function"]
    assert (called["finish_reason"], call["name"]) == ("tool_calls", "remember")
    jsonschema.validate(json.loads(call["arguments"]), schema)


# --- malformed bodies


# Larger bodies are rejected before they reach the engine and take seconds: test_fuzz.py sends them.
MOST_BYTES = 100_000
SMALL = {name: sent for name, sent in INVALID.items() if len(json.dumps(sent[1])) < MOST_BYTES}
# Valid values at the limits.
EXTREME: dict[str, dict[str, Any]] = {
    "almost greedy": {"temperature": 1e-9},
    "almost uniform": {"temperature": 100},
    "no mass": {"top_p": 1e-12, "temperature": 100},
    "no typical mass": {"typical_p": 1e-12},
    "shares that are 0 as float32": {"top_p": 5e-324, "typical_p": 5e-324, "top_k": 1000},
    "only the likeliest": {"min_p": 1, "temperature": 100},
    "more than the vocabulary": {"top_k": (1 << 63) - 1},
    "repetition forbidden": {"repetition_penalty": 100, "presence_penalty": 2, "frequency_penalty": 2},
    "repetition wanted": {"repetition_penalty": 1e-6, "presence_penalty": -2, "frequency_penalty": -2},
    "all at once": {"temperature": 100, "top_p": 1e-12, "min_p": 1, "typical_p": 1e-12, "top_k": 1},
    "biases": {"logit_bias": {"0": -100, "49151": 100, "30": -100}},
    "many stops": {"stop": [f"stop {i}" for i in range(64)], "stop_token_ids": list(range(1000, 2024))},
    "the largest seed": {"seed": (1 << 63) - 1, "n": 2},
}
# Of these, those that leave only the likeliest token.
GREEDY = {"almost greedy", "no mass", "only the likeliest", "all at once"}


def test_malformed_bodies_are_rejected_without_disturbing_a_running_request(small: Serving) -> None:
    # As long as the rejections take, which run meanwhile.
    body = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    alone = small.post(COMPLETIONS, body).json()["choices"]
    pid = small.engine_pid()
    with ThreadPoolExecutor(1) as pool:
        in_flight = pool.submit(small.post, COMPLETIONS, body)
        answers = {name: small.post(path, sent) for name, (path, sent) in SMALL.items()}
        for name, content in RAW.items():
            if len(content) < MOST_BYTES:
                answers[name] = small.request("POST", COMPLETIONS, content=content, headers=JSON)
        assert in_flight.result().json()["choices"] == alone
    assert [name for name, answer in answers.items() if not is_rejected(answer.status_code, answer.json())] == []
    assert small.engine_pid() == pid
    assert "Traceback" not in small.log


@pytest.mark.parametrize("name", EXTREME)
def test_extreme_valid_values_are_served_by_the_real_engine(real: Serving, name: str) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 2, "logprobs": 2, **EXTREME[name]}
    answered = real.post(COMPLETIONS, body)
    assert answered.status_code == 200, answered.text
    for choice in answered.json()["choices"]:
        assert choice["finish_reason"] in ("length", "stop")
        assert name not in GREEDY or choice["text"].startswith(" Paris")
        # A bias or penalty may make a token impossible, but a logprob never exceeds 0.
        assert all(logprob <= 1e-5 for logprob in choice["logprobs"]["token_logprobs"])
    assert real.metric("fastgen_num_requests_running") == 0


# --- clients


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
    },
}
YES_OR_NO: dict[str, Any] = {"response_format": HOT, "max_tokens": 60}
TYPED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": (COMPLETIONS, {}),
    "several": (COMPLETIONS, {"n": 3, "seed": 1, "temperature": 1}),
    "prompts": (COMPLETIONS, {"prompt": ["Once", "1, 2, 3"]}),
    "logprobs": (COMPLETIONS, {"logprobs": 2, "echo": True}),
    "structure": (COMPLETIONS, YES_OR_NO),
    "best": (COMPLETIONS, {"best_of": 3, "n": 2, "temperature": 1, "stream": False}),
    "plain chat": (CHAT, {}),
    "several chats": (CHAT, {"n": 3, "seed": 1, "temperature": 1}),
    "logprobs of a chat": (CHAT, {"logprobs": True, "top_logprobs": 2}),
    "tools that are not called": (CHAT, {"tools": [ADD]}),
    "required call": (CHAT, {"tools": [ADD], "tool_choice": "required", "max_tokens": 60}),
    "structure of a chat": (CHAT, YES_OR_NO),
}


# Random weights do not end JSON.
NEEDS_TEXT = {"structure", "required call", "structure of a chat"}


@pytest.mark.parametrize("name", TYPED)
def test_every_reply_of_the_real_engine_validates_against_openais_types(
    real: Serving, small: Serving, name: str
) -> None:
    server = real if name in NEEDS_TEXT else small
    path, fields = TYPED[name]
    plain = {"temperature": 0, "max_tokens": 6}
    if path == COMPLETIONS:
        check_completion(server, {"prompt": "The capital of France is", **plain, **fields})
    else:
        check_chat(server, {"messages": CAPITAL, **plain, **fields})


def test_langchain_works_with_the_real_engine(real: Serving) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Weather(BaseModel):
        hot: bool

    model = ChatOpenAI(
        model="smollm2",
        base_url=f"{real.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        max_retries=0,
        temperature=0,
        max_completion_tokens=60,
    )
    question = CAPITAL[0]["content"]
    answer = model.invoke(question)
    assert answer.content == "The capital of Germany is Berlin."
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 6
    assert "".join(str(chunk.content) for chunk in model.stream(question)) == answer.content
    called = model.bind_tools([ADD], tool_choice="required").invoke(question).tool_calls
    assert [(call["name"], type(call["args"]["a"])) for call in called] == [("add", bool)]
    assert isinstance(model.with_structured_output(Weather, method="json_schema").invoke(question), Weather)


def test_litellm_works_with_the_real_engine(real: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # otherwise it downloads a price list
    import litellm

    target: dict[str, Any] = {"model": "openai/smollm2", "api_base": f"{real.url}/v1", "api_key": "none"}
    body: dict[str, Any] = {"messages": CAPITAL, "temperature": 0, "max_tokens": 32, **target}
    done = litellm.completion(**body)
    assert done.choices[0].message.content == "The capital of Germany is Berlin."
    assert done.usage.completion_tokens > 6
    chunks = litellm.completion(**body, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The capital of Germany is Berlin."

"""The prefix cache tells the client of one API key nothing about the prompts of another."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.server.serving import Serving, serving
from support.waiting import HANG_SECONDS

KEYS = {"FASTGEN_API_KEY": "sk-one,sk-two"}
_numbers = itertools.count()


def start(folder: Path, *options: str, environment: dict[str, str], stack: ExitStack) -> Serving:
    server = stack.enter_context(serving(folder, *options, environment=environment))
    server.wait_status("/ready", 200)
    return server


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with two keys and two API processes."""
    with ExitStack() as stack:
        yield start(tmp_path_factory.mktemp("keys"), "--api-processes", "2", environment=KEYS, stack=stack)


def cached(server: Serving, key: str, prompt: str, *, path: str = "/v1/completions", **fields: Any) -> int:
    """Return how many tokens of a prompt come from the prefix cache for the client with this key."""
    given = {
        "/v1/completions": {"prompt": prompt, "max_tokens": 1},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": prompt}], "max_tokens": 1},
        "/v1/responses": {"input": prompt, "max_output_tokens": 1},
    }[path]
    response = server.request("POST", path, headers=bearer(key), json={**given, **fields})
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    return int((usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))["cached_tokens"])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def secret() -> str:
    """Return a prompt of some 400 tokens that no other test uses."""
    return f"The password of account {next(_numbers)} is swordfish. " + "word " * 400


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_a_right_guess_of_another_keys_prompt_finds_nothing_in_the_cache(shared: Serving, path: str) -> None:
    prompt = secret()
    cached(shared, "sk-one", prompt, path=path)
    assert cached(shared, "sk-two", prompt, path=path) == 0
    assert cached(shared, "sk-one", prompt, path=path) > 200


def test_no_cache_salt_reaches_the_prefixes_of_another_key(shared: Serving) -> None:
    prompt, digest = secret(), hashlib.sha256(b"sk-one").hexdigest()
    cached(shared, "sk-one", prompt)
    cached(shared, "sk-one", prompt, cache_salt="ours")
    for salt in ("", "ours", digest, digest + "ours", "sk-one"):
        # Each guess leaves its own prompt in the cache, so every salt is tried once.
        assert cached(shared, "sk-two", prompt, cache_salt=salt) == 0, salt
    assert cached(shared, "sk-one", prompt, cache_salt="ours") > 200


def test_the_time_to_the_first_token_of_a_guess_is_that_of_an_unknown_prompt(shared: Serving) -> None:
    """The engine computes the whole prompt for the other key: all its tokens pass through its steps."""
    prompt = secret()
    cached(shared, "sk-one", prompt)
    before = shared.metric("fastgen_scheduled_tokens_total", phase="prefill")
    cached(shared, "sk-two", prompt)
    assert shared.metric("fastgen_scheduled_tokens_total", phase="prefill") - before > 400


def test_requests_of_one_key_share_prefixes_whichever_api_process_serves_them(shared: Serving) -> None:
    prompt = secret()
    cached(shared, "sk-one", prompt)
    assert all(cached(shared, "sk-one", prompt) > 200 for _ in range(6)), "each is a new connection"


def test_no_key_can_read_or_continue_a_response_by_its_id(shared: Serving) -> None:
    body = {"input": secret(), "max_output_tokens": 1}
    made = shared.request("POST", "/v1/responses", headers=bearer("sk-one"), json=body).json()
    for key in ("sk-one", "sk-two"):
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            response = shared.request(method, f"/v1/responses/{made['id']}{path}", headers=bearer(key))
            assert response.status_code in (404, 405)
        again = {"input": "go on", "previous_response_id": made["id"]}
        assert shared.request("POST", "/v1/responses", headers=bearer(key), json=again).status_code == 400


def test_requests_with_the_same_id_of_two_keys_get_their_own_answers(shared: Serving) -> None:
    def ask(key: str) -> str:
        body = {"prompt": f"I am {key} " * 20, "max_tokens": 60, "ignore_eos": True}
        headers = {**bearer(key), "X-Request-Id": "mine"}
        response = shared.request("POST", "/v1/completions", headers=headers, json=body)
        return str(response.json()["choices"][0]["text"])

    with ThreadPoolExecutor(8) as threads:
        keys = ["sk-one", "sk-two"] * 8
        for key, text in zip(keys, threads.map(ask, keys), strict=True):
            other = "two" if key == "sk-one" else "one"
            assert text.startswith(f"I am {key}")
            assert other not in text


def test_what_the_server_shows_of_other_keys_contains_no_text(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = start(tmp_path, "--ui", environment={**KEYS, "SCRIPT_STEP_SECONDS": "0.01"}, stack=stack)
        url = f"{server.url}/ui/steps"
        with httpx.stream("GET", url, headers=bearer("sk-two"), timeout=HANG_SECONDS) as feed:
            lines = feed.iter_lines()
            seen = next(line for line in lines if line)  # it is watching
            body = {"prompt": "swordfish " * 200, "max_tokens": 40, "ignore_eos": True, "cache_salt": "swordfish"}
            server.request("POST", "/v1/completions", headers=bearer("sk-one"), json=body)
            for line in lines:
                seen += line
                if '"decodes":["' in line:
                    break
        assert "swordfish" not in seen + server.get("/metrics").text + server.log
        assert hashlib.sha256(b"sk-one").hexdigest() not in seen + server.get("/metrics").text + server.log


def test_keys_share_prefixes_where_isolation_is_off_except_behind_a_salt(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server, prompt = start(tmp_path, "--cache-isolation", "none", environment=KEYS, stack=stack), secret()
        cached(server, "sk-one", prompt)
        assert cached(server, "sk-two", prompt) > 200
        assert cached(server, "sk-two", prompt, cache_salt="mine") == 0

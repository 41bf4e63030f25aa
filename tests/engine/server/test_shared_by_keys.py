"""What the clients of one server share, whatever their keys: SECURITY.md does not promise otherwise."""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from engine.server.serving import Serving, serving
from engine.server.test_hostile_grammars import rehearsing
from support.waiting import HANG_SECONDS, wait_until

KEYS = ("sk-one", "sk-two")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with two keys, one running place and a queue of one."""
    options = ("--max-sequences", "1", "--max-queued-requests", "1")
    environment = {"FASTGEN_API_KEY": ",".join(KEYS), "SCRIPT_STEP_SECONDS": "0.02"}
    with serving(tmp_path_factory.mktemp("shared"), *options, environment=environment) as server:
        server.wait_status("/ready", 200)
        yield server


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_one_client_can_fill_the_queue_of_all_and_anybody_sees_that(shared: Serving) -> None:
    endless = {"prompt": "go on", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with ExitStack() as streams:
        for _ in range(2):
            asked = httpx.stream(
                "POST", f"{shared.url}/v1/completions", headers=headers("sk-one"), json=endless, timeout=HANG_SECONDS
            )
            assert streams.enter_context(asked).status_code == 200
        refused = shared.request("POST", "/v1/completions", headers=headers("sk-two"), json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        wait_until(lambda: shared.metric("fastgen_num_requests_running") == 1, "the place to be taken")
        wait_until(lambda: shared.metric("fastgen_num_requests_waiting") == 1, "the queue to be full")
    wait_until(lambda: shared.metric("fastgen_num_requests_running") == 0, "the place to be free")


def test_a_grammar_that_one_client_has_used_is_not_checked_again_for_another(shared: Serving) -> None:
    """So the answer comes sooner, which tells the other one that the grammar was used."""

    def status(key: str, pattern: str) -> int:
        body = {"prompt": "a", "guided_regex": pattern, "max_tokens": 1}
        return shared.request("POST", "/v1/completions", headers=headers(key), json=body).status_code

    assert status("sk-one", "(") == 400
    (pid,) = rehearsing(shared)
    os.kill(pid, signal.SIGKILL)
    assert status("sk-two", "(") == 400
    assert rehearsing(shared) in ([], [pid]), "no process was needed"
    assert status("sk-two", ")") == 400
    assert pid not in rehearsing(shared)


def test_the_server_speaks_no_tls(shared: Serving) -> None:
    with pytest.raises(httpx.ConnectError) as raised:
        httpx.get(shared.url.replace("http:", "https:"), timeout=HANG_SECONDS)
    cause: BaseException | None = raised.value
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    assert cause is not None


@pytest.mark.parametrize("path", ["/version", "/v1/models", "/load", "/openapi.json"])
def test_all_keys_have_the_same_rights(shared: Serving, path: str) -> None:
    first, second = (shared.get(path, headers=headers(key)) for key in KEYS)
    assert (first.status_code, first.text) == (second.status_code, second.text)
    assert first.status_code == 200

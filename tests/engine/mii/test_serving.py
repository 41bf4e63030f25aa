"""A deployment that outlives the program that started it, with the real model. All tests share it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastgen
from engine.server.serving import SCRIPTED
from fastgen.core.request_error import RequestError
from fastgen.mii import server
from fastgen.mii.client import Client
from fastgen.mii.deployments import DeploymentError, find
from support.demo_weights import demo_model
from support.waiting import PATIENCE

pytestmark = pytest.mark.slow

PROGRAM = """
import sys, fastgen
client = fastgen.serve(sys.argv[1], "smol", max_model_length=512, kv_cache_memory="128MiB", drain_seconds=5)
print(client.deployment.pid)
"""
COUNTING = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runtime")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def smol(runtime: Path) -> Iterator[Client]:
    """A client of a deployment that another program started before it exited."""
    del runtime
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(demo_model())], capture_output=True, text=True, timeout=240 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no bar where there is no terminal"
    client = fastgen.client("smol")
    assert client.deployment.pid == int(done.stdout)
    yield client
    client.kill()


def test_the_server_outlives_the_program_that_started_it(smol: Client) -> None:
    first, second = smol.generate(["1, 2, 3, 4,", "The capital of France is"], **COUNTING)
    assert first.generated_text.startswith(" 5, 6, 7")
    assert (first.generated_length, first.finish_reason) == (12, "length")
    assert "Paris" in str(second)
    assert second.prompt_length == 5


def test_terminal_signals_do_not_reach_the_server(smol: Client) -> None:
    pid = smol.deployment.pid
    assert os.getsid(pid) == os.getpgid(pid) == pid, "a session and a process group of its own"


def test_the_full_text_can_be_returned_and_a_stop_string_ends_it(smol: Client) -> None:
    (stopped,) = smol.generate("1, 2, 3, 4,", stop=["7"], return_full_text=True, **COUNTING)
    assert (stopped.generated_text, stopped.finish_reason) == ("1, 2, 3, 4, 5, 6, ", "stop")


def test_a_stream_adds_up_to_the_complete_text(smol: Client) -> None:
    for _ in range(10):  # a server that was stopped for a while sends the tokens of that time in one piece
        pieces: list[str] = []
        (whole,) = smol.generate(
            "1, 2, 3, 4,", streaming_fn=lambda got, to=pieces: to.append(got[0].generated_text), **COUNTING
        )
        if len(pieces) > 4:
            break
    assert "".join(pieces) == whole.generated_text == smol.generate("1, 2, 3, 4,", **COUNTING)[0].generated_text
    assert len(pieces) > 4
    assert (whole.prompt_length, whole.generated_length) == (11, 12)


def test_max_length_counts_prompt_tokens_like_the_server(smol: Client) -> None:
    (answer,) = smol.generate("1, 2, 3, 4,", max_length=15, do_sample=False)
    assert (answer.prompt_length, answer.generated_length) == (11, 4)


def test_a_rejected_request_names_the_field(smol: Client) -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        smol.generate("Once", max_new_tokens=10_000)
    with pytest.raises(RequestError, match="one prompt at a time"):
        smol.generate(["a", "b"], streaming_fn=print)


def test_the_name_is_in_use_while_the_server_runs(smol: Client) -> None:
    with pytest.raises(DeploymentError, match=f"in use, at {smol.deployment.url}"):
        fastgen.serve(str(demo_model()), "smol")


def test_terminating_ends_the_server_for_all_clients(smol: Client) -> None:
    other = fastgen.client("smol")
    smol.terminate_server()
    assert not smol.deployment.alive
    with pytest.raises(DeploymentError, match="has ended"):
        other.generate("Once", **COUNTING)
    with pytest.raises(DeploymentError, match="not known"):
        fastgen.client("smol")


def test_a_server_that_cannot_start_reports_the_reason_and_releases_its_name(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "COMMAND", SCRIPTED)
    monkeypatch.setenv("SCRIPT", "refuse")
    with pytest.raises(DeploymentError, match="--max-model-length 99999: the KV cache holds 4096 tokens"):
        fastgen.serve(str(demo_model()), "broken")
    assert not (runtime / "fastgen" / "broken.json").exists()


def test_the_returned_client_uses_a_key_of_the_servers_file(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del runtime
    monkeypatch.setattr(server, "COMMAND", SCRIPTED)
    keys = tmp_path / "keys"
    keys.write_text("# of the team\nsecret\nanother\n")
    client = fastgen.serve(demo_model(), "locked", api_key_file=keys)
    try:
        assert client.generate("Once", **COUNTING)[0].generated_length == 12
        with pytest.raises(RequestError, match="401"):
            fastgen.client("locked").generate("Once", **COUNTING)
    finally:
        client.kill()


def test_keys_are_sent_and_a_killed_server_is_reported(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del runtime
    monkeypatch.setattr(server, "COMMAND", SCRIPTED)
    monkeypatch.setenv("FASTGEN_API_KEY", "secret,another")
    client = fastgen.serve(str(demo_model()), "doomed")
    try:
        assert client.generate("Once", **COUNTING)[0].generated_length == 12
        with pytest.raises(RequestError, match="401"):
            fastgen.client("doomed", api_key="wrong").generate("Once", **COUNTING)
        os.kill(find("doomed").pid, 9)
        with pytest.raises(DeploymentError, match="'doomed' has ended"):
            client.generate("Once", **COUNTING)
    finally:
        client.kill()

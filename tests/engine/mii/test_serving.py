"""A deployment that outlives who started it, with the real model: one start for all of these."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastgen
from engine.server.serving import SCRIPTED
from fastgen.core.request import RequestError
from fastgen.mii import server
from fastgen.mii.client import Client
from fastgen.mii.deployments import DeploymentError, find
from support.demo_weights import demo_model

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
    """A client of what another program, which has ended, started."""
    del runtime
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(demo_model())], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "no bar where there is no terminal"
    client = fastgen.client("smol")
    assert client.deployment.pid == int(done.stdout)
    yield client
    client.kill()


def test_it_answers_after_the_program_that_started_it_has_ended(smol: Client) -> None:
    first, second = smol.generate(["1, 2, 3, 4,", "The capital of France is"], **COUNTING)
    assert first.generated_text.startswith(" 5, 6, 7")
    assert (first.generated_length, first.finish_reason) == (12, "length")
    assert "Paris" in str(second)
    assert second.prompt_length == 5


def test_what_ends_a_terminals_programs_does_not_reach_it(smol: Client) -> None:
    pid = smol.deployment.pid
    assert os.getsid(pid) == os.getpgid(pid) == pid, "a session and a process group of its own"


def test_the_prompt_may_come_with_the_answer_and_a_stop_may_end_it(smol: Client) -> None:
    (stopped,) = smol.generate("1, 2, 3, 4,", stop=["7"], return_full_text=True, **COUNTING)
    assert (stopped.generated_text, stopped.finish_reason) == ("1, 2, 3, 4, 5, 6, ", "stop")


def test_a_stream_comes_in_pieces_and_is_the_whole(smol: Client) -> None:
    pieces: list[str] = []
    (whole,) = smol.generate("1, 2, 3, 4,", streaming_fn=lambda got: pieces.append(got[0].generated_text), **COUNTING)
    assert "".join(pieces) == whole.generated_text == smol.generate("1, 2, 3, 4,", **COUNTING)[0].generated_text
    assert len(pieces) > 4
    assert (whole.prompt_length, whole.generated_length) == (11, 12)


def test_max_length_counts_the_prompt_as_the_server_does(smol: Client) -> None:
    (answer,) = smol.generate("1, 2, 3, 4,", max_length=15, do_sample=False)
    assert (answer.prompt_length, answer.generated_length) == (11, 4)


def test_what_the_server_refuses_names_the_field(smol: Client) -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        smol.generate("Once", max_new_tokens=10_000)
    with pytest.raises(RequestError, match="one prompt at a time"):
        smol.generate(["a", "b"], streaming_fn=print)


def test_the_name_is_in_use_while_it_runs(smol: Client) -> None:
    with pytest.raises(DeploymentError, match=f"in use, at {smol.deployment.url}"):
        fastgen.serve(str(demo_model()), "smol")


def test_terminating_ends_it_for_everybody(smol: Client) -> None:
    other = fastgen.client("smol")
    smol.terminate_server()
    assert not smol.deployment.alive
    with pytest.raises(DeploymentError, match="has ended"):
        other.generate("Once", **COUNTING)
    with pytest.raises(DeploymentError, match="not known"):
        fastgen.client("smol")


def test_a_server_that_cannot_start_gives_its_reason_and_its_name_back(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "COMMAND", SCRIPTED)
    monkeypatch.setenv("SCRIPT", "refuse")
    with pytest.raises(DeploymentError, match="--max-model-length 99999: the KV cache holds 4096 tokens"):
        fastgen.serve(str(demo_model()), "broken")
    assert not (runtime / "fastgen" / "broken.json").exists()


def test_the_client_that_comes_back_has_a_key_of_the_servers_file(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del runtime
    monkeypatch.setattr(server, "COMMAND", SCRIPTED)
    keys = tmp_path / "keys"
    keys.write_text("# of the team\nsecret\nanother\n")
    client = fastgen.serve(str(demo_model()), "locked", api_key_file=str(keys))
    try:
        assert client.generate("Once", **COUNTING)[0].generated_length == 12
        with pytest.raises(RequestError, match="401"):
            fastgen.client("locked").generate("Once", **COUNTING)
    finally:
        client.kill()


def test_keys_are_sent_and_a_server_that_was_killed_is_told(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

"""`fastgen verify` says whether a receipt's answers are computed again, or what is wrong with it."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fastgen.commands import flags as flags_module
from fastgen.commands import main
from fastgen.commands import verify as verify_module
from fastgen.core.sampling_params import SamplingParams
from fastgen.llm.llm import LLM
from fastgen.model.file_digests import FilesAtStart
from fastgen.receipt import ReceiptModel, ReceiptNumbers, parse_receipt
from fastgen.server.openai.receipts import ReceiptWriter
from fastgen.settings import EngineConfig
from fastgen.version import VERSION

FLAGS = ("--kv-cache-memory", "16MiB")
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def receipt(small_model: Path) -> Any:
    """The receipt of a sampled answer, as JSON."""
    model = LLM(small_model, dtype="float32", deterministic=True, max_model_length=256, kv_cache_memory=16 << 20)
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.9, top_p=0.95, seed=11)
    outputs = model.generate(["The sun is"], sampling, progress=False)
    name = ReceiptModel(name="small", files=FilesAtStart.of(small_model).digests())
    written = ReceiptWriter(name, ReceiptNumbers.of(model.info)).write(outputs, 1)
    return json.loads(msgspec.json.encode(written))


@pytest.fixture(scope="module")
def loaded() -> dict[EngineConfig, LLM]:
    """The models that the tests of this module have loaded."""
    return {}


@pytest.fixture
def verify(
    small_model: Path,
    tmp_path: Path,
    loaded: dict[EngineConfig, LLM],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    """Run the command on a receipt; return the exit code, standard output and standard error."""

    def load(config: EngineConfig) -> LLM:
        if config not in loaded:
            loaded[config] = flags_module.load_model(config)
        return loaded[config]

    monkeypatch.setattr(verify_module, "load_model", load)

    def run(content: object, *flags: str, model: Path = small_model) -> tuple[int, str, str]:
        path = tmp_path / "receipt.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        capsys.readouterr()
        code = main.main(["verify", str(path), "--model", str(model), *FLAGS, *flags])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def changed(receipt: Any, **answer: Any) -> Any:
    """Return a receipt with other fields of its answer, and a digest made anew."""
    other = json.loads(json.dumps(receipt))
    other["prompts"][0]["answers"][0].update(answer)
    return signed(other)


def signed(receipt: Any) -> Any:
    parsed = parse_receipt(json.dumps(receipt).encode())
    return {**receipt, "digest": parsed.computed_digest()}


def tokens_of(receipt: Any) -> list[int]:
    return list(receipt["prompts"][0]["answers"][0]["token_ids"])


pytestmark = pytest.mark.slow


def test_an_equal_answer_ends_with_0(receipt: Any, verify: Any) -> None:
    assert verify(receipt) == (0, f"equal: {NUM_TOKENS} tokens\n", "")


def test_a_response_has_its_receipt(receipt: Any, verify: Any) -> None:
    assert verify({"id": "cmpl-1", "choices": [], "receipt": receipt})[:2] == (0, f"equal: {NUM_TOKENS} tokens\n")


def test_standard_input_is_read(
    receipt: Any, small_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(receipt).encode())))
    assert main.main(["verify", "-", "--model", str(small_model), *FLAGS]) == 0
    assert capsys.readouterr().out == f"equal: {NUM_TOKENS} tokens\n"


def test_a_program_may_write_the_receipt_in_another_form(receipt: Any, verify: Any) -> None:
    """JavaScript writes 1.0 as 1; keys have no order."""
    other = json.loads(json.dumps(receipt))
    other["prompts"][0]["sampling"]["logit_bias"] = [[5, 0.0]]
    text = json.dumps(signed(other), indent=2, sort_keys=True)
    assert text.count(" 0.0\n") == 1
    assert verify(text.replace(" 0.0\n", " 0\n"))[:2] == (0, f"equal: {NUM_TOKENS} tokens\n")


def test_another_token_ends_with_1_and_both_tokens(receipt: Any, verify: Any) -> None:
    tokens = tokens_of(receipt)
    code, out, err = verify(changed(receipt, token_ids=[*tokens[:4], tokens[4] + 1, *tokens[5:]]))
    assert code == 1
    assert out.startswith(f"differs after 4 of {NUM_TOKENS} tokens: the receipt has {tokens[4] + 1} ")
    assert f"this machine has {tokens[4]} " in out
    assert "(logprob -" in out
    assert "equal tokens are promised here: the receipt was changed" in err


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"finish_reason": "stop"}, "the receipt ends for another reason, this machine ends (length)"),
        ({"seed": "12"}, "the receipt has "),
        ({"finish_reason": "stop", "stop_string": "never said"}, "does not contain its stop string"),
    ],
)
def test_another_answer_ends_with_1(receipt: Any, verify: Any, fields: dict[str, Any], said: str) -> None:
    code, out, _ = verify(changed(receipt, **fields))
    assert (code, said in out) == (1, True)


def test_a_shortened_answer_ends_with_1(receipt: Any, verify: Any) -> None:
    tokens = tokens_of(receipt)
    code, out, _ = verify(changed(receipt, token_ids=tokens[:5]))
    assert code == 1
    assert out.startswith(f"differs after 5 of 5 tokens: the receipt ends (length), this machine has {tokens[5]} ")


def test_an_answer_that_a_deadline_cut_is_compared_up_to_there(receipt: Any, verify: Any) -> None:
    cut = changed(receipt, token_ids=tokens_of(receipt)[:5], finish_reason="abort")
    assert verify(cut)[:2] == (0, "equal: 5 tokens\n")


def test_each_choice_has_a_line(receipt: Any, verify: Any) -> None:
    several = json.loads(json.dumps(receipt))
    (answer,) = several["prompts"][0]["answers"]
    several["prompts"][0]["answers"].append({**answer, "index": 1, "seed": "12"})
    code, out, _ = verify(signed(several))
    first, second = out.splitlines()
    assert (code, first) == (1, f"choice 0: equal: {NUM_TOKENS} tokens")
    assert second.startswith("choice 1: differs after ")


def test_a_changed_receipt_ends_with_3(receipt: Any, verify: Any) -> None:
    other = json.loads(json.dumps(receipt))
    other["prompts"][0]["answers"][0]["token_ids"][4] += 1
    said = "fastgen: error: receipt: it was changed: its digest is not that of its content\n"
    assert verify(other) == (3, "", said)
    assert verify({**receipt, "digest": "0" * 64})[0] == 3


def test_another_model_file_ends_with_3(receipt: Any, verify: Any, small_model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(small_model, tmp_path / "copy")
    assert verify(receipt, model=copy)[0] == 0
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    code, _, err = verify(receipt, model=copy)
    assert (code, "model.safetensors has other content" in err) == (3, True)
    (copy / "model.safetensors").unlink()
    (copy / "vocab.json").write_text("{}")
    code, _, err = verify(receipt, model=copy)
    assert "model.safetensors is missing; vocab.json is not in the receipt" in err
    assert code == 3


def test_what_is_not_promised_is_said(receipt: Any, verify: Any) -> None:
    other = json.loads(json.dumps(receipt))
    other["numbers"].update(deterministic=False, arithmetic="AMX\x1b[31m")
    code, out, err = verify(signed(other))
    assert (code, out) == (0, f"equal: {NUM_TOKENS} tokens\n")
    assert "equal tokens are likely, not promised: the receipt was made without --deterministic" in err
    assert "and AMX?[31m in the receipt" in err
    assert "\x1b" not in err
    code, out, err = verify(receipt, "--dtype", "bfloat16")
    assert "dtype is bfloat16 here and float32 in the receipt" in err


def test_a_setting_that_this_machine_cannot_have_ends_with_2(receipt: Any, verify: Any) -> None:
    other = json.loads(json.dumps(receipt))
    other["numbers"]["block_size"] = 48
    code, out, err = verify(signed(other))
    assert (code, out) == (2, "")
    assert "--block-size 48: must be a power of two" in err
    assert "settings without a flag are the receipt's" in err


def hostile(receipt: Any) -> dict[str, str]:
    sampling = {**receipt["prompts"][0]["sampling"], "temperature": 500}
    prompt = {**receipt["prompts"][0], "sampling": sampling}
    foreign = {**receipt["prompts"][0], "sampling": {**receipt["prompts"][0]["sampling"], "new": 1}}
    return {
        "not JSON": "equal",
        "empty": "",
        "a list": "[]",
        "deep": '{"version": ' + "[" * 100_000,
        "deep in the receipt": '{"receipt": ' * 50_000,
        "no receipt": "{}",
        "no version": json.dumps({"receipt": {"prompts": []}}),
        "another version": json.dumps({**receipt, "version": 2}),
        "a version of another type": json.dumps({**receipt, "version": True}),
        "an unknown field": json.dumps({**receipt, "more": 1}),
        "an unknown sampling parameter": json.dumps({**receipt, "prompts": [foreign]}),
        "no answers": json.dumps({**receipt, "prompts": []}),
        "tokens of another type": json.dumps({**receipt, "prompts": [{**prompt, "token_ids": ["a"]}]}),
        "a value out of range": json.dumps({**receipt, "prompts": [prompt]}),
        "a huge number": json.dumps({**receipt, "version": 1}).replace('"seed": "11"', f'"seed": "{"9" * 6000}"'),
        "a huge integer": json.dumps(receipt).replace('"index": 0', f'"index": {"9" * 6000}'),
        "half a character": json.dumps(receipt).replace('"small"', '"\\ud800"'),
        "a command to the terminal": json.dumps({**receipt, "\x1b[31m": 1}),
    }


HOSTILE = (
    *("not JSON", "empty", "a list", "deep", "deep in the receipt", "no receipt", "no version", "another version"),
    *("a version of another type", "an unknown field", "an unknown sampling parameter", "no answers"),
    *("tokens of another type", "a value out of range", "a huge number", "a huge integer", "half a character"),
    "a command to the terminal",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_receipt_gives_a_one_line_error(receipt: Any, verify: Any, name: str) -> None:
    code, out, err = verify(hostile(receipt)[name])
    assert (code, out) == (2, "")
    (line,) = err.splitlines()
    assert line.startswith("fastgen: error: receipt: ")
    assert line.isprintable()
    assert len(line) < 1000


@pytest.mark.parametrize("version", [2, True, "1"])
def test_an_unknown_version_is_named(receipt: Any, verify: Any, version: object) -> None:
    code, _, err = verify({**receipt, "version": version})
    said = f"receipt: its version is {json.dumps(version)}, and fastgen {VERSION} knows version 1: use a newer fastgen"
    assert (code, said in err) == (2, True)


def test_every_hostile_receipt_is_tried(receipt: Any) -> None:
    assert set(hostile(receipt)) == set(HOSTILE)


def test_tokens_outside_the_vocabulary_give_a_one_line_error(receipt: Any, verify: Any) -> None:
    other = json.loads(json.dumps(receipt))
    other["prompts"][0]["token_ids"] = [1, 1 << 40]
    code, out, err = verify(signed(other))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"token {1 << 40} is not in the vocabulary" in err


def test_a_huge_or_missing_file_gives_a_one_line_error(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate((64 << 20) + 1)
    for path, said in ((huge, "has more than 64 MiB"), (tmp_path / "missing", "No such file"), (tmp_path, "directory")):
        assert main.main(["verify", str(path), "--model", str(small_model)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line


def test_the_model_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise a receipt could choose what is downloaded."""
    with pytest.raises(SystemExit) as end:
        main.main(["verify", "receipt.json"])
    assert end.value.code == 2
    assert "--model" in capsys.readouterr().err

"""Tests of `LLM` and `fastgen generate` in process.

Tests that check the generated text use real weights; the others use a small model.
"""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastgen import LLM, SamplingParams
from fastgen.commands import main
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import Grammar
from fastgen.mii.pipeline import Pipeline, pipeline
from fastgen.model import native
from fastgen.model import source as model_source
from fastgen.model.checkpoint.gguf_file import GGUFFile
from fastgen.model.layers.decoder import Decoder
from fastgen.model.source import ModelSource
from fastgen.settings import ConfigError, EngineConfig, ServerConfig
from fastgen.text.request_output import RequestOutput
from support.demo_weights import demo_model

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=12)
QUESTION = [{"role": "user", "content": "What is the capital of Germany?"}]
ANSWER = "The capital of Germany is Berlin."


def contents(output: RequestOutput) -> tuple[object, ...]:
    """Return the fields of an output that callers use."""
    logprobs, prompt_logprobs = output.logprobs, output.prompt_logprobs
    request, reason = output.request, output.finish_reason
    return output.text, output.token_ids, reason, request.prompt_token_ids, output.usage, logprobs, prompt_logprobs


@pytest.fixture(scope="module", autouse=True)
def _weights_are_loaded_once() -> Iterator[None]:
    """Models of the same file and context length share their weights, which hold no state."""
    loaded: dict[tuple[object, ...], Decoder] = {}
    load = native.load_on_cpu

    def load_once(
        source: ModelSource, *, dtype: torch.dtype, quantization: str, max_model_length: int | None, **others: Any
    ) -> Decoder:
        key = source.path, dtype, quantization, max_model_length
        if key not in loaded:
            options = {"dtype": dtype, "quantization": quantization, "max_model_length": max_model_length}
            loaded[key] = load(source, **options, **others)
        return loaded[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load_on_cpu", load_once)
        yield


@pytest.fixture(scope="module")
def demo() -> LLM:
    """The demo model, whose text is known."""
    stages: list[str] = []
    model = LLM(
        str(demo_model()),
        kv_cache_memory="128MiB",
        max_model_length=512,
        on_loading=lambda stage, _fraction: stages.append(stage),
    )
    assert "loading weights" in stages
    return model


@pytest.fixture(scope="module")
def llm(small_model: Path) -> LLM:
    return LLM(small_model, kv_cache_memory="16MiB", max_model_length=512)


def test_a_batch_gives_the_same_output_as_each_prompt_alone(llm: LLM) -> None:
    prompts = ["The sun is", "Once upon a time", "1, 2, 3, 4,"]
    together = llm.generate(prompts, GREEDY, progress=True)
    assert list(map(contents, together)) == [contents(llm.generate(prompt, GREEDY)[0]) for prompt in prompts]
    first = together[0]
    assert llm.tokenizer.decode(first.token_ids) == first.text
    assert first.request.prompt_token_ids == llm.tokenizer.encode("The sun is", add_special_tokens=True)
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (3, 12)
    assert first.finish_reason == "length"


def test_each_prompt_has_its_own_sampling_parameters_and_n_completions(llm: LLM) -> None:
    short, long = SamplingParams(temperature=0, max_tokens=2), SamplingParams(temperature=1, max_tokens=8, seed=5)
    done = llm.generate(["The sun is", "Once upon a time"], [short, long], n=3)
    assert [len(completion.token_ids) for completion in done] == [2, 2, 2, 8, 8, 8]
    assert len({completion.text for completion in done[:3]}) == 1, "greedy"
    assert len({completion.text for completion in done[3:]}) == 3, "each with a seed of its own"
    assert done[4].text == llm.generate("Once upon a time", replace(long, seed=6))[0].text
    for odd in ({"max_tokens": 5}, [{"max_tokens": 5}], "greedy", 5):
        with pytest.raises(RequestError, match="sampling: give SamplingParams, or a sequence with one for each prompt"):
            llm.generate("a", odd)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="sampling: give SamplingParams"):
            next(llm.stream("a", odd))  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="n is '2': it must be an integer of at least 1"):
        llm.generate("a", n="2")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="sampling has 1 entries for 2 prompts"):
        llm.generate(["a", "b"], [short])
    with pytest.raises(RequestError, match="n is 0"):
        llm.generate("a", short, n=0)


def test_token_ids_may_be_arrays(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The sun is", add_special_tokens=True)
    expected = contents(llm.generate([ids], GREEDY)[0])
    params = SamplingParams(temperature=np.float32(0), max_tokens=np.int64(12))  # type: ignore[arg-type]
    for prompts in ([np.array(ids)], torch.tensor([ids]), [tuple(ids)]):
        (output,) = llm.generate(prompts, params)  # type: ignore[arg-type]
        assert contents(output) == expected
        assert {type(token) for token in output.request.prompt_token_ids} == {int}


@pytest.mark.parametrize("prompts", [[b"abc"], [[1.0, 2.0]], [[True]], [["a"]], [None], [1, 2], [{"prompt": "a"}]])
def test_a_prompt_of_another_type_is_rejected(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match="prompts: each must be a text or a list of token ids"):
        llm.generate(prompts, GREEDY)


def test_logprobs_are_returned_only_if_requested(llm: LLM, demo: LLM) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    (done,) = llm.generate("The sun is", sampling)
    assert done.logprobs is not None
    assert [one.token_id for one in done.logprobs] == done.token_ids
    assert all(one.rank == 1 and one.top[0] == (one.token_id, one.logprob) for one in done.logprobs)
    assert llm.generate("The sun is", GREEDY)[0].logprobs is None
    (stopped,) = demo.generate("1, 2, 3, 4,", replace(sampling, max_tokens=50), stop=["7"])
    assert stopped.logprobs is not None
    assert len(stopped.logprobs) == len(stopped.token_ids)


def test_output_matches_the_grammar(llm: LLM) -> None:
    date = Grammar(kind="regex", text=r"\d{4}-\d{2}-\d{2}")
    (done,) = llm.generate("Today is ", SamplingParams(temperature=0, max_tokens=16, grammar=date))
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", done.text)
    assert done.finish_reason == "stop"


def test_a_repeated_prompt_hits_the_prefix_cache(llm: LLM) -> None:
    prompt = [llm.tokenizer.encode("The sun is", add_special_tokens=True) * 50]
    assert llm.generate(prompt, GREEDY)[0].usage.cached_tokens == 0
    again = llm.generate(prompt, GREEDY)[0]
    assert again.usage.cached_tokens == 128, "full blocks of 64"


def test_a_prompt_may_be_token_ids(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("The sun is", add_special_tokens=True)
    assert contents(llm.generate([tokens], GREEDY)[0]) == contents(llm.generate(["The sun is"], GREEDY)[0])


def test_chat_uses_the_chat_template(demo: LLM) -> None:
    done = demo.chat(QUESTION, SamplingParams(temperature=0, max_tokens=32))
    assert (done.text, done.finish_reason) == (ANSWER, "stop")
    assert done.token_ids[-1] == 2  # the special token that ended it


def test_streams_can_interleave_with_each_other_and_with_a_batch(llm: LLM) -> None:
    prompts = ["The sun is", "Once upon a time", "1, 2, 3, 4,"]
    alone = [completion.text for completion in llm.generate(prompts, GREEDY)]
    first, second = (llm.stream(prompt, GREEDY) for prompt in prompts[:2])
    texts = [next(first).text, next(second).text]
    assert llm.generate(prompts[2], GREEDY)[0].text == alone[2]
    texts[1] += "".join(delta.text for delta in second)
    texts[0] += "".join(delta.text for delta in first)
    assert texts == alone[:2]
    abandoned = llm.stream("The sun is", GREEDY)
    next(abandoned)
    del abandoned
    assert llm.generate(prompts[0], GREEDY)[0].text == alone[0]


def test_streamed_text_adds_up_to_the_complete_text(llm: LLM) -> None:
    deltas = list(llm.stream("Once upon a time", GREEDY))
    assert "".join(delta.text for delta in deltas) == llm.generate("Once upon a time", GREEDY)[0].text
    assert deltas[-1].finish_reason == "length"
    assert len(deltas) > 6


def test_closing_a_stream_cancels_its_generation(llm: LLM) -> None:
    stream = llm.stream("Once upon a time", SamplingParams(max_tokens=400, ignore_eos=True))
    next(stream)
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work


def test_a_stop_string_ends_text_and_tokens(demo: LLM) -> None:
    done = demo.generate("1, 2, 3, 4,", SamplingParams(temperature=0, max_tokens=50), stop=["7"])[0]
    assert (done.text, done.finish_reason) == (" 5, 6, ", "stop")
    assert demo.tokenizer.decode(done.token_ids) == " 5, 6, 7"
    assert not demo.engine.has_work


def test_one_invalid_prompt_rejects_the_whole_batch(llm: LLM) -> None:
    with pytest.raises(RequestError, match=r"prompt: 600 tokens; the limit is [0-9]+, generated"):
        llm.generate([[1, 2, 3], [1] * 600], GREEDY)
    assert not llm.engine.has_work
    assert llm.generate([[504]], GREEDY)[0].finish_reason == "length"


def test_a_hugging_face_directory_can_be_loaded(llm: LLM, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    shape = LlamaConfig(
        vocab_size=llm.tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(shape).save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=llm.tokenizer.backend, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = "{{ bos_token }}{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path)
    tiny = LLM(str(tmp_path), kv_cache_memory="4MiB")
    done = tiny.chat([{"role": "user", "content": "one two"}], SamplingParams(temperature=0, max_tokens=4))
    assert done.request.prompt_token_ids == [1, *llm.tokenizer.encode("one two", add_special_tokens=False)]
    assert 1 <= len(done.token_ids) <= 4
    assert done.text == tiny.tokenizer.decode(done.token_ids)


def test_calls_without_parameters_use_those_of_generation_config(small_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_model, folder)
    given = {"temperature": 0.5, "top_k": 7, "max_new_tokens": 3, "eos_token_id": [2]}
    (folder / "generation_config.json").write_text(json.dumps(given))
    settings: dict[str, Any] = {"kv_cache_memory": "8MiB", "max_model_length": 256}
    model = LLM(str(folder), **settings)
    default = SamplingParams(temperature=0.5, top_k=7, max_tokens=3)
    assert model.default_sampling == default
    own = SamplingParams(max_tokens=2)
    assert model.generate("a")[0].request.sampling == default
    assert [done.request.sampling for done in model.generate(["a", "b"], [own, default])] == [own, default]
    assert len(list(model.stream("a"))) <= 3
    assert model.chat(QUESTION).request.sampling == default
    assert model.chat(QUESTION, own).request.sampling == own
    plain = LLM(str(folder), generation_config="none", **settings)
    assert plain.default_sampling == SamplingParams()
    reply = plain.chat(QUESTION).request
    assert reply.sampling == SamplingParams(max_tokens=256 - len(reply.prompt_token_ids))
    with pytest.raises(ConfigError, match="generation_config is 'on': it must be auto or none"):
        LLM(str(folder), generation_config="on")  # type: ignore[arg-type]


def test_variables_of_the_chat_template_can_be_given(llm: LLM) -> None:
    template = llm.tokenizer.chat_template
    assert template is not None
    tokenizer = replace(llm.tokenizer, chat_template=template.replaced("{{ messages[0].content }}{{ mood }}"))
    given, llm.tokenizer = llm.tokenizer, tokenizer
    try:
        done = llm.chat([{"role": "user", "content": "a"}], GREEDY, chat_template_kwargs={"mood": "!"})
        assert done.request.prompt_token_ids == tokenizer.encode("a!", add_special_tokens=False)
    finally:
        llm.tokenizer = given


def test_a_command_reads_the_metadata_of_a_gguf_file_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[Path] = []

    def opening(path: Path) -> GGUFFile:
        opened.append(path)
        return GGUFFile(path)

    monkeypatch.setattr(model_source, "GGUFFile", opening)
    flags = ["--max-tokens", "1", "--kv-cache-memory", "128MiB", "--max-model-length", "512"]
    assert main.main(["generate", str(demo_model()), "a", *flags]) == 0
    assert opened == [demo_model()]


def test_an_unknown_setting_is_rejected() -> None:
    with pytest.raises(ConfigError, match="tensor_cores: no such setting; choose from device, dtype"):
        LLM(str(demo_model()), tensor_cores=True)


def test_a_malformed_size_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^swap_space: size '2 apples': write a whole number with a unit"):
        LLM(str(demo_model()), kv_cache_memory="2GiB", swap_space="2 apples")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"max_sequences": 5.5}, "--max-sequences 5.5: must be a whole number"),
        ({"max_sequences": True}, "--max-sequences True: must be a whole number"),
        ({"block_size": None}, "--block-size None: must be a whole number"),
        ({"token_budget": "many"}, "--token-budget many: must be auto or a whole number"),
        ({"max_sequences": "5"}, "--max-sequences 5: must be a whole number"),
        ({"max_sequences": np.array([1, 2])}, "--max-sequences [1 2]: must be a whole number"),
        ({"prefix_caching": "no"}, "--prefix-caching no: must be true or false"),
        ({"prefix_caching": 2}, "--prefix-caching 2: must be true or false"),
        ({"device": np.array(["cpu", "cuda"])}, "--device ['cpu' 'cuda']: choose one of cpu, cuda"),
        ({"device": torch.device("cuda:1")}, "--device cuda:1: choose one of cpu, cuda"),
        ({"cuda_graphs": [1, 2.5]}, "--cuda-graphs 1,2.5: must be auto or off or whole numbers"),
        ({"model": "\udcff.gguf"}, "must be a path or name in UTF-8"),
    ],
)
def test_a_setting_of_another_type_is_rejected_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        EngineConfig(**{"model": "a", **given})


class Choice(Enum):
    FLOAT32 = "float32"
    MANY = 64


@pytest.mark.parametrize(
    ("config", "given", "taken"),
    [
        (EngineConfig, {"dtype": Choice.FLOAT32}, "float32"),
        (EngineConfig, {"dtype": torch.float32}, "float32"),
        (EngineConfig, {"device": torch.device("cpu")}, "cpu"),
        (EngineConfig, {"max_sequences": np.int64(64)}, 64),
        (EngineConfig, {"max_sequences": Choice.MANY}, 64),
        (EngineConfig, {"max_sequences": torch.tensor(64)}, 64),
        (EngineConfig, {"max_sequences": 64.0}, 64),
        (EngineConfig, {"kv_cache_memory": 2e9}, 2_000_000_000),
        (EngineConfig, {"token_budget": np.str_("auto")}, "auto"),
        (EngineConfig, {"prefix_caching": np.bool_(False)}, False),
        (EngineConfig, {"prefix_caching": 1}, True),
        (EngineConfig, {"cuda_graphs": [1, np.int64(2)], "device": "cuda"}, "1,2"),
        (ServerConfig, {"api_key_file": Path("keys")}, "keys"),
    ],
)
def test_a_setting_may_be_what_programs_hold_instead_of_pythons_own_types(
    config: type[EngineConfig | ServerConfig], given: dict[str, Any], taken: object
) -> None:
    model = {"model": "a"} if config is EngineConfig else {}
    found = getattr(config(**model, **given), next(iter(given)))
    assert (type(found), found) == (type(taken), taken)


def test_a_path_is_taken_only_by_settings_that_are_paths() -> None:
    with pytest.raises(ConfigError, match="--allowed-origins keys: must be a text"):
        ServerConfig(allowed_origins=Path("keys"))  # type: ignore[arg-type]


def test_generate_writes_completions_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    question = str(QUESTION[0]["content"])
    flags = ["--max-tokens", "32", "--kv-cache-memory", "128MiB", "--max-model-length", "512"]
    assert main.main(["generate", str(demo_model()), question, question, *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{ANSWER}\n{ANSWER}\n"
    assert captured.err == ""
    assert main.main(["generate", str(demo_model()), "1, 2, 3, 4,", "--raw", "--stop", "7", *flags]) == 0
    assert capsys.readouterr().out == " 5, 6, \n"


def test_generate_completes_a_file_of_prompts(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "1, 2, 3, 4,"}\n\n"The sun is"\n')
    flags = ["--raw", "--max-tokens", "5", "--kv-cache-memory", "128MiB", "--max-model-length", "512"]
    arguments = ["generate", str(demo_model()), "--prompts-file", str(prompts), "--output", str(output), *flags]
    assert main.main(arguments) == 0
    counting, sun = (json.loads(line) for line in output.read_text().splitlines())
    assert counting["text"].startswith(" 5, 6")
    assert sun == {
        "prompt": "The sun is",
        "text": sun["text"],
        "finish_reason": "length",
        "prompt_tokens": 3,
        "completion_tokens": 5,
    }


def test_a_pipeline_responds_like_miis(demo: LLM) -> None:
    pipe = Pipeline(demo)
    prompts = ["1, 2, 3, 4,", "The sun is"]
    first, second = pipe(prompts, max_new_tokens=12, do_sample=False)
    assert (str(first), first.generated_length, first.finish_reason) == (" 5, 6, 7, 8,", 12, "length")
    assert second.prompt_length == 3
    (full,) = pipe(prompts[0], max_new_tokens=50, do_sample=False, stop="7", return_full_text=True)
    assert (full.generated_text, full.finish_reason) == ("1, 2, 3, 4, 5, 6, ", "stop")
    with pytest.raises(RequestError, match="num_beams: no such argument"):
        pipe(prompts, num_beams=2)
    with pytest.raises(RequestError, match="max_length is 3 and the prompt has 11 tokens"):
        pipe(prompts, max_length=3)
    pipe.destroy()
    with pytest.raises(RuntimeError, match="is destroyed"):
        pipe(prompts)


def test_a_pipeline_measures_its_token_budget_and_frees_its_memory(small_model: Path) -> None:
    pipe = pipeline(
        str(small_model),
        dtype="float32",
        kv_cache_memory="160KiB",
        max_model_length=64,
        token_budget="auto",
        max_sequences=4,
    )
    assert pipe._llm is not None
    assert pipe._llm.config.token_budget in range(16, 193), "measured as far as this little cache goes"
    runner = weakref.ref(pipe._llm.engine._runner)
    pipe.destroy()
    assert runner() is None


def test_calibrate_prints_and_plots_the_curves_of_formats(
    small_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "curve.png"
    flags = ["--most-tokens", "32", "--seconds", "0.01", "--kv-cache-memory", "16MiB", "--max-model-length", "64"]
    assert main.main(["calibrate", str(small_model), "--output", str(picture), *flags]) == 0
    captured = capsys.readouterr()
    tables = captured.out.split("\n--")
    assert [part.split()[:1] for part in tables[1:]] == [["dtype"], ["quantization"]][2 - len(tables[1:]) :]
    assert ", the default: the processor has" in tables[0]
    for part in tables:
        rows = [line.split() for line in part.splitlines()]
        assert [row[0] for row in rows[2:4]] == ["16", "32"]
        assert sum("<- budget" in line for line in part.splitlines()) == 1
    assert "token budget auto: " in captured.out
    assert "a step takes about" in captured.out
    assert captured.err == ""
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_calibrate_says_before_it_measures_that_a_plot_needs_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fastgen.commands.calibrate.find_spec", lambda _: None)
    assert main.main(["calibrate", "no-such-model", "--output", str(tmp_path / "curve.png")]) == 2
    error = capsys.readouterr().err
    assert "--output" in error
    assert "pip install matplotlib" in error


def test_bench_measures_a_closed_loop_in_process(small_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--requests", "3", "--clients", "2", "--prompt-tokens", "8", "--generation-tokens", "4", "--deviation", "0"]
    flags = ["--kv-cache-memory", "16MiB", "--max-model-length", "512"]
    assert main.main(["bench", str(small_model), *load, *flags, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["answered"], found["failed"], found["generated_tokens"]) == (3, 0, 12)
    assert found["inter_token_latency_ms"]["p50"] <= found["inter_token_latency_ms"]["max"]
    assert found["time_to_first_token_ms"]["mean"] > 0
    assert found["total_tokens_per_second"] > found["generated_tokens_per_second"] > 0

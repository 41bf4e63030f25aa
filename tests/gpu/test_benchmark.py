"""The benchmark of a GPU runs on a CPU with tiny shapes: every section, and what it counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import benchmarks.gpu.__main__ as program
import pytest
import torch
from benchmarks.gpu import first_run, sections, vllm_engine
from benchmarks.gpu.aims import aims
from benchmarks.gpu.aims import table as aims_table
from benchmarks.gpu.counts import step_work
from benchmarks.gpu.prediction import GPUS, predicted_seconds
from benchmarks.gpu.prediction import table as prediction_table
from benchmarks.gpu.results import Row
from benchmarks.gpu.sections import SECTIONS, Bench
from benchmarks.gpu.sizes import FULL, TINY

from fastgen.runner.graphs import Graph

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "engine"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The table and the JSON of all sections."""
    folder = tmp_path_factory.mktemp("benchmark")
    table = run("--device", "cpu", "--output", str(folder))
    return table, json.loads((folder / "gpu.json").read_text())


@pytest.mark.slow
def test_every_section_measures_what_the_table_promises(whole: tuple[str, dict[str, Any]]) -> None:
    table, report = whole
    rows = {row["name"]: row for row in report["rows"]}
    assert not [name for name in rows if name.startswith("section")], table
    failed = {name.rpartition(": ")[2] for name, row in rows.items() if row["seconds"] is None}
    assert failed <= {"torch, cudnn attention", "torch, efficient attention"}, "they need a GPU"
    for wanted in (
        "tiny Llama, 1 decode at 24 tokens: step of the engine",
        "tiny Llama, prefill of 40 tokens: launch to result",
        "tiny Llama, 3 decodes at 20 tokens: step of the engine",
        "tiny Qwen3, 1 decode at 24 tokens: step of the engine",
        "tiny Qwen3, 5 requests, 4 to 12 tokens in and out: output",
        "tiny Llama, p24/g4, 2 clients: p99 inter-token latency",
        "tiny Llama, 2 decodes, 2 prompts of 300 tokens, with the default target: median inter-token latency during",
        "tiny Llama, 2 decodes, 2 prompts of 300 tokens, with a budget of 128 and no target: "
        "median inter-token latency after",
        "tiny Llama, step of 16 tokens in 8 sequences",
        "tiny mixture, 1 decode at 24 tokens: step of the engine",
        "tiny mixture, 3 decodes at 20 tokens: step of the engine",
        "tiny mixture, prefill of 40 tokens: launch to result",
        "tiny Llama, attention of one layer, prefill of 40 tokens: ours",
        "tiny Llama, attention of one layer, prefill of 40 tokens: torch, its choice",
        "transformers tiny Llama, 3 decodes at 20 tokens: step",
        "transformers tiny Llama, prefill of 40 tokens",
        "transformers tiny Qwen3, 1 decode at 24 tokens: step",
    ):
        assert wanted in rows, table
    assert table.count("\n| ") == len(rows) + 8  # with the header, and the table of launches
    assert report["launches"]["greedy"]["waits"] == 0


@pytest.mark.slow
def test_shares_are_of_the_peaks_measured_in_the_same_run(whole: tuple[str, dict[str, Any]]) -> None:
    _, report = whole
    row = next(row for row in report["rows"] if row["name"].endswith("prefill of 40 tokens: launch to result"))
    peak = report["peaks"]["bytes_per_second"]
    assert row["bytes"] == step_work(TINY.large.architecture, [(40, 40)], element_bytes=4).num_bytes
    assert row["share_of_peak_bytes"] == pytest.approx(row["bytes"] / row["seconds"] / peak)
    assert {"gpu", "driver", "torch", "triton", "date"} <= report.keys()


def test_what_was_measured_is_written_after_each_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit may end the program at any time."""
    written: list[list[str]] = []

    def one(_bench: Bench) -> Iterator[Row]:
        yield Row("first", 1.0)

    def two(_bench: Bench) -> Iterator[Row]:
        report = json.loads((tmp_path / "gpu.json").read_text())
        written.append([row["name"] for row in report["rows"]])
        yield Row("second", 1.0)

    monkeypatch.setattr(program, "_isolated", lambda name, bench, _seconds: program.SECTIONS[name](bench))
    monkeypatch.setattr(program, "SECTIONS", {"peaks": one, "two": two})
    monkeypatch.setattr(program, "_launches", dict)
    monkeypatch.setattr(sys, "argv", ["gpu", "--tiny", "--device", "cpu", "--output", str(tmp_path)])
    program.main()
    assert written == [["first"]]
    assert len(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == 2


def test_the_first_run_tests_and_measures_everything_once() -> None:
    parts = first_run.parts()
    assert parts[0].name == "essential-tests", "wrong tokens make all else worthless"
    only = [part.arguments[part.arguments.index("--only") + 1] for part in parts if "--only" in part.arguments]
    assert sorted(",".join(only).split(",")) == sorted(SECTIONS.keys() - {"peaks"})
    selected = [part.arguments[-1] for part in parts if "-k" in part.arguments]
    assert selected[1] == f"not ({selected[0]})"
    files = {argument for part in parts for argument in part.arguments if argument.startswith("tests/")}
    assert files == {f"tests/gpu/test_{name}.py" for name in ("kernels", "device", "ranks")}
    names = (ROOT / "tests/gpu/test_kernels.py").read_text()
    assert all(f"{word}" in names for word in selected[0].split(" or "))


def test_without_a_gpu_the_first_run_says_why(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "engine"), "OUT": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu.first_run"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("--device cuda: ")


def test_each_part_leaves_its_output_and_its_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child = tmp_path / "child"
    sleeping = (
        "import os, time; print('before')\nif os.fork(): time.sleep(60)\n"
        f"time.sleep(4)\nopen({str(child)!r}, 'w').close()"
    )
    chosen = (
        first_run.Part("good", ("-c", "print('found')"), 30),
        first_run.Part("slow", ("-c", sleeping), 2),
        first_run.Part("bad", ("-c", "raise SystemExit(5)"), 30),
    )
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(first_run, "parts", lambda: chosen)
    monkeypatch.setattr(first_run, "missing_gpu", lambda: None)
    assert first_run.main([]) == 1
    results = [line.split(" | ")[::2] for line in (tmp_path / "summary.md").read_text().splitlines()]
    assert results == [["| good", "passed |"], ["| slow", "stopped after 2 s |"], ["| bad", "exit code 5 |"]]
    assert (tmp_path / "slow.txt").read_text() == "before\n"
    time.sleep(3)
    assert not child.exists(), "a child of a part that was stopped goes on"
    assert first_run.main(["good", "--seconds", "0"]) == 1
    assert "not run: the time is over" in capsys.readouterr().out


def test_a_section_that_fails_or_takes_too_long_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_bench: Bench) -> Iterator[Row]:
        yield Row("measured before", 1.0)
        raise ValueError("no such\nthing")

    def crash(_bench: Bench) -> Iterator[Row]:
        os._exit(3)

    def hang(_bench: Bench) -> Iterator[Row]:
        time.sleep(600)
        yield Row("too late")

    bench, found = Bench(TINY, torch.device("cpu"), torch.float32), []
    for section, seconds in ((fail, 60.0), (crash, 60.0), (hang, 2.0)):
        monkeypatch.setitem(SECTIONS, section.__name__, section)
        found += [(row.name, row.note) for row in program._isolated(section.__name__, bench, seconds)]
    assert found == [
        ("measured before", ""),
        ("section fail", "ValueError: no such"),
        ("section crash", "the process ended with exit code 3"),
        ("section hang", "stopped after 2 s"),
    ]
    assert [row.note for row in program._isolated("fail", bench, 0.0)] == [
        "not run: the 530 s of the whole run are over"
    ]


def test_the_page_predicts_all_that_the_sections_measure() -> None:
    page = (ROOT / "docs" / "benchmarks" / "gpu.md").read_text()
    assert "\n\n" + "\n".join(aims_table(FULL)) + "\n\n" in page, "python -m benchmarks.gpu --count-only prints it"
    found = aims(FULL)
    assert all(each.predicted for each in found)
    assert {section for each in found for section in each.sections} == set(SECTIONS)
    # What is predicted in other tables of the page.
    curve, layer = ([each for each in prediction_table(FULL) if word in each] for word in ("step of", "of one layer"))
    assert len(curve) == len(FULL.token_counts)
    assert len(layer) == 3


def test_counting_needs_no_device() -> None:
    names = [line.split(" | ")[0] for line in program._count_table(FULL)]
    assert names[2:4] == ["| 8B, 1 decode at 512 tokens", "| 8B, prefill of 2048 tokens"]
    page = (ROOT / "docs" / "benchmarks" / "gpu.md").read_text().splitlines()
    launches = program._launch_table(program._launches())
    assert set(program._count_table(FULL)) | set(prediction_table(FULL)) | set(launches) <= set(page)
    assert launches[2:] == [
        "| greedy | 9 | 13 | 4 | 0 |",
        "| filters | 9 | 13 | 4 | 0 |",
        "| filters and a penalty | 9 | 13 | 9 | 0 |",
        "| mixture of experts, greedy | 13 | 13 | 4 | 0 |",
        "| mixture of experts, filters | 13 | 13 | 4 | 0 |",
        "| mixture of experts, filters and a penalty | 13 | 13 | 9 | 0 |",
    ]


def test_the_prediction_is_that_of_its_parts() -> None:
    """Step times that a review predicted from the same reasoning, in milliseconds on an H100 and an H200."""
    large, small, mixture = (each.architecture for each in (FULL.large, FULL.small, FULL.mixture))
    for architecture, shape, expected in (
        (large, [(1, 512)], (6.4, 4.8)),
        (large, [(1, 1024)] * 64, (9.8, 7.1)),
        (large, [(1, 131072)], (13.2, 9.5)),
        (small, [(1, 512)], (1.1, 0.95)),
        (small, [(1, 1024)] * 256, (13.2, 9.4)),
        (mixture, [(1, 1024)] * 64, (10.3, 7.5)),
        (large, [(2048, 2048)], (51, 51)),
        (large, [(8192, 8192)], (240, 240)),
    ):
        found = [predicted_seconds(gpu, architecture, shape) * 1e3 for gpu in GPUS.values()]
        assert found == pytest.approx(expected, rel=0.04)
        floor = step_work(architecture, shape).floor_seconds(GPUS["H100 SXM"].peak, 989e12) * 1e3
        assert found[0] > floor
    # A chunk's attention costs its context.
    near, far = (predicted_seconds(GPUS["H200 SXM"], large, [(2048, length)]) for length in (4096, 65536))
    assert far > 4 * near


class Repeated:
    """Captures functions, which a replay calls."""

    def __init__(self) -> None:
        self.replays = 0

    def capture(self, run: Callable[[], None]) -> Graph:
        owner = self

        class Call:
            def replay(self) -> None:
                owner.replays += 1
                run()

        return Call()

    def used_bytes(self) -> int:
        return 0


@pytest.mark.parametrize("graphs", [True, False])
def test_steps_are_timed_with_graphs_and_without(graphs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = Repeated()
    monkeypatch.setattr(sections, "graph_capture", lambda _device: capture)
    sizes = replace(TINY, token_counts=(8,), decode_steps=4, seconds=0.01)
    bench = Bench(sizes, torch.device("cpu"), torch.float32, graphs=graphs)
    with torch.inference_mode():
        names = [row.name for row in sections.decode(bench, TINY.small, 2, 8)]
    assert any(name.endswith("launched one by one") for name in names) == graphs
    assert (capture.replays > 0) == graphs


@dataclass
class Vllm:
    """Stands in for vLLM's engine, which computes a prompt in steps of its token budget.

    Attributes:
        arguments: what the engine was made with.
        prompts: the number of prompt tokens of each request.
    """

    budget: int = 100
    arguments: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    prompts: dict[str, int] = field(default_factory=dict)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        usage = SimpleNamespace(UsageContext=SimpleNamespace(OPENAI_API_SERVER="a server"))
        module: Any = ModuleType("vllm")
        module.EngineArgs, module.LLMEngine, module.__version__ = dict, self, "1.2"
        module.SamplingParams = lambda **settings: SimpleNamespace(**settings)
        monkeypatch.setattr(vllm_engine, "is_installed", lambda: True)
        for name, each in (("vllm", module), ("vllm.usage", usage), ("vllm.usage.usage_lib", usage)):
            monkeypatch.setitem(sys.modules, name, each)

    def from_engine_args(self, arguments: dict[str, Any], *, usage_context: str) -> Vllm:
        assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
        assert usage_context == "a server", "others have another budget by default"
        self.arguments = arguments
        self.config = json.loads(Path(arguments["model"], "config.json").read_text())
        self._left: dict[str, int] = {}
        self._generated: dict[str, int] = {}
        self._most: dict[str, int] = {}
        return self

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        assert max(prompt["prompt_token_ids"]) < self.config["vocab_size"]
        self.prompts[name] = self._left[name] = len(prompt["prompt_token_ids"])
        self._most[name] = sampling.max_tokens

    def step(self) -> list[Any]:
        budget, outputs = self.budget, []
        for name, left in self._left.items():
            computed = min(left, budget)
            self._left[name] -= computed
            budget -= computed
            if self._left[name] or self._generated.get(name) == self._most[name]:
                continue
            self._generated[name] = self._generated.get(name, 0) + 1
            token_ids = [3] * self._generated[name]
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=token_ids)]))
        return outputs


def test_vllm_runs_the_same_load_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    (engine := Vllm()).install(monkeypatch)
    ticks = iter(range(10**6))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    rows = list(SECTIONS["vllm"](Bench(TINY, torch.device("cpu"), torch.float32)))
    s = TINY
    assert engine.prompts == {
        **{f"stream {number}": s.decode_context for number in range(s.streams)},
        **{f"prompt {number}": s.long_prompt for number in range(s.long_prompts)},
    }
    assert engine.config["architectures"] == ["LlamaForCausalLM"]
    assert engine.arguments["load_format"] == "dummy"
    assert engine.arguments["max_model_len"] == s.longest_model.max_length
    assert "max_num_batched_tokens" not in engine.arguments
    name = "vLLM 1.2, tiny Llama, 2 decodes, 2 prompts of 300 tokens: median inter-token latency"
    assert [row.name for row in rows] == [f"{name} {phase}" for phase in ("before", "during", "after")]
    # All streams get a token in each step, of which two prompts take three each.
    latencies = [s.streams * count for count in (s.watched_steps, 6, s.watched_steps)]
    assert [int(row.note.split()[-2]) for row in rows] == latencies
    assert all(row.seconds for row in rows)


def test_without_vllm_the_section_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "is_installed", lambda: False)
    assert not list(SECTIONS["vllm"](Bench(TINY, torch.device("cpu"), torch.float32)))


def test_the_work_of_a_decode_is_its_weights_and_its_cache() -> None:
    a = FULL.large.architecture
    assert a.num_parameters == 8_030_261_248
    work = step_work(a, [(1, 1000)])
    embedding = a.vocab_size * a.hidden_size
    norms = (2 * a.num_layers + 1) * a.hidden_size
    assert work.weights == 2 * (a.num_parameters - embedding - norms)
    assert work.cache == 2 * 2 * 1000 * a.num_layers * a.num_kv_heads * a.head_dim
    pairs = 4 * 1000 * a.num_layers * a.num_heads * a.head_dim
    assert work.operations == work.weights + pairs


def test_logits_are_written_and_read_in_their_own_type() -> None:
    a = FULL.large.architecture
    without, sampled = (step_work(a, [(1, 1000)], num_sampled=count).activations for count in (0, 1))
    # Two and two bytes, and scores in float32. What the last layer moves for one row is less than three bytes of each.
    assert 8 * a.vocab_size < sampled - without < 11 * a.vocab_size, "a float32 copy would be another 8"


def test_chunks_of_a_prompt_do_the_operations_of_the_whole() -> None:
    a = FULL.small.architecture
    whole = step_work(a, [(300, 300)])
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    qkv, after = a.hidden_size * (queries + 2 * keys), a.hidden_size * (queries + 3 * a.mlp_size)
    # The last layer's products after attention, and the head, are for the sampled row only.
    products = 300 * a.num_layers * qkv + (300 * (a.num_layers - 1) + 1) * after + a.vocab_size * a.hidden_size
    assert whole.operations == 2 * products + 4 * queries * a.num_layers * 300 * 301 // 2
    parts = step_work(a, [(100, 100)], num_sampled=0) + step_work(a, [(200, 300)])
    assert parts.operations == whole.operations
    assert parts.weights > whole.weights


def test_a_mixture_reads_the_experts_that_have_a_token() -> None:
    a = FULL.mixture.architecture
    expert = 3 * a.hidden_size * 768
    assert a.num_parameters == 10_592_262_144
    besides = a.num_parameters - a.num_layers * 128 * expert - a.vocab_size * a.hidden_size  # but for the embedding
    besides -= (2 * a.num_layers + 1) * a.hidden_size + a.num_layers * 2 * a.head_dim  # and the norms
    one, many = step_work(a, [(1, 1000)]), step_work(a, [(1, 1000)] * 64)
    assert one.weights == 2 * (besides + a.num_layers * 8 * expert)
    assert many.weights == 2 * (besides + a.num_layers * 126 * expert), "128 * (1 - (1 - 8 / 128) ** 64) have a token"
    pairs = 4 * 1000 * a.num_layers * a.num_heads * a.head_dim
    assert many.operations == 64 * (one.weights + pairs)

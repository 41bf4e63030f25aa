"""With --deterministic, equal tokens have equal logits, bit for bit, whatever else the engine computes."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.model.config.test_gguf_families import build
from fastgen.core.sequence import RowParameters
from fastgen.core.step_plan import Chunk, StepPlan
from fastgen.engine.core import Engine
from fastgen.kernels.cpu.vector_width import has_vnni
from fastgen.model.determinism import check_deterministic
from fastgen.model.layers.bfloat16_linear import BFloat16Linear
from fastgen.model.source import ModelSource
from fastgen.runner.runner import ModelRunner
from fastgen.settings import ConfigError, EngineConfig
from support.checking import check_step
from support.driving import FewBlocks, load, logits, run_in_chunks, sequence
from support.gguf_writing import write_gguf
from support.tiny_models import TINY, VOCABULARY, prompt, saved
from support.workloads import Workload, play, random_workload

pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
WORKLOADS = 16
FORMATS = {
    "float32": ("llama", "float32", "none"),
    "bfloat16": ("llama", "bfloat16", "none"),
    "int8 in float32": ("llama", "float32", "int8"),
    "int8 in bfloat16": ("llama", "bfloat16", "int8"),
    "4 bits": ("Q4_0", "bfloat16", "stored"),
    "6 bits": ("Q8_0", "float32", "stored"),
}


class Witness:
    """A runner's sampler that remembers a digest of the logits after each history of tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        self._sampler: Any = runner._sampler
        self._histories: dict[int, list[int]] = {}
        self.digests: dict[tuple[int, ...], bytes] = {}
        self.repeated = 0
        runner._sampler = self  # type: ignore[assignment]

    def admit(self, new: RowParameters) -> None:
        self._histories[new.row] = list(new.tokens)
        self._sampler.admit(new)

    def sample(self, logits: torch.Tensor, rows: Any, positions: Any, masks: Any) -> Any:
        tokens, logprobs = self._sampler.sample(logits, rows, positions, masks)
        for row, position, own, token in zip(rows.tolist(), positions.tolist(), logits, tokens, strict=True):
            history = self._histories[row]
            assert len(history) == position
            digest = hashlib.sha256(own.numpy().tobytes()).digest()
            known = self.digests.setdefault(tuple(history), digest)
            self.repeated += known is not digest
            assert known == digest, f"other logits after the same {position} tokens"
            history.append(token)
        return tokens, logprobs


def runner_of(name: str, root: Path, dtype: str, quantization: str, *, deterministic: bool = True) -> ModelRunner:
    """Load a tiny model in a format; `name` is a family, or a type of GGUF's tensors."""
    path = saved(name, root) if name in TINY else write_gguf(build("llama"), root / f"{name}.gguf", name)
    return load(
        path,
        dtype=dtype,
        quantization=quantization,
        block_size=BLOCK_SIZE,
        max_model_length=160,
        kv_cache_memory=4 << 20,
        swap_space=4 << 20,
        deterministic=deterministic,
    )


@pytest.fixture(params=list(FORMATS.values()), ids=list(FORMATS))
def form(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    form: tuple[str, str, str] = request.param
    if form[2] != "none" and not has_vnni():
        pytest.skip(f"--quantization {form[2]} is not available with --deterministic: the processor has no AVX512-VNNI")
    return form


def engine_of(runner: ModelRunner, workload: Workload) -> Engine:
    """Return an engine for a workload; steps take no time, so nothing ends by its deadline."""
    few = FewBlocks(runner, workload.num_blocks, min(workload.num_host_blocks, runner.num_host_blocks))
    config = EngineConfig(
        model="", token_budget=workload.token_budget, max_sequences=workload.max_sequences,
        swap_space=few.num_host_blocks, **workload.settings,
    )  # fmt: skip
    return Engine(few, config, lambda: 0.0)


def test_logits_are_the_same_under_any_load(form: tuple[str, str, str], tmp_path: Path) -> None:
    """Over random requests, budgets, cancellations, cached prefixes, swaps and recomputations, and alone."""
    runner = runner_of(form[0], tmp_path, *form[1:])
    witness, seen = Witness(runner), Counter[str]()
    for seed in range(WORKLOADS):
        workload = random_workload(random.Random(seed), block_size=BLOCK_SIZE, longest_prompt=90, most=8)
        budget = workload.token_budget
        outcome = play(
            engine_of(runner, workload),
            workload.arrivals,
            lambda e, step, budget=budget: check_step(e, step, budget),  # type: ignore[misc]
            vocabulary=VOCABULARY,
        )
        seen["swapped"] += outcome.swapped_out > 0
        seen["recomputed"] += outcome.preemptions > outcome.swapped_out
        seen["found in the cache"] += sum(outcome.cached_tokens.values()) > 0
        seen["cancelled"] += bool(outcome.cancelled)
        repeated = witness.repeated
        for number, arrival in enumerate(workload.arrivals):
            alone = Engine(FewBlocks(runner, runner.num_blocks), EngineConfig(model="", prefix_caching=False))
            alone.add(replace(arrival, deadline=None).request(number, VOCABULARY))
            while alone.has_work:
                alone.step()
        assert witness.repeated > repeated
    assert min(seen[what] for what in ("swapped", "recomputed", "found in the cache", "cancelled")) > 0, seen
    assert witness.repeated > 500


# Linear attention is rejected, see below.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name, tiny in TINY.items() if "linear_num_key_heads" not in tiny.settings])
def test_every_family_computes_a_token_alone_as_beside_others(name: str, dtype: str, tmp_path: Path) -> None:
    tiny = TINY[name]
    runner = load(
        saved(name, tmp_path), dtype=dtype, kv_cache_memory=4 << 20, block_size=BLOCK_SIZE,
        max_model_length=tiny.max_model_length, deterministic=True,
    )  # fmt: skip
    tokens = prompt(83)
    expected = run_in_chunks(runner, tokens, [5, 0, 11, 2, 7, 3], [83])
    for sizes in ([40, *[1] * 43], [7, 1, 23], [50, 32, 1]):
        assert torch.equal(run_in_chunks(runner, tokens, [5, 0, 11, 2, 7, 3], sizes), expected)
    for others in ([1, 1, 1], [1, 30], [17, 5, 40]):
        subject = sequence(tokens, [5, 0, 11, 2, 7, 3])
        run_in_chunks(runner, tokens, subject.block_table, [82])
        subject.num_computed_tokens = 82
        beside = [
            sequence(prompt(size, seed=9), [12 + 3 * place + part for part in range(3)])
            for place, size in enumerate(others)
        ]
        plan = [Chunk(subject, 82, 1), *(Chunk(each, 0, len(each.tokens)) for each in beside)]
        plan.sort(key=lambda chunk: chunk.num_tokens > 1)
        rows = logits(runner, StepPlan(tuple(plan)))
        assert torch.equal(rows[[chunk.sequence for chunk in plan].index(subject)], expected)


def test_layers_in_bfloat16_have_the_product_with_one_order_of_sums(tmp_path: Path) -> None:
    """A tiny model's sums are too short to tell the products apart."""
    model: Any = runner_of("llama", tmp_path, "bfloat16", "none")._model
    assert isinstance(model._weights.layers[0].qkv, BFloat16Linear)


def test_without_the_setting_the_bits_depend_on_the_chunks(tmp_path: Path) -> None:
    """The tests above would detect it."""
    runner = runner_of("llama", tmp_path, "float32", "none", deterministic=False)
    whole, last_alone = (run_in_chunks(runner, prompt(83), [5, 0, 11, 2, 7, 3], sizes) for sizes in ([83], [82, 1]))
    assert not torch.equal(whole, last_alone)
    torch.testing.assert_close(whole, last_alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("qwen3-next", {}, "linear attention computes the tokens of a chunk together"),
        ("llama", {"dtype": "float16"}, "torch computes --dtype float16"),
    ],
)
def test_models_that_cannot_be_deterministic_are_rejected(
    name: str, settings: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = ModelSource.open(str(saved(name, tmp_path)))
    check_deterministic(source, EngineConfig(model="", **settings))
    with pytest.raises(ConfigError, match=f"--deterministic: not available here: {reason}.*: remove it"):
        check_deterministic(source, EngineConfig(model="", deterministic=True, **settings))


def test_models_of_transformers_and_weight_only_products_are_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelSource.open(str(saved("llama", tmp_path)))
    config = EngineConfig(model="", deterministic=True, quantization="int8")
    with pytest.raises(ConfigError, match="transformers runs this model"):
        check_deterministic(replace(source, native=None), config)
    monkeypatch.setenv("FASTGEN_CPU_INT8", "weight-only")
    with pytest.raises(ConfigError, match="weight-only of --quantization int8"):
        check_deterministic(source, config)


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"tensor_parallel": 2}])
def test_settings_that_cannot_be_deterministic_are_rejected(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--deterministic"):
        EngineConfig(model="", deterministic=True, **settings)

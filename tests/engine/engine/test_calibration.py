"""Calibration over a simulated device with known step times."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest

from fastgen.core.budget_tuning import measured_sizes
from fastgen.core.chunking import MIN_PROMPT_TOKENS
from fastgen.core.step_model import StepModel
from fastgen.core.step_times import StepWork
from fastgen.engine.calibration import calibrate, describe_budget, measure, tuned_budget
from fastgen.engine.core import Engine
from fastgen.settings import EngineConfig
from support.simulation import SimulatedRunner


def ignore_progress(_stage: str, _fraction: float) -> None:
    """Ignore progress."""


def auto(**settings: object) -> EngineConfig:
    return EngineConfig(model="simulated", token_budget="auto", **settings)  # type: ignore[arg-type]


def runner(**options: float) -> SimulatedRunner:
    return SimulatedRunner(num_blocks=256, block_size=16, **options)  # type: ignore[arg-type]


def test_the_ladder_ends_at_the_largest_size() -> None:
    assert measured_sizes(256) == [16, 32, 48, 64, 96, 128, 192, 256]
    assert measured_sizes(1000)[-2:] == [768, 1000]
    assert measured_sizes(10) == [10]


def test_auto_becomes_the_fewest_tokens_near_peak_throughput() -> None:
    device = runner(base=0.020, token=0.0001, kv_token=0.0)
    config, points = calibrate(device, auto(max_sequences=8), ignore_progress, device.clock)
    # 0.95 of the peak at 1024 tokens is reached by 801, and 832 is the next multiple of 64.
    assert config.token_budget == 832
    for point in points:
        assert point.seconds == pytest.approx(0.020 + 0.0001 * point.tokens)


def test_the_chosen_budget_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    device = runner(base=0.020, token=0.0001, kv_token=0.0)
    with caplog.at_level("INFO", "fastgen.engine.calibration"):
        calibrate(device, auto(max_sequences=8), ignore_progress, device.clock)
    assert "token budget auto: 832, set by the peak throughput: a step of 832 tokens takes" in caplog.text


def test_prompts_advance_even_if_no_step_meets_the_target() -> None:
    device = runner(base=0.300, token=0.002, kv_token=0.0)
    config, _ = calibrate(device, auto(inter_token_target=100), ignore_progress, device.clock)
    assert config.token_budget == 16
    assert config.sequence_limit == 16


def test_the_target_bounds_the_budget_and_the_log_line_tells() -> None:
    device = runner(base=0.020, token=0.001, kv_token=0.0)
    settings = auto(max_sequences=8, inter_token_target=100)
    config, _ = calibrate(device, settings, ignore_progress, device.clock)
    assert config.token_budget == 80
    measured = measure(device, measured_sizes(1024), seconds=0.0, clock=device.clock)
    line = describe_budget(tuned_budget(measured, settings))
    assert "token budget auto: 80, set by the inter-token target: a step of 80 tokens takes 100.0 ms" in line


@pytest.mark.parametrize("target", ["auto", 1])
def test_the_budget_has_a_token_for_each_of_max_sequences_and_some_for_prompts(target: int | str) -> None:
    device = runner(base=0.0, token=0.001)
    config, _ = calibrate(device, auto(max_sequences=200, inter_token_target=target), ignore_progress, device.clock)
    assert config.token_budget == 200 + MIN_PROMPT_TOKENS


def test_sizes_beyond_saturation_are_skipped() -> None:
    device = runner(base=1e-6, token=0.001, kv_token=0.0)
    measure(device, measured_sizes(1024), seconds=0.0, clock=device.clock)
    assert max(step.num_tokens for step in device.steps[1:]) < 1024


def test_the_cost_of_reading_kv_is_measured_separately() -> None:
    device = runner(kv_token=1e-5)
    less, more = measure(device, [16, 64], seconds=0.0, clock=device.clock).contexts
    assert more.tokens == less.tokens
    assert more.seconds - less.seconds == pytest.approx(1e-5 * (more.work.kv_tokens - less.work.kv_tokens))


def test_the_cost_of_a_context_is_measured_with_chunks_over_longer_and_longer_ones() -> None:
    device = SimulatedRunner(num_blocks=4096, block_size=16, base=0.02, token=0.0005, kv_token=1e-7, pair=2e-8)
    config, points = calibrate(device, auto(max_sequences=8), ignore_progress, device.clock)
    costs = StepModel.of(points).coefficients
    assert costs.context_pair == pytest.approx(2e-8, rel=0.05)
    assert costs.kv_token == pytest.approx(1e-7, rel=0.3)
    contexts = [point.work.kv_tokens - 64 for point in points if point.work.tokens == 64 and point.work.context_pairs]
    assert contexts == [1024, 4096, 16384, 65024], "none doubles the time of the step; the last one is the longest"
    short = SimulatedRunner(num_blocks=4096, block_size=16, base=0.02, token=0.0005, pair=1e-6)
    contexts = [point.work.kv_tokens for point in measure(short, [16], seconds=0.0, clock=short.clock).chunks]
    assert contexts == [64, 1024 + 64, 4 * (1024 + 1), 1024 + 16]
    assert isinstance(config.token_budget, int)


@dataclass
class Roofline(SimulatedRunner):
    """A GPU: a step takes as long as its launch, its bytes or its operations, whichever take longest.

    Attributes:
        base: reading the weights. `kv_token` is reading KV, and `token` and `pair` are the operations.
        floor: the launch.
    """

    floor: float = 0.0

    def seconds(self, tokens: int, kv_tokens: int, pairs: float = 0.0) -> float:
        return max(self.floor, self.base + self.kv_token * kv_tokens, self.token * tokens + self.pair * pairs)


# Of one H100, by its data sheet, and models of 8.0e9 and 0.6e9 parameters in bfloat16: bytes at 80 % of 3.35 TB/s,
# products at 680 TFLOP/s, attention at 300.
EIGHT_BILLION = {"base": 5.6e-3, "token": 2.2e-5, "kv_token": 4.9e-8, "pair": 1.75e-9}
SMALL = {"base": 0.45e-3, "token": 2.4e-6, "kv_token": 4.3e-8, "pair": 1e-9}


@pytest.mark.parametrize("length", [8192, 131072])
@pytest.mark.parametrize(
    "device",
    [EIGHT_BILLION, EIGHT_BILLION | {"floor": 8e-3}, SMALL | {"floor": 1e-3}],
    ids=["8B", "8B, slow launches", "0.6B"],
)
def test_the_measured_steps_predict_those_of_a_gpu(device: dict[str, float], length: int) -> None:
    """To 0.65 to 1.65 times: the model is a sum, and the time a maximum of what may overlap."""
    gpu = Roofline(4096, 64, **device)  # type: ignore[arg-type]
    gpu.max_model_length = length
    config, points = calibrate(gpu, auto(max_sequences=64), ignore_progress, gpu.clock)
    costs = StepModel.of(points).coefficients
    assert isinstance(config.token_budget, int)
    sizes = [size for size in (1, 16, 64, 128, 256, 512) if size <= config.token_budget]
    for decodes, size, start in product((0, 8, 64), sizes, (0, 1000, 4000, 16_000, 60_000, 130_000)):
        if start + size <= length and decodes + size <= config.token_budget:
            work = StepWork(decodes + size, decodes * 1000 + start + size, (size - 1) * start)
            seconds = gpu.seconds(work.tokens, work.kv_tokens, size * (start + size / 2))
            assert 0.65 <= costs.seconds(work) / seconds <= 1.65


def test_chunks_over_contexts_need_no_memory_for_the_contexts() -> None:
    """Their block tables repeat blocks; what they write themselves is in blocks of their own."""
    device = SimulatedRunner(num_blocks=40, block_size=16)
    device.max_model_length = 5000
    calibration = measure(device, [16], seconds=0.0, clock=device.clock)
    assert max(point.work.kv_tokens for point in calibration.chunks) > 4000


def test_rounds_end_when_the_time_is_up() -> None:
    device = runner(base=0.1, token=0.0)
    measure(device, [16, 32], seconds=1.0, context=8, clock=device.clock)
    seconds = device.clock.now
    assert 1.0 <= seconds <= 1.5
    progress: list[float] = []
    measure(device, [16, 32], seconds=100.0, context=8, on_progress=progress.append, clock=device.clock)
    assert progress == sorted(progress)
    assert progress[-1] == 1.0
    assert device.clock.now - seconds < 100.0, "five rounds are enough"


def test_a_fixed_budget_is_not_calibrated() -> None:
    device = runner()
    config = EngineConfig(model="simulated", token_budget=128)
    assert calibrate(device, config, ignore_progress, device.clock) == (config, ())
    assert not device.steps


@pytest.mark.parametrize(("num_blocks", "block_size"), [(1, 16), (2, 16), (3, 64), (40, 16)])
def test_a_small_cache_is_measured_with_the_sizes_that_fit(num_blocks: int, block_size: int) -> None:
    device = SimulatedRunner(num_blocks=num_blocks, block_size=block_size)
    config, points = calibrate(device, auto(), ignore_progress, device.clock)
    assert points
    assert isinstance(config.token_budget, int)
    for step in device.steps:
        written = step.slot_mapping.tolist()
        assert len(written) == len(set(written))
        assert max(written) < num_blocks * block_size


def test_calibration_leaves_the_whole_cache_to_the_engine() -> None:
    device = runner()
    config, _ = calibrate(device, auto(), ignore_progress, device.clock)
    engine = Engine(device, config, device.clock)
    assert engine._scheduler.pool.num_free == device.num_blocks
    engine._scheduler.check_integrity()

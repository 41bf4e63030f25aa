"""The benchmark of long prompts beside streams measures what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.serving.long_prompts import FIGURES, Load, draw, measure

from engine.server.serving import serving

STEP_SECONDS = 0.02


@pytest.mark.slow
def test_gaps_and_first_tokens_are_those_of_the_servers_steps(tmp_path: Path) -> None:
    environment = {"SCRIPT_STEP_SECONDS": str(STEP_SECONDS), "SCRIPT_BLOCKS": "512"}
    options = ("--max-model-length", "4096", "--token-budget", "100")
    load = Load(3, 1, 1000, 0.5)
    for _ in range(10):  # a machine that stops the server or the client for seconds spoils an attempt
        with serving(tmp_path, *options, environment=environment) as server:
            server.wait_status("/ready", 200)
            measured = measure(f"http://127.0.0.1:{server.port}", None, load, seed=0)
            tokens = server.metric("fastgen_prompt_tokens_total")
        found = measured.figures
        if max(found["before p99 ms"], found["during p99 ms"], found["last long prompt s"] * 1000 / 4) <= 1000:
            break
    assert list(found) == list(FIGURES)
    for phase in ("before", "during"):
        assert STEP_SECONDS * 1000 <= found[f"{phase} p50 ms"] <= found[f"{phase} p99 ms"] <= 1000
    assert found["during p99 ms"] <= found["during max ms"]
    # The long prompt takes all of the budget that three decodes leave.
    least = (tokens - 300) // 97 * STEP_SECONDS
    assert least <= found["first long prompt s"] == found["last long prompt s"] <= 20 * least
    assert measured.computed >= found["last long prompt s"]
    during = [gap for at, gap in measured.gaps if 0 < at <= measured.computed]
    assert max(during) == pytest.approx(found["during max ms"])
    draw({"one": measured}, load, tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_a_stream_that_ends_early_fails_with_the_reason(tmp_path: Path) -> None:
    with serving(tmp_path, "--max-model-length", "1024") as server:
        server.wait_status("/ready", 200)
        with pytest.raises(RuntimeError, match="max_tokens"):
            measure(f"http://127.0.0.1:{server.port}", None, Load(2, 1, 10, 0.1), seed=0)

"""The scorecard of engines: tables from recorded results, and contenders that are missing or fail."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from benchmarks.serving import compare, contenders, scorecard
from benchmarks.serving.contenders import Outcome, in_turn, medians, ratios

from fastgen.api_client.metrics import Interval, Scrape
from support.pages import ROOT

PAGE = ROOT / "docs" / "benchmarks" / "cpu.md"
# What `fastgen bench --json` prints, as far as it is read.
RESULT = {
    "failed": 0,
    "total_tokens_per_second": 100.0,
    "time_to_first_token_ms": {"mean": 60.0, "p50": 50.0, "p95": 90.0},
    "inter_token_latency_ms": {"p50": 10.0, "p99": 20.0, "max": 30.0},
}


@pytest.fixture(autouse=True)
def _without_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "REST_SECONDS", 0)


def command(tmp_path: Path, name: str, code: str) -> dict[str, str]:
    """Return a contender that runs a Python file."""
    file = tmp_path / f"{name}.py"
    file.write_text(code)
    return {"run": f"{sys.executable} {file}", "version": f"{sys.executable} -c print(7)"}


def test_medians_and_ratios_are_those_of_the_rounds() -> None:
    outcomes = {"a": Outcome([{"x": 4.0}, {"x": 9.0}, {"x": 8.0}]), "b": Outcome([{"x": 2.0}, {"x": 3.0}, {"x": 8.0}])}
    assert medians(outcomes, ["x"]).splitlines()[2:] == ["| a | 8 |", "| b | 3 |"]
    assert ratios(outcomes, [("a", "b")], ["x"]).splitlines()[2:] == ["| a : b | 2.00 (1.00 to 3.00) |"]


def test_a_contender_that_is_missing_or_fails_is_a_row_with_the_reason(tmp_path: Path) -> None:
    given = {
        "good": command(tmp_path, "good", f"print({json.dumps(json.dumps(RESULT))})"),
        "missing": {"run": "there/is/none --json"},
        "unset": {"run": "$FASTGEN_NO_SUCH_VARIABLE/none"},
        "failing": command(tmp_path, "failing", "raise SystemExit(3)"),
        "refusing": command(tmp_path, "refusing", f"print({json.dumps(json.dumps({**RESULT, 'failed': 2}))})"),
        "no server": {
            **command(tmp_path, "no", ""),
            "server": f"{sys.executable} -c exit(5)",
            "ready": "http://[::1]:9",
        },
    }
    outcomes = in_turn(given, 2, lambda _name, contender, seed: compare.measure(contender, [], seed))
    assert [found["tokens/s"] for found in outcomes["good"].rounds] == [100.0, 100.0]
    reasons = {name: outcome.reason for name, outcome in outcomes.items() if not outcome.rounds}
    assert reasons == {
        "missing": "not present: none: No such file or directory",
        "unset": "not present: a variable of the environment is not set: $FASTGEN_NO_SUCH_VARIABLE/none",
        "failing": "its command ended with code 3",
        "refusing": "2 of its requests failed",
        "no server": "the server exited with code 5",
    }
    rows = medians(outcomes, compare.FIGURES).splitlines()[2:]
    assert len(rows) == len(given)
    assert f"| missing: {reasons['missing']} |" + " – |" * len(compare.FIGURES) in rows
    assert "missing" not in ratios(outcomes, [("good", "missing")], compare.FIGURES)


def test_the_order_alternates_from_round_to_round() -> None:
    seen: list[tuple[str, int]] = []

    def measure(name: str, _contender: object, number: int) -> dict[str, float]:
        seen.append((name, number))
        return {"x": 1.0}

    in_turn({"a": {}, "b": {}}, 3, measure)
    assert seen == [("a", 0), ("b", 0), ("b", 1), ("a", 1), ("a", 2), ("b", 2)]


def test_memory_and_processor_time_are_those_of_all_processes_of_the_session() -> None:
    assert contenders.resident_bytes(os.getsid(0)) > 1 << 20
    assert contenders.processor_seconds(os.getsid(0)) > 0
    assert contenders.resident_bytes(1 << 30) == contenders.processor_seconds(1 << 30) == 0


def test_the_time_to_a_first_token_is_divided_without_the_warm_up() -> None:
    def scrape(first: tuple[int, float], queued: tuple[int, float]) -> Scrape:
        names = ("time_to_first_token_seconds", "request_queue_seconds")
        lines = [
            f"fastgen_{name}_{kind} {value}"
            for name, values in zip(names, (first, queued), strict=True)
            for kind, value in zip(("count", "sum"), values, strict=True)
        ]
        return Scrape.parse("".join(f"{line}\n" for line in lines), 0.0)

    during = Interval(scrape((1, 0.5), (1, 0.25)), scrape((3, 4.5), (3, 1.25)))
    parts = compare.first_token_parts(during, 2100.0)
    assert list(parts.values()) == pytest.approx([500.0, 1500.0, 100.0, 2100.0])


def test_a_section_is_recorded_and_shown(tmp_path: Path) -> None:
    good = command(tmp_path, "good", f"print({json.dumps(json.dumps(RESULT))})")
    section = {
        **{"title": "Two", "text": "Load.", "flags": "--requests 1", "rounds": 1, "ratios": [["one", "other"]]},
        "contenders": {"one": good, "other": good, "none": {"run": "no/such"}},
    }
    recorded = {"two": json.loads(json.dumps(scorecard.measure_section(section, None)))}
    page = tmp_path / "page.md"
    page.write_text(f"before\n{scorecard.BEGIN}\nold\n{scorecard.END}\nafter\n")
    scorecard.write_page(page, recorded)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| one : other | 1.00 |" in text
    assert "| none: not present: such: No such file or directory |" in text
    assert f"| one | 7 | `{good['run']}` |" in text
    assert scorecard.machine() in text
    assert "| memory MiB |" in text
    recorded["two"]["figures"] = ["tokens/s"]
    scorecard.write_page(page, recorded)
    assert "| | tokens/s |\n" in page.read_text()
    assert "| memory MiB |" not in page.read_text()


def test_the_page_shows_the_recorded_results(tmp_path: Path) -> None:
    """Figures are changed by measuring, not by hand."""
    page = tmp_path / "cpu.md"
    page.write_text(PAGE.read_text())
    recorded = json.loads(PAGE.with_suffix(".json").read_text())
    scorecard.write_page(page, recorded)
    assert page.read_text() == PAGE.read_text()
    assert page.read_text().count(scorecard.BEGIN) == 1

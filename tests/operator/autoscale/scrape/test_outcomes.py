"""What an engine counts of requests, as read from its metrics."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import fastgen.server
from fastgen.core.request import FinishReason
from fastgen.server.serving.metrics import Metrics
from fastgen_operator.autoscale.scrape import outcomes as module
from fastgen_operator.autoscale.scrape.exposition import UnusableError
from fastgen_operator.autoscale.scrape.outcomes import OUTCOMES_QUERY, parse_outcomes
from fastgen_operator.canary.outcomes import Outcomes

SERVER = Path(fastgen.server.__file__).parent
NAMES = re.findall(r"name\[\]=(\w+)", OUTCOMES_QUERY)


def exposition(metrics: Metrics) -> str:
    return metrics.expose("", 0, NAMES)[0].decode()


def test_the_metrics_of_an_engine_are_read() -> None:
    metrics = Metrics("tiny")
    for seconds in (0.1, 0.3):
        metrics.first_token(seconds, 10)
        metrics.finished(FinishReason.STOP, 1.0, 10, 5)
        metrics.inter_token_latency.observe(0.02)
    metrics.finished(FinishReason.OUT_OF_MEMORY, 1.0, 10, 0)
    metrics.count_rejected("internal_error")
    metrics.count_rejected("invalid_value")
    found = parse_outcomes(exposition(metrics), "tiny", 0.0)
    assert found == Outcomes(
        requests=4.0, errors=2.0, first_tokens=2.0, first_token_seconds=0.4, gaps=2.0, gap_seconds=0.04
    )


def test_only_what_is_needed_is_asked_for() -> None:
    families = text_string_to_metric_families(exposition(Metrics("tiny")))
    assert {sample.name for family in families for sample in family.samples} <= set(NAMES)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "NotMetrics"),
        (exposition(Metrics("other")), "OtherModel"),
        (exposition(Metrics("tiny")).replace("latency_seconds_sum", "latency_seconds_other"), "Incomplete"),
        (re.sub(r"(latency_seconds_sum\S*) .*", r"\1 NaN", exposition(Metrics("tiny"))), "BadValue"),
    ],
)
def test_other_text_is_unusable(text: str, reason: str) -> None:
    with pytest.raises(UnusableError) as caught:
        parse_outcomes(text, "tiny", 0.0)
    assert caught.value.reason == reason


def test_the_codes_and_finish_reasons_are_those_of_engines() -> None:
    codes = {code for path in SERVER.rglob("*.py") for code in re.findall(r'code="(\w+)"', path.read_text())}
    assert codes >= module.FAULTS
    assert {reason.value for reason in FinishReason} >= module.FAILED

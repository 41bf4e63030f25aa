"""The page about routings has the published figures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.autoscaling.pool import Store
from benchmarks.autoscaling.routing.comparison import FLEETS, ROUTINGS, SKIPPED, Comparison, tables

BENCHMARKS = Path(__file__).parents[3] / "docs/benchmarks"


def test_the_page_has_the_tables_of_the_published_runs() -> None:
    store = Store(BENCHMARKS / "autoscaling/routing.json", Comparison(seconds=600.0, seeds=5).settings)
    store.load()
    seeds = Counter((where, routing) for where, routing, _ in store.runs)
    assert len(seeds) == (len(FLEETS) * 3 - len(SKIPPED)) * len(ROUTINGS)
    assert set(seeds.values()) == {5}
    page = (BENCHMARKS / "routing.md").read_text()
    for line in "\n".join(tables(store)).splitlines():
        assert line in page.splitlines(), "copy the tables that `python -m benchmarks.autoscaling.routing` prints"

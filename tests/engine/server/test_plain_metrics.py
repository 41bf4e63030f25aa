"""Metrics for every token look like the library's."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from fastgen.server.serving.plain_metrics import PlainCounter, PlainHistogram

BUCKETS = (0.001, 0.0025, 1, 10)
VALUES = (0.0, 0.001, 0.00100001, 0.5, 1.0, 10.0, 10.5)


def test_plain_metrics_are_exposed_as_the_librarys() -> None:
    disable_created_metrics()  # type: ignore[no-untyped-call]
    plain, library = CollectorRegistry(), CollectorRegistry()
    plain.register(counter := PlainCounter("c", "Counts.", {"model_name": "m"}))
    plain.register(histogram := PlainHistogram("h", "Measures.", {"model_name": "m"}, BUCKETS))
    its_counter = Counter("c", "Counts.", ["model_name"], registry=library).labels("m")
    its_histogram = Histogram("h", "Measures.", ["model_name"], registry=library, buckets=BUCKETS).labels("m")
    for value in VALUES:
        for each in (counter, its_counter):
            each.inc(value)
        for other in (histogram, its_histogram):
            other.observe(value)
    assert generate_latest(plain) == generate_latest(library)
    assert generate_openmetrics(plain) == generate_openmetrics(library)
    for name in ("h_count", "c_total"):
        only, librarys = plain.restricted_registry([name]), library.restricted_registry([name])
        assert generate_latest(only) == generate_latest(librarys)

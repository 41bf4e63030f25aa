"""Metrics that one thread updates for every token: without a lock and a loop over buckets for each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class PlainCounter(Collector):
    """A counter, as the library's `Counter` shows it.

    Args:
        name: without `_total`.
        help_text: what it counts.
        labels: of its only series.
    """

    def __init__(self, name: str, help_text: str, labels: dict[str, str]) -> None:
        self._name, self._help, self._labels = name, help_text, labels
        self._value = 0.0

    def inc(self, amount: float) -> None:
        """Add to the counter."""
        self._value += amount

    def describe(self) -> Iterable[Metric]:
        """Return the family without samples: the registry must know its names."""
        return [CounterMetricFamily(self._name, self._help)]

    def collect(self) -> Iterator[Metric]:
        """Yield the family."""
        family = CounterMetricFamily(self._name, self._help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self._value)
        yield family


class PlainHistogram(Collector):
    """A histogram, as the library's `Histogram` shows it.

    Args:
        name: its name.
        help_text: what it measures.
        labels: of its only series.
        buckets: upper bounds, ascending; one more bucket has no bound.
    """

    def __init__(self, name: str, help_text: str, labels: dict[str, str], buckets: Sequence[float]) -> None:
        self._name, self._help, self._labels = name, help_text, labels
        self._bounds = tuple(buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value in the first bucket whose bound it does not exceed."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> Iterable[Metric]:
        """Return the family without samples: the registry must know its names."""
        return [HistogramMetricFamily(self._name, self._help)]

    def collect(self) -> Iterator[Metric]:
        """Yield the family; the counts of its buckets are cumulative."""
        bounds = map(floatToGoString, (*self._bounds, float("inf")))
        family = HistogramMetricFamily(self._name, self._help, labels=list(self._labels))
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family

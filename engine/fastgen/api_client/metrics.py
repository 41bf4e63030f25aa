"""A server's /metrics, parsed, and the difference between two scrapes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

_PREFIX = "fastgen_"


@dataclass(frozen=True, slots=True)
class Scrape:
    """One scrape: samples by name without the prefix `fastgen_`, summed over their labels.

    Attributes:
        seconds: time of the scrape on the caller's clock.
        model_name: the served model name.
        values: values by sample name, without histogram buckets.
        by_label: values by sample name and the value of each label except `model_name`, without histogram buckets.
        buckets: (upper bound, count at or below it) pairs of each histogram, ascending.
    """

    seconds: float
    model_name: str
    values: Mapping[str, float]
    by_label: Mapping[tuple[str, str], float]
    buckets: Mapping[str, tuple[tuple[float, float], ...]]

    @classmethod
    def parse(cls, text: str, seconds: float) -> Scrape:
        """Parse Prometheus' text format.

        Raises:
            ValueError: if it is not in that format.
        """
        values: dict[str, float] = {}
        by_label: dict[tuple[str, str], float] = {}
        buckets: dict[str, dict[float, float]] = {}
        model_name = ""
        for family in _families(text):
            for sample in family.samples:
                if not sample.name.startswith(_PREFIX):
                    continue
                name = sample.name.removeprefix(_PREFIX)
                model_name = sample.labels.get("model_name", model_name)
                if "le" in sample.labels:
                    counts = buckets.setdefault(name.removesuffix("_bucket"), {})
                    bound = float(sample.labels["le"])
                    counts[bound] = counts.get(bound, 0.0) + sample.value
                    continue
                values[name] = values.get(name, 0.0) + sample.value
                for label, word in sample.labels.items():
                    if label != "model_name":
                        by_label[name, word] = by_label.get((name, word), 0.0) + sample.value
        return cls(
            seconds, model_name, values, by_label, {name: tuple(sorted(of.items())) for name, of in buckets.items()}
        )

    def value(self, name: str) -> float:
        """Return the value of a gauge or counter; 0 if the server has none of that name."""
        return self.values.get(name, 0.0)


def _families(text: str) -> Iterator[Metric]:
    try:
        yield from text_string_to_metric_families(text)
    except (ValueError, IndexError) as error:  # the parser reads beyond the end of some labels
        raise ValueError("the response is not in Prometheus' text format") from error


@dataclass(frozen=True, slots=True)
class Interval:
    """The difference between two scrapes."""

    before: Scrape
    after: Scrape

    @classmethod
    def sum_of(cls, intervals: Sequence[Interval]) -> Interval:
        """Return the interval of several servers as one: gauges, growths and histograms are summed.

        A server that restarted counts from zero, as in `growth`. Requires at least one interval.
        """
        seconds = sum(each.seconds for each in intervals) / len(intervals)
        names = {name for each in intervals for name in each.after.values}
        labels = {label for each in intervals for label in each.after.by_label}
        histograms = {name for each in intervals for name in each.after.buckets}
        after = Scrape(
            seconds,
            intervals[0].after.model_name,
            {name: sum(each.after.value(name) for each in intervals) for name in names},
            {label: sum(each.after.by_label.get(label, 0.0) for each in intervals) for label in labels},
            {name: _added(*(each.after.buckets.get(name, ()) for each in intervals)) for name in histograms},
        )
        grown = {name: _added(*(tuple(each._bucket_growth(name)) for each in intervals)) for name in histograms}
        before = Scrape(
            0.0,
            after.model_name,
            {name: after.value(name) - sum(each.growth(name) for each in intervals) for name in names},
            {label: after.by_label[label] - sum(each.growth(*label) for each in intervals) for label in labels},
            {name: _added(after.buckets[name], tuple((b, -count) for b, count in grown[name])) for name in histograms},
        )
        return cls(before, after)

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.after.seconds - self.before.seconds

    def rate(self, name: str, label: str | None = None) -> float:
        """Return a counter's growth per second; see `growth`."""
        return self.growth(name, label) / self.seconds if self.seconds > 0 else 0.0

    def growth(self, name: str, label: str | None = None) -> float:
        """Return a counter's growth, of all its series or of those with this value of a label.

        A counter that fell was reset by a restart and counts from zero.
        """
        if label is None:
            before, after = self.before.value(name), self.after.value(name)
        else:
            before, after = (scrape.by_label.get((name, label), 0.0) for scrape in (self.before, self.after))
        return after - before if after >= before else after

    def quantile(self, histogram: str, share: float) -> float:
        """Estimate a quantile (0 to 1) of a histogram's observations; NaN without any.

        Interpolates linearly within a bucket, as PromQL's histogram_quantile does.
        """
        counts = self._bucket_growth(histogram)
        if not counts or counts[-1][1] <= 0:
            return math.nan
        wanted = share * counts[-1][1]
        lower, below = 0.0, 0.0
        for bound, count in counts:
            if count >= wanted and count > below:
                if math.isinf(bound):
                    return lower
                return lower + (bound - lower) * (wanted - below) / (count - below)
            lower, below = bound, count
        return lower

    def _bucket_growth(self, histogram: str) -> list[tuple[float, float]]:
        before = dict(self.before.buckets.get(histogram, ()))
        after = self.after.buckets.get(histogram, ())
        grown = [(bound, count - before.get(bound, 0.0)) for bound, count in after]
        return list(after) if any(count < 0 for _, count in grown) else grown


def _added(*histograms: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    """Return the sum of cumulative counts by bound, ascending."""
    counts: dict[float, float] = {}
    for bound, count in (each for histogram in histograms for each in histogram):
        counts[bound] = counts.get(bound, 0.0) + count
    return tuple(sorted(counts.items()))

"""Parse and validate a replica's metrics in the Prometheus text format."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Final, Literal

from prometheus_client.parser import text_string_to_metric_families

from fastgen_operator.autoscale.sample import SAMPLE_METRICS, Metric, Sample, StepCoefficients

# Why a scrape failed; a label of the counter of failed scrapes.
UnusableReason = Literal[
    "Unreachable",
    "TimedOut",
    "BadStatus",
    "TooLarge",
    "NotMetrics",
    "Incomplete",
    "OtherModel",
    "BadValue",
    "NotDemand",
]

# No counter of tokens or requests gets near this.
_LARGEST: Final = 1e15
_LARGEST_RATIO: Final = 1 + 1e-6
# A smaller number, as a fit of step times may report, counts as 0: dividing by it could overflow.
_SMALLEST: Final = 1e-15
_PREFIX: Final = "fastgen_"
# Bounds of what is parsed. prometheus_client's parser takes time that grows with the square of a line's length. An
# engine's lines have 120 characters and the model's name.
_LONGEST_LINE: Final = 2048
_MOST_CHARACTERS: Final = 1 << 14

_COEFFICIENTS: Final = tuple(("step_model", name) for name in StepCoefficients._fields)
_METRICS: Final = (*SAMPLE_METRICS, *_COEFFICIENTS)
# Engines before this coefficient do not have it.
_OPTIONAL: Final = frozenset({("step_model", "context_pair")})
_REQUIRED: Final = frozenset(_METRICS) - _OPTIONAL
_NAMES: Final = frozenset(_PREFIX + name for name, _ in _METRICS)
# Requests only these metrics. Engines that do not know the parameter return all.
QUERY: Final = "&".join(f"name[]={name}" for name in sorted(_NAMES))
# The label besides model_name, for metrics that have one. Its value is part of the key.
_LABELS: Final = {"scheduled_tokens_total": "phase", "step_model": "coefficient"}


class UnusableError(Exception):
    """A scrape failed; `reason` is the label under which it is counted."""

    def __init__(self, reason: UnusableReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def parse_sample(text: str, model_name: str, time: float) -> Sample:
    """Return the sample of a scrape at a monotonic time.

    Raises:
        UnusableError: these are not an engine's metrics, they are incomplete, too large or of another model, or a
            value is impossible.
    """
    values = _usual_values(text, model_name) or _values(text, model_name)
    values = checked(values)
    fields = {field: values[key] for key, field in SAMPLE_METRICS.items()}
    coefficients = StepCoefficients(*(values.get(key, 0.0) for key in _COEFFICIENTS))
    return Sample(time=time, step_model=coefficients, **fields)


def checked(values: Mapping[Metric, float]) -> dict[Metric, float]:
    """Return the values, with zero for the smallest ones; raise UnusableError if one is impossible."""
    for (name, _), value in values.items():
        if not 0 <= value < (_LARGEST_RATIO if name.endswith("_ratio") else _LARGEST):
            raise UnusableError("BadValue", f"{_PREFIX}{name} is {value}")
    return {key: value if value >= _SMALLEST else 0.0 for key, value in values.items()}


def _usual_values(text: str, model_name: str) -> dict[Metric, float] | None:
    """Return the same as `_values`, ten times as fast; None if lines are not as engines write them."""
    keys = _usual_heads(model_name)
    values: dict[Metric, float] = {}
    try:
        for line in text.split("\n"):
            if line.startswith(_PREFIX):
                head, _, number = line.rpartition(" ")
                if (key := keys.get(head)) is not None:
                    values[key] = float(number)
    except ValueError:
        return None
    return values if values.keys() >= _REQUIRED else None


@lru_cache(maxsize=10_000)
def _usual_heads(model_name: str) -> dict[str, Metric]:
    """Return the metrics by their lines without the value, as engines write them for model names without escapes."""
    heads = {}
    for name, value in _METRICS:
        labels = {"model_name": model_name} | ({_LABELS[name]: value} if value else {})
        written = ",".join(f'{label}="{text}"' for label, text in sorted(labels.items()))
        heads[f"{_PREFIX}{name}{{{written}}}"] = (name, value)
    return heads


def _values(text: str, model_name: str) -> dict[Metric, float]:
    """Return all values, parsed by prometheus_client. Raises as `parse_sample` does."""
    values = parse_values(text, model_name, _NAMES)
    for key in _METRICS:
        if key not in values and key not in _OPTIONAL:
            raise UnusableError("Incomplete", f"metric {_PREFIX}{key[0]} is missing")
    return values


def parse_values(text: str, model_name: str, names: Collection[str]) -> dict[Metric, float]:
    """Return the values of metrics that have at most one label besides model_name.

    Args:
        names: of the metrics, with the prefix.

    Raises:
        UnusableError: these are not an engine's metrics, or they are too large or of another model.
    """
    lines = [line for line in text.split("\n") if line.partition("{")[0] in names]
    if not lines:
        raise UnusableError("NotMetrics", "the response contains no engine metrics")
    if (longest := max(map(len, lines))) > _LONGEST_LINE:
        raise UnusableError("TooLarge", f"a line has {longest} characters, more than {_LONGEST_LINE}")
    if (size := sum(map(len, lines))) > _MOST_CHARACTERS:
        raise UnusableError("TooLarge", f"the engine's metrics have {size} characters, more than {_MOST_CHARACTERS}")
    values: dict[Metric, float] = {}
    for line in lines:
        try:
            ((sample,),) = (family.samples for family in text_string_to_metric_families(line + "\n"))
        except (ValueError, KeyError, IndexError) as error:
            raise UnusableError("NotMetrics", f"the response is not in the Prometheus text format: {error}") from None
        if sample.timestamp is not None:
            raise UnusableError("NotMetrics", f"{sample.name} has a timestamp")
        labels = dict(sample.labels)
        model = labels.pop("model_name", "")
        if model != model_name:
            raise UnusableError("OtherModel", f"the replica serves model {model!r}, not {model_name!r}")
        values[sample.name.removeprefix(_PREFIX), "".join(labels.values())] = sample.value
    return values

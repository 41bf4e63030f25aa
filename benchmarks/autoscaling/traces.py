"""Synthetic request traces, generated from a seed and published statistics; no trace data is included."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.autoscaling.replica import Arrival

# Warm-up in seconds at the initial load of each trace. Its requests are not counted.
WARM_UP = 420.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lognormal token counts by median and mean, clamped to 1 to `most`."""

    median: float
    mean: float
    most: int

    def draw(self, rng: random.Random) -> int:
        """Draw a value."""
        deviation = math.sqrt(2 * math.log(self.mean / self.median))
        return min(self.most, max(1, round(rng.lognormvariate(math.log(self.median), deviation))))


@dataclass(frozen=True, slots=True)
class Mix:
    """Token counts of one service's requests."""

    prompt: Lengths | Zipf
    generate: Lengths | Zipf


@dataclass(frozen=True, slots=True)
class Zipf:
    """Zipf-distributed token counts: k has a probability proportional to 1 / k ** exponent, up to `most`."""

    exponent: float
    most: int

    def draw(self, rng: random.Random) -> int:
        """Draw a value by inverting the continuous distribution."""
        power = 1 - self.exponent
        top = (self.most + 1) ** power
        return min(self.most, int((1 + rng.random() * (top - 1)) ** (1 / power)))


# Medians and means of the tokens of Azure's LLM inference trace of 2023 (Patel et al., Splitwise, ISCA 2024;
# Azure/AzurePublicDataset): the conversation service has 19,366 requests in 58 minutes, the code service 8,819 in 57.
AZURE_CONVERSATION = Mix(Lengths(1020, 1155, 14_050), Lengths(129, 211, 1000))
AZURE_CODE = Mix(Lengths(1469, 2048, 7437), Lengths(13, 28, 1899))
# Defaults of BurstGPT's generator (Wang et al., 2024; HPMLL/BurstGPT): Zipf of 1.1 for both.
BURST_GPT = Mix(Zipf(1.1, 1023), Zipf(1.1, 1023))


@dataclass(frozen=True, slots=True)
class Trace:
    """A load on a fleet.

    Attributes:
        seconds: duration of the trace, `WARM_UP` included.
        what: description for the report.
        make: returns the requests for a seed, sorted by time.
    """

    name: str
    what: str
    seconds: float
    mix: Mix
    make: Callable[[int], Iterator[Arrival]]

    def arrivals(self, seed: int) -> Sequence[Arrival]:
        """Return all arrivals; deterministic for a seed. The latest ones are kept for the next policy."""
        return _arrivals(self.make, seed)


@lru_cache(maxsize=1)
def _arrivals(make: Callable[[int], Iterator[Arrival]], seed: int) -> tuple[Arrival, ...]:
    return tuple(make(seed))


Rate = Callable[[float], float]


def varying(mix: Mix, seconds: float, rate: Rate, highest: float) -> Callable[[int], Iterator[Arrival]]:
    """A Poisson process with a varying rate per second, by thinning one of rate `highest` (Lewis and Shedler)."""

    def make(seed: int) -> Iterator[Arrival]:
        rng = random.Random(seed)
        now = rng.expovariate(highest)
        while now < seconds:
            if rng.random() * highest < rate(max(0.0, now - WARM_UP)):
                yield Arrival(now, mix.prompt.draw(rng), mix.generate.draw(rng))
            now += rng.expovariate(highest)

    return make


def bursts(
    mix: Mix, seconds: float, calm: float, busy: float, stay: tuple[float, float]
) -> Callable[[int], Iterator[Arrival]]:
    """A Markov-modulated Poisson process with two rates and exponential dwell times of mean `stay` (calm, busy)."""

    def make(seed: int) -> Iterator[Arrival]:
        rng = random.Random(seed)
        now, rate, other = 0.0, calm, busy
        means = stay
        change = WARM_UP + rng.expovariate(1 / means[0])
        while now < seconds:
            gap = rng.expovariate(rate)
            if now + gap >= change:
                now, rate, other, means = change, other, rate, (means[1], means[0])
                change = now + rng.expovariate(1 / means[0])
                continue
            now += gap
            if now < seconds:
                yield Arrival(now, mix.prompt.draw(rng), mix.generate.draw(rng))

    return make


def minutes(
    mix: Mix, seconds: float, mean: float, variation: float, gap_shape: float
) -> Callable[[int], Iterator[Arrival]]:
    """Gamma gaps of `gap_shape` (1 is Poisson) whose rate is redrawn every minute.

    The rates are gamma distributed about `mean` requests a second, with the coefficient of variation `variation`.
    """

    def make(seed: int) -> Iterator[Arrival]:
        rng = random.Random(seed)
        shape = 1 / variation**2
        start = 0.0
        while start < seconds:
            rate = mean if start < WARM_UP else rng.gammavariate(shape, mean / shape)
            length = WARM_UP if start < WARM_UP else 60.0
            now = start
            while rate > 1e-6 and (now := now + rng.gammavariate(gap_shape, 1 / (rate * gap_shape))) < start + length:
                yield Arrival(now, mix.prompt.draw(rng), mix.generate.draw(rng))
            start += length

    return make


def day(low: float, high: float, length: float) -> Rate:
    """Return a cosine-shaped rate from `low` at the start to `high` in the middle."""
    return lambda time: low + (high - low) * (1 - math.cos(2 * math.pi * time / length)) / 2


def step(low: float, high: float, begin: float, end: float) -> Rate:
    """Return a rate that is `high` between two times, and `low` before and after."""
    return lambda time: high if begin <= time < end else low


def hump(low: float, high: float, length: float) -> Rate:
    """Return a rate like the drift of Azure's conversation trace: rising for half of its hour, then falling."""
    return lambda time: low + (high - low) * math.sin(math.pi * min(1.0, time / length)) ** 2


def traces(scale: float, seconds: float) -> tuple[Trace, ...]:
    """Return all traces, `seconds` long plus the warm-up, for a fleet of about `scale` times 4 replicas."""
    whole, conversation = WARM_UP + seconds, AZURE_CONVERSATION
    return (
        Trace(
            "poisson", "constant rate, lengths of Azure's conversation trace", whole, conversation,
            varying(conversation, whole, lambda _: 16 * scale, 16 * scale),
        ),
        Trace(
            "step", "a sudden fourfold load for a third of the time", whole, conversation,
            varying(conversation, whole, step(6 * scale, 24 * scale, seconds / 6, seconds / 2), 24 * scale),
        ),
        Trace(
            "day", "a compressed daily cycle: a cosine between one and six", whole, conversation,
            varying(conversation, whole, day(4 * scale, 24 * scale, seconds), 24 * scale),
        ),
        Trace(
            "bursts", "Markov-modulated Poisson: rates one and four, for 4 and 2 minutes on average", whole,
            conversation, bursts(conversation, whole, 6 * scale, 24 * scale, (240.0, 120.0)),
        ),
        Trace(
            "azure-conversation", "the rate drift of Azure's conversation trace: 191 to 507 requests per minute", whole,
            conversation, varying(conversation, whole, hump(9 * scale, 24 * scale, seconds), 24 * scale),
        ),
        Trace(
            "azure-code", "long prompts, short outputs; rates per minute vary by 1.04 of their mean", whole,
            AZURE_CODE, minutes(AZURE_CODE, whole, 8 * scale, 1.04, 1.0),
        ),
        Trace(
            "burstgpt", "BurstGPT's generator: gamma gaps of shape 0.5, Zipf lengths; rates per minute vary by 0.5",
            whole, BURST_GPT, minutes(BURST_GPT, whole, 100 * scale, 0.5, 0.5),
        ),
    )  # fmt: skip

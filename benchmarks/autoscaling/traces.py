"""Requests that come: when, and how long. Made from a seed and from published figures; no trace's data is in here."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.autoscaling.replica import Arrival

# Every trace begins with this many seconds of the load that it starts from, which are not counted.
WARM_UP = 420.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of a request: lognormal, by median and mean, between 1 and `most`."""

    median: float
    mean: float
    most: int

    def draw(self, rng: random.Random) -> int:
        """One."""
        deviation = math.sqrt(2 * math.log(self.mean / self.median))
        return min(self.most, max(1, round(rng.lognormvariate(math.log(self.median), deviation))))


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests of one service."""

    prompt: Lengths | Zipf
    generate: Lengths | Zipf


@dataclass(frozen=True, slots=True)
class Zipf:
    """Tokens by Zipf's law: k is drawn with a chance of 1 / k ** exponent, up to `most`."""

    exponent: float
    most: int

    def draw(self, rng: random.Random) -> int:
        """One, by inverting the continuous law."""
        power = 1 - self.exponent
        top = (self.most + 1) ** power
        return min(self.most, int((1 + rng.random() * (top - 1)) ** (1 / power)))


# Medians and means of the tokens of Azure's LLM inference trace of 2023 (Patel et al., Splitwise, ISCA 2024;
# Azure/AzurePublicDataset): the conversation service has 19,366 requests in 58 minutes, the code service 8,819 in 57.
AZURE_CONVERSATION = Mix(Lengths(1020, 1155, 14_050), Lengths(129, 211, 1000))
AZURE_CODE = Mix(Lengths(1469, 2048, 7437), Lengths(13, 28, 1899))
# What BurstGPT's generator draws unless told otherwise (Wang et al., 2024; HPMLL/BurstGPT): Zipf of 1.1 for both.
BURST_GPT = Mix(Zipf(1.1, 1023), Zipf(1.1, 1023))


@dataclass(frozen=True, slots=True)
class Trace:
    """A load on a fleet.

    Attributes:
        seconds: how long requests come, `WARM_UP` included.
        peak: replicas of the device it was made for that its highest minute needs; at the start it needs `start`.
        make: the requests of a seed, by time.
    """

    name: str
    what: str
    seconds: float
    mix: Mix
    make: Callable[[int], Iterator[Arrival]]

    def arrivals(self, seed: int) -> list[Arrival]:
        """All of them, the same for the same seed."""
        return list(self.make(seed))


Rate = Callable[[float], float]


def varying(mix: Mix, seconds: float, rate: Rate, highest: float) -> Callable[[int], Iterator[Arrival]]:
    """A Poisson process whose rate, requests a second, changes: thinned from one of `highest` (Lewis and Shedler)."""

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
    """A Markov-modulated Poisson process: two rates, each kept for an exponential time of mean `stay` (calm, busy)."""

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
    """Gamma gaps of `gap_shape` (1 is Poisson) whose rate is drawn anew every minute.

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
    """A cosine from `low` at its start to `high` in its middle."""
    return lambda time: low + (high - low) * (1 - math.cos(2 * math.pi * time / length)) / 2


def step(low: float, high: float, begin: float, end: float) -> Rate:
    """`high` between two times, `low` before and after."""
    return lambda time: high if begin <= time < end else low


def hump(low: float, high: float, length: float) -> Rate:
    """The drift of Azure's conversation trace: up for half of its hour and down again, low at the ends."""
    return lambda time: low + (high - low) * math.sin(math.pi * min(1.0, time / length)) ** 2


def traces(scale: float, seconds: float) -> tuple[Trace, ...]:
    """All of them, `seconds` long beside the warm-up, with rates for a fleet of about `scale` times 4 replicas."""
    whole, conversation = WARM_UP + seconds, AZURE_CONVERSATION
    return (
        Trace(
            "poisson", "steady, Azure conversation's lengths", whole, conversation,
            varying(conversation, whole, lambda _: 16 * scale, 16 * scale),
        ),
        Trace(
            "step", "four times the load at once, for a third of the time", whole, conversation,
            varying(conversation, whole, step(6 * scale, 24 * scale, seconds / 6, seconds / 2), 24 * scale),
        ),
        Trace(
            "day", "a day's cycle, compressed: a cosine of one to six", whole, conversation,
            varying(conversation, whole, day(4 * scale, 24 * scale, seconds), 24 * scale),
        ),
        Trace(
            "bursts", "Markov-modulated: one to four, calm for 4 minutes and busy for 2", whole, conversation,
            bursts(conversation, whole, 6 * scale, 24 * scale, (240.0, 120.0)),
        ),
        Trace(
            "azure-conversation", "the drift of Azure's conversation hour: 191 to 507 requests a minute", whole,
            conversation, varying(conversation, whole, hump(9 * scale, 24 * scale, seconds), 24 * scale),
        ),
        Trace(
            "azure-code", "Azure code: minutes that vary by 1.04 of their mean, long prompts, short answers", whole,
            AZURE_CODE, minutes(AZURE_CODE, whole, 8 * scale, 1.04, 1.0),
        ),
        Trace(
            "burstgpt", "BurstGPT's generator: gamma gaps of shape 0.5 and Zipf lengths; minutes vary by 0.5", whole,
            BURST_GPT, minutes(BURST_GPT, whole, 100 * scale, 0.5, 0.5),
        ),
    )  # fmt: skip

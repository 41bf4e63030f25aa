"""Scrape the metrics of replicas and validate them. `Scraper` returns errors, it does not raise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal, Self

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from yarl import URL

from fastgen_operator.autoscale.observation import Sample
from fastgen_operator.children.metadata import HTTP_PORT

# Why a response is unusable. Failures are counted by it.
Reason = Literal[
    "Unreachable", "TimedOut", "BadStatus", "TooLarge", "NotMetrics", "Incomplete", "OtherModel", "BadValue"
]

# A response is about 30 KiB.
_LIMIT_BYTES: Final = 1 << 20
# Counters of tokens or requests stay far below this.
_LARGEST: Final = 1e15
_PREFIX: Final = "fastgen_"

# (metric, label value) -> field of Sample.
_FIELDS: Final[Mapping[tuple[str, str], str]] = {
    ("arrived_prompt_tokens_total", ""): "arrived_tokens",
    ("rejected_prompt_tokens_total", ""): "rejected_tokens",
    ("cancelled_prompt_tokens_total", ""): "cancelled_tokens",
    ("scheduled_tokens_total", "prefill"): "prefill_tokens",
    ("scheduled_tokens_total", "decode"): "decode_tokens",
    ("prefix_cache_hit_tokens_total", ""): "cached_tokens",
    ("request_prompt_tokens_count", ""): "ended_requests",
    ("request_prompt_tokens_sum", ""): "ended_prompt_tokens",
    ("request_generation_tokens_sum", ""): "ended_generated_tokens",
    ("backlog_prompt_tokens", ""): "backlog_tokens",
    ("num_requests_running", ""): "running",
    ("num_requests_waiting", ""): "waiting",
    ("kv_cache_usage_ratio", ""): "kv_used",
    ("kv_cache_capacity_tokens", ""): "kv_capacity_tokens",
    ("kv_cache_tokens", ""): "kv_tokens",
    ("token_budget", ""): "token_budget",
}
_COEFFICIENTS: Final = tuple(("step_model", name) for name in ("base", "token", "kv_token"))
_NAMES: Final = frozenset(_PREFIX + name for name, _ in (*_FIELDS, *_COEFFICIENTS))
# Asks for these samples alone. What does not know the parameter returns all.
_QUERY: Final = "&".join(f"name[]={name}" for name in sorted(_NAMES))


class UnusableError(Exception):
    """A response is unusable."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Target:
    """A replica to scrape: its pod name, metrics URL, and the model name that its metrics must have."""

    pod: str
    url: str
    model_name: str


def metrics_url(address: str) -> str:
    """Return the metrics URL of the engine in the pod with IP `address`."""
    host = f"[{address}]" if ":" in address else address
    return f"http://{host}:{HTTP_PORT}/metrics"


def parse_sample(text: str, model_name: str, time: float) -> Sample:
    """Parse a response in the Prometheus text format.

    Raises:
        UnusableError: the response is not an engine's metrics, is for another model, or has impossible values.
    """
    values = _values(text, model_name)
    missing = [name for name in (*_FIELDS, *_COEFFICIENTS) if name not in values]
    if missing:
        raise UnusableError("Incomplete", f"metric {_PREFIX}{missing[0][0]} is missing")
    fields = {field: values[key] for key, field in _FIELDS.items()}
    if fields["kv_used"] > 1 + 1e-6:
        raise UnusableError("BadValue", f"{_PREFIX}kv_cache_usage_ratio is {fields['kv_used']}")
    base, token, kv_token = (values[key] for key in _COEFFICIENTS)
    return Sample(time=time, step_model=(base, token, kv_token), **fields)


def _values(text: str, model_name: str) -> dict[tuple[str, str], float]:
    """Return values by (metric, label value). Parses only the required lines: most are histogram buckets."""
    lines = [line for line in text.splitlines() if line.split("{", 1)[0] in _NAMES]
    if not lines:
        raise UnusableError("NotMetrics", "the response contains no engine metrics")
    values: dict[tuple[str, str], float] = {}
    for line in lines:
        head, _, text_of_value = line.rpartition(" ")
        try:
            name, model, label = _parse_head(head)
            value = float(text_of_value)
        except (ValueError, KeyError, IndexError) as error:
            raise UnusableError("NotMetrics", f"the response is not in the Prometheus text format: {error}") from None
        if model != model_name:
            raise UnusableError("OtherModel", f"the replica serves model {model!r}, not {model_name!r}")
        if not 0 <= value < _LARGEST:
            raise UnusableError("BadValue", f"{name} is {value}")
        values[name.removeprefix(_PREFIX), label] = value
    return values


@lru_cache(maxsize=10_000)
def _parse_head(head: str) -> tuple[str, str, str]:
    """Return name, model name and other label of a line without its value.

    Kept, because the replicas of a model send the same heads in each response, and parsing is slow.

    Raises:
        ValueError, KeyError, IndexError: it is not in the Prometheus text format.
    """
    ((sample,),) = (family.samples for family in text_string_to_metric_families(f"{head} 0\n"))
    if sample.value != 0 or sample.timestamp is not None:
        raise ValueError(f"{head} is followed by a timestamp")
    labels = dict(sample.labels)
    return sample.name, labels.pop("model_name", ""), "".join(labels.values())


class Scraper:
    """Scrapes many replicas concurrently; an asynchronous context manager, which closes its connections.

    Connections are kept for the next scrape. One that the engine has closed meanwhile is replaced.

    Args:
        period: scrape interval in seconds. It caps `deadline`, so that a hanging replica does not make others stale.
        concurrency: maximum number of concurrent requests.
        deadline: timeout for one replica in seconds, connecting included.
    """

    def __init__(self, period: float, *, concurrency: int = 100, deadline: float = 2.0) -> None:
        self._concurrency, self._deadline = concurrency, min(deadline, period)
        self._keep_seconds = 3 * period
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self._keep_seconds)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self._deadline),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def scrape(self, targets: Iterable[Target]) -> dict[Target, Sample | UnusableError]:
        """Scrape all targets. Takes at most ceil(targets / concurrency) times the deadline."""
        loop = asyncio.get_running_loop()
        waiting = iter(tuple(targets))
        found: dict[Target, Sample | UnusableError] = {}

        async def work() -> None:
            # All workers share one iterator, so their number limits the concurrency.
            for target in waiting:
                try:
                    text = await self._fetch(target.url)
                    found[target] = parse_sample(text, target.model_name, loop.time())
                except UnusableError as error:
                    found[target] = error

        await asyncio.gather(*(work() for _ in range(self._concurrency)))
        return found

    async def _fetch(self, url: str) -> str:
        assert self._session is not None, "use `async with`"
        try:
            async with self._session.get(_with_query(url), allow_redirects=False) as response:
                if response.status != 200:
                    raise UnusableError("BadStatus", f"HTTP {response.status}")
                body = await _read(response)
        except TimeoutError:
            raise UnusableError("TimedOut", f"no response within {self._deadline:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise UnusableError("Unreachable", str(error) or type(error).__name__) from None
        return body.decode(errors="replace")


@lru_cache(maxsize=20_000)
def _with_query(url: str) -> URL:
    """Return the URL of the samples alone. Kept, because parsing it is a fifth of the cost of a scrape."""
    return URL(f"{url}?{_QUERY}")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for part in response.content.iter_any():
        body += part
        if len(body) > _LIMIT_BYTES:
            raise UnusableError("TooLarge", f"the response exceeds {_LIMIT_BYTES >> 10} KiB")
    return bytes(body)

"""Read engines' metrics through port-forwards; derive load and latency from two scrapes."""

from __future__ import annotations

import http.client
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from socket import SHUT_RDWR, socket
from threading import Event, Timer
from typing import Final

from fastgen.api_client.metrics import Interval, Scrape
from fastgen_operator.objects.container import HTTP_PORT
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plugin.cluster import Cluster, PluginError

# A pod whose metrics take longer, or are larger, is shown without figures: it may send anything, for any time.
_SECONDS: Final = 5.0
_MOST_BYTES: Final = 1 << 20
# prometheus_client's parser takes time that grows with the square of a line's length.
_LONGEST_LINE: Final = 2048
_AT_ONCE: Final = 16


def serving(pods: Sequence[Pod]) -> list[Pod]:
    """Return the ready pods, draining ones included: their engines may answer."""
    return [pod for pod in pods if pod.is_ready]


class MetricsReader:
    """Reads the metrics of pods over keep-alive connections, which are replaced if they fail."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._connections: dict[str, http.client.HTTPConnection] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="metrics")

    def read(self, pods: Sequence[Pod]) -> dict[str, Scrape | PluginError]:
        """Return the metrics of each pod by name, or why there are none."""
        names = [pod.name for pod in pods]
        for gone in self._connections.keys() - {*names}:
            self._connections.pop(gone).close()
        return dict(zip(names, self._threads.map(self._read, pods), strict=True))

    def _read(self, pod: Pod) -> Scrape | PluginError:
        name = pod.name
        for attempt in ("kept", "new"):
            connection = self._connections.pop(name, None)
            if connection is None and attempt == "kept":
                continue
            try:
                if connection is None:
                    connection = self._cluster.connection(pod.namespace, name, HTTP_PORT, _SECONDS)
                answer, body = _get_metrics(connection)
                if answer.status != 200:
                    found = f"{answer.status} {answer.reason}: {' '.join(body.split())[:200]}"
                    return PluginError(f"GET /metrics: {found}")
                if max(map(len, body.split("\n"))) > _LONGEST_LINE:
                    raise ValueError(f"a line has more than {_LONGEST_LINE} characters")
                if connection.sock is not None:  # otherwise the pod ended it, and it would reconnect to this machine
                    self._connections[name] = connection
                return Scrape.parse(body, time.monotonic())
            except PluginError as error:
                if connection is not None:
                    connection.close()
                return error
            except ValueError as error:
                return PluginError(f"GET /metrics: {error}")
            except (OSError, http.client.HTTPException) as error:
                if connection is not None:
                    connection.close()
                failure = PluginError(f"pod {name} does not answer: {error or type(error).__name__}")
        return failure


def _get_metrics(connection: http.client.HTTPConnection) -> tuple[http.client.HTTPResponse, str]:
    """Return the response of a pod, and its body.

    Raises:
        PluginError: the response takes too long or is too large.
        OSError, http.client.HTTPException: the connection fails.
    """
    if connection.sock is None:
        connection.connect()
    has_passed = Event()

    # The timeout of a socket begins anew with each byte.
    def end(used: socket = connection.sock) -> None:
        has_passed.set()
        with suppress(OSError):
            used.shutdown(SHUT_RDWR)

    timer = Timer(_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        body = answer.read(_MOST_BYTES + 1)
    except (OSError, http.client.HTTPException):
        if not has_passed.is_set():
            raise
    finally:
        timer.cancel()
    if has_passed.is_set():
        raise PluginError(f"GET /metrics: no response within {_SECONDS:g} s")
    if len(body) > _MOST_BYTES:
        raise PluginError(f"GET /metrics: the response has more than {_MOST_BYTES >> 20} MiB")
    if answer.length:  # a read of so many bytes does not notice
        raise http.client.IncompleteRead(body, answer.length)
    return answer, body.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class Figures:
    """Load and latency of one engine, or of all together, in an interval.

    Attributes:
        prompt_tokens, decode_tokens: forward tokens per second.
        step: mean share of the token budget that a step used.
        running, waiting: number of requests.
        backlog_tokens: prompt tokens not yet computed.
        kv_cache: used share of the KV cache.
        first_token, inter_token: median and 99th percentile of the latencies in seconds; None without any.
    """

    prompt_tokens: float
    decode_tokens: float
    step: float
    running: float
    waiting: float
    backlog_tokens: float
    kv_cache: float
    first_token: tuple[float | None, float | None]
    inter_token: tuple[float | None, float | None]


def figures_of(intervals: Sequence[Interval]) -> Figures:
    """Return the figures of at least one engine together."""
    whole = Interval.sum_of(intervals)
    room = sum(each.growth("step_tokens_count") * each.after.value("token_budget") for each in intervals)
    capacity = whole.after.value("kv_cache_capacity_tokens")
    return Figures(
        prompt_tokens=whole.rate("scheduled_tokens_total", "prefill"),
        decode_tokens=whole.rate("scheduled_tokens_total", "decode"),
        step=whole.growth("step_tokens_sum") / room if room else 0.0,
        running=whole.after.value("num_requests_running"),
        waiting=whole.after.value("num_requests_waiting"),
        backlog_tokens=whole.after.value("backlog_prompt_tokens"),
        kv_cache=whole.after.value("kv_cache_tokens") / capacity if capacity else 0.0,
        first_token=_percentiles(whole, "time_to_first_token_seconds"),
        inter_token=_percentiles(whole, "inter_token_latency_seconds"),
    )


def _percentiles(interval: Interval, histogram: str) -> tuple[float | None, float | None]:
    p50, p99 = (interval.quantile(histogram, share) for share in (0.5, 0.99))
    return None if math.isnan(p50) else p50, None if math.isnan(p99) else p99


def load_between(
    before: Mapping[str, Scrape | Exception], after: Mapping[str, Scrape | Exception]
) -> tuple[dict[str, Figures | str], Figures | None]:
    """Return the figures of each pod, or why there are none (empty for a new pod), and those of all pods together.

    Args:
        before, after: scrapes by pod, or their errors. A new pod has figures from its second scrape on.
    """
    intervals = {
        name: Interval(old, new)
        for name, new in after.items()
        if isinstance(new, Scrape) and isinstance(old := before.get(name), Scrape)
    }
    found: dict[str, Figures | str] = {
        name: figures_of([intervals[name]]) if name in intervals else "" if isinstance(new, Scrape) else str(new)
        for name, new in after.items()
    }
    return found, figures_of(list(intervals.values())) if intervals else None


def milliseconds(seconds: float | None) -> str:
    """Return a time in milliseconds; a dash for None."""
    return "-" if seconds is None else f"{seconds * 1000:,.0f}" if seconds >= 0.1 else f"{seconds * 1000:.1f}"

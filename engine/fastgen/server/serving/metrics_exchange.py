"""Metrics of several API processes: a scrape of any one of them shows the whole server.

Each process serves its own metrics on a Unix socket, and writes them to a file when it stops. The process that is
scraped adds up its own and those of all others. Only the first process has the engine's metrics, so that nothing
counts twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

_TIMEOUT_SECONDS = 5.0


class MetricFamily(msgspec.Struct, array_like=True):
    """A metric of one process.

    Attributes:
        samples: name, labels and value of each.
    """

    name: str
    documentation: str
    type: str
    samples: list[tuple[str, dict[str, str], float]]


class MetricsExchange:
    """The metrics of the other processes of a server.

    Args:
        registry: this process's metrics.
        update: brings their gauges up to date.
        folder: directory of the server's sockets.
        process, num_processes: this process's number, from 0, and how many there are.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        update: Callable[[], None],
        folder: Path,
        process: int,
        num_processes: int,
    ) -> None:
        self._registry = registry
        self._update = update
        self._folder = folder
        self._process = process
        self._num_processes = num_processes

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve this process's metrics to the others, and write them to a file at the end."""
        if self._num_processes == 1:
            yield
            return
        server = await asyncio.start_unix_server(self._answer, self._socket(self._process))
        try:
            yield
        finally:
            part = self._folder / f"metrics-{self._process}.part"
            with suppress(FileNotFoundError):  # the first process has removed the folder: no process asks any more
                part.write_bytes(self._encoded())
                part.rename(self._last(self._process))
            server.close()

    async def others(self) -> list[MetricFamily]:
        """Return the metrics of all other processes.

        Raises:
            OSError: if those of a process cannot be read. Without them, counters would seem to fall.
        """
        numbers = [number for number in range(self._num_processes) if number != self._process]
        answers = await asyncio.gather(*(self._ask(number) for number in numbers))
        return [family for families in answers for family in families]

    async def _ask(self, number: int) -> list[MetricFamily]:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                answer = await self._answer_of(number)
            return msgspec.msgpack.decode(answer, type=list[MetricFamily])
        except (OSError, TimeoutError, msgspec.DecodeError) as error:
            raise OSError(f"process {number}: {type(error).__name__}") from None

    async def _answer_of(self, number: int) -> bytes:
        if self._last(number).exists():
            return self._last(number).read_bytes()
        reader, writer = await asyncio.open_unix_connection(self._socket(number))
        try:
            return await reader.read(-1)
        finally:
            writer.close()

    async def _answer(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(self._encoded())
        with suppress(ConnectionError):  # the process that asked has exited
            await writer.drain()
        writer.close()

    def _encoded(self) -> bytes:
        self._update()
        families = [family for family in families_of(self._registry) if family.type != "info" or self._process == 0]
        return msgspec.msgpack.encode(families)

    def _socket(self, number: int) -> Path:
        return self._folder / f"metrics-{number}"

    def _last(self, number: int) -> Path:
        return self._folder / f"metrics-{number}.last"


def families_of(registry: CollectorRegistry) -> Iterator[MetricFamily]:
    """Yield the metrics of a registry."""
    for metric in registry.collect():
        samples = [(sample.name, dict(sample.labels), sample.value) for sample in metric.samples]
        yield MetricFamily(metric.name, metric.documentation, metric.type, samples)


class Sum(Collector):
    """Collects the metrics of a registry, each with those of the same name and labels in `others` added.

    Infos are not added up: only the process that describes the engine has them.
    """

    def __init__(self, own: CollectorRegistry, others: Sequence[MetricFamily]) -> None:
        self._own = own
        self._others = others

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        families: dict[str, MetricFamily] = {}
        is_described = not any(family.type == "info" for family in self._others)
        own = [family for family in families_of(self._own) if family.type != "info" or is_described]
        sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for family in (*own, *self._others):
            families.setdefault(family.name, family)
            values = sums.setdefault(family.name, {})
            for name, labels, value in family.samples:
                key = name, tuple(labels.items())
                values[key] = values.get(key, 0.0) + value
        for name, family in families.items():
            metric = Metric(family.name, family.documentation, family.type)
            for (sample, pairs), value in sums[name].items():
                metric.add_sample(sample, dict(pairs), value)
            yield metric

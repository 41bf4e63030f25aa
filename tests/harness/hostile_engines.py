"""A program of hostile engines, each at its own loopback address: what a tenant's image may answer to a scrape.

Its arguments are ADDRESS=MODEL. It is a process of its own, so that it takes no time from the engines of a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from functools import partial
from itertools import cycle
from typing import Final, get_args

from fastgen_operator.objects.container import HTTP_PORT
from harness.engines import FakeEngine, Fault

_LABELS: Final = b",".join(b'a%d="b"' % n for n in range(90_000))
# Below the limit on a response's size.
_FEWER_LABELS: Final = _LABELS[:100_000].rpartition(b",")[0]
FAULTS: Final = (
    *("labels", "fewer labels", "endless", "drips", "endless head", "garbage", "silence"),
    *(fault for fault in get_args(Fault) if fault not in ("none", "hangs")),
    *("silence",) * 10,  # each holds a request until the operator's deadline
)


async def _answer(fault: str, model: str) -> AsyncIterator[bytes]:
    """Yield the parts of a response."""
    if fault == "silence":
        await asyncio.sleep(3600)
    yield b"HTTP/1.1 200 OK\r\n"
    while fault == "endless head":
        yield b"X: y\r\n"
        await asyncio.sleep(0.05)
    if fault in ("endless", "drips"):
        yield b"\r\n"
    while fault in ("endless", "drips"):
        yield b"# nothing\n" * 1000 if fault == "endless" else b"#"
        await asyncio.sleep(0.01 if fault == "endless" else 0.1)
    match fault:
        case "labels" | "fewer labels":
            body = b"fastgen_kv_cache_tokens{" + (_LABELS if fault == "labels" else _FEWER_LABELS) + b"} 1\n"
        case "garbage":
            body = random.randbytes(100_000)
        case _:
            engine = FakeEngine("", model, fault=next(each for each in get_args(Fault) if each == fault))
            body = engine.exposition().encode()
    yield b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


async def _handle(fault: str, model: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        while True:
            await reader.readuntil(b"\r\n\r\n")
            async for part in _answer(fault, model):
                writer.write(part)
                await writer.drain()
    writer.close()


async def _serve(engines: Sequence[str]) -> None:
    """Serve at each address, with one fault after the other."""
    for fault, engine in zip(cycle(FAULTS), engines, strict=False):
        address, _, model = engine.partition("=")
        await asyncio.start_server(partial(_handle, fault, model), address, HTTP_PORT)
    await asyncio.Event().wait()


def main(engines: Sequence[str]) -> None:
    asyncio.run(_serve(engines))

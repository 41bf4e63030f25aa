"""Parts of a body that are written straight to a connection, without ASGI's `send`."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from fastgen.server.http.connection import BodyWriter, Connection, body_writer, connection_class


class Transport:
    """Records what is written."""

    def __init__(self) -> None:
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def get_extra_info(self, _name: str, default: object = None) -> object:
        return default


class Served:
    """A connection whose only request is answered by the test."""

    def __init__(self) -> None:
        async def app(scope: Scope, _receive: Receive, send: Send) -> None:
            self.requests.put_nowait((body_writer(scope), send))
            await self.end.wait()

        self.requests: asyncio.Queue[tuple[BodyWriter, Send]] = asyncio.Queue()
        self.end = asyncio.Event()
        self.transport = Transport()
        config = uvicorn.Config(cast(Any, app), http=connection_class(60.0), log_config=None, lifespan="off")
        config.load()
        protocol = cast(Any, config.http_protocol_class)
        self.connection: Connection = protocol(config=config, server_state=ServerState(), app_state={})
        self.connection.connection_made(cast(Any, self.transport))
        self.connection.data_received(b"POST / HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n")


async def test_parts_of_a_body_are_chunks_between_the_head_and_the_end() -> None:
    served = Served()
    writer, send = await served.requests.get()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    writer.write(b"one")
    writer.write(b"")
    writer.write(b"sixteen bytes ..")
    await send({"type": "http.response.body", "body": b"end", "more_body": False})
    _, _, body = served.transport.written.partition(b"transfer-encoding: chunked\r\n\r\n")
    assert body == b"3\r\none\r\n10\r\nsixteen bytes ..\r\n3\r\nend\r\n0\r\n\r\n", "an empty part would end the body"
    served.end.set()


async def test_a_client_that_does_not_read_blocks_the_writer() -> None:
    served, calls = Served(), list[None]()
    writer, send = await served.requests.get()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    writer.on_writable(lambda: calls.append(None))
    assert not writer.is_blocked
    served.connection.pause_writing()
    assert writer.is_blocked
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(writer.drain(), 0)
    served.connection.resume_writing()
    assert (writer.is_blocked, len(calls)) == (False, 1)
    await writer.drain()
    writer.on_writable(None)
    served.connection.pause_writing()
    served.connection.resume_writing()
    assert len(calls) == 1
    served.end.set()


async def test_nothing_is_written_after_a_disconnect() -> None:
    served = Served()
    writer, send = await served.requests.get()
    served.connection.connection_lost(None)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    writer.write(b"one")
    await writer.drain()
    assert served.transport.written == b""
    served.end.set()

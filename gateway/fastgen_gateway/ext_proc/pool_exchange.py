"""One HTTP request of a Gateway in front of an InferencePool: the endpoint picker protocol."""

from __future__ import annotations

import asyncio
from typing import Any, Final, Protocol

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from fastgen_gateway.ext_proc import messages, pool_messages
from fastgen_gateway.ext_proc.incoming_bodies import LARGEST_BYTES, Incoming, IncomingBodies
from fastgen_gateway.metrics import Metrics
from fastgen_gateway.routing.model_table import Exposed
from fastgen_gateway.routing.refusal import (
    Refusal,
    body_not_streamed,
    body_too_large,
    body_too_slow,
    unknown_model,
    unknown_pool,
)
from fastgen_gateway.routing.request_body import RequestBody, with_fields
from fastgen_gateway.routing.router import Choice, Router

# Header of the calls of Gateways, set by `pools.yaml`: the name under which a Gateway calls the picker.
POOL_HEADER: Final = "x-fastgen-pool"
# A request without a body, for example for the list of models.
_NO_BODY: Final = RequestBody("", 0, 0, ())


class PoolStream(Protocol):
    """What is used of grpc.aio.ServicerContext."""

    async def read(self) -> Any: ...

    async def write(self, message: ProcessingResponse) -> None: ...


class PoolExchange:
    """Names the replica of a request, and passes the pieces of its response on.

    No request is held: a Gateway waits some seconds for an answer, and loses the pieces that it has sent if the picker
    ends.

    Args:
        router: decides.
        bodies: counts the bodies in transit.
        body_seconds: how long the body of a request may take to arrive.
        metrics: of the gateway.
        stream: the call of the Gateway.
        authority: the name under which the Gateway calls the picker.
    """

    def __init__(
        self,
        router: Router,
        bodies: IncomingBodies,
        body_seconds: float,
        metrics: Metrics,
        stream: PoolStream,
        authority: str,
    ) -> None:
        self._router, self._bodies, self._metrics = router, bodies, metrics
        self._body_seconds = body_seconds
        self._stream = stream
        self._authority = authority
        self._pool: Exposed | None = None
        self._headers = ProcessingRequest()
        self._body = bytearray()
        # When the rest of the body must have arrived; None while none is expected.
        self._deadline: float | None = None
        self._incoming: Incoming | None = None
        self._choice: Choice | None = None

    async def run(self) -> None:
        """Answer the messages about the request until its response has ended, or it was refused."""
        try:
            while (message := await self._read()) is not None and await self._answer(message):
                pass
        finally:
            self._end_body()
            if self._choice is not None:
                self._router.end(self._choice)

    async def _read(self) -> ProcessingRequest | None:
        """Return the next message, or None at the end of the call. Refuse a body that is too slow, and return None."""
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._stream.read()
        except TimeoutError:
            await self._refuse(body_too_slow(self._body_seconds))
            return None
        return None if message is grpc.aio.EOF else message

    async def _answer(self, message: ProcessingRequest) -> bool:
        """Answer a message if it has to be; return whether more may come."""
        match message.WhichOneof("request"):
            case "request_headers":
                return await self._begin(message)
            case "request_body":
                self._body += message.request_body.body
                if len(self._body) > LARGEST_BYTES:
                    return await self._refuse(body_too_large(LARGEST_BYTES))
                return not message.request_body.end_of_stream or await self._route()
            case "request_trailers":
                return await self._route(trailers=True)
            case "response_headers":
                if self._choice is not None and (address := pool_messages.served_by(message)) is not None:
                    self._metrics.answered(self._choice, address)
                    self._router.served_by(self._choice, address)
                await self._stream.write(messages.CONTINUE_RESPONSE)
            case "response_body":
                copied = pool_messages.copies_responses(self._headers)
                await self._stream.write(pool_messages.response_piece(message.response_body, copied=copied))
            case "response_trailers":
                await self._stream.write(pool_messages.CONTINUE_TRAILERS)
        return True

    async def _begin(self, message: ProcessingRequest) -> bool:
        """Take the headers of the request. Their answer is the replica, once the body has arrived."""
        self._headers = message
        key = pool_messages.pool_of(self._authority)
        found = None if key is None else self._router.models.find("/".join(key))
        # A model may be called like a resource.
        self._pool = found if found is not None and found.key == key else None
        if self._pool is None:
            return await self._refuse(unknown_pool(self._authority))
        if not pool_messages.streams_requests(message):
            return await self._refuse(body_not_streamed())
        if message.request_headers.end_of_stream:
            return await self._route(has_body=False)
        headers = messages.headers_of(message.request_headers)
        incoming = self._bodies.begin(headers.get("content-length"))
        if isinstance(incoming, Refusal):
            return await self._refuse(incoming)
        self._incoming = incoming
        self._deadline = asyncio.get_running_loop().time() + self._body_seconds
        return True

    async def _route(self, *, has_body: bool = True, trailers: bool = False) -> bool:
        """Choose the replica, and send the request's headers, body and trailers back to the Gateway."""
        assert self._pool is not None
        self._deadline = None
        text = bytes(self._body)
        self._body.clear()
        body = RequestBody.parse(text) if has_body else _NO_BODY
        if isinstance(body, Refusal):
            return await self._refuse(body)
        if has_body and body.model not in (self._pool.model, self._pool.address):
            return await self._refuse(unknown_model(body.model, [self._pool.model]))
        changed = with_fields(text, {"model": self._pool.model}) if body.model == self._pool.address else text
        if isinstance(changed, Refusal):
            return await self._refuse(changed)
        outcome = self._router.choose(self._pool.key, body, pool_messages.subset(self._headers))
        if isinstance(outcome, Refusal):
            return await self._refuse(outcome)
        self._choice = outcome
        self._metrics.routed(outcome, None)
        for each in pool_messages.routed(outcome.address, changed if has_body else None, trailers=trailers):
            await self._stream.write(each)
        self._end_body()
        return True

    async def _refuse(self, refused: Refusal) -> bool:
        """Answer the request with an error. Returns False: nothing more may come."""
        self._metrics.refused(None if self._pool is None else self._pool.key, refused, None)
        await self._stream.write(messages.refusal(refused))
        return False

    def _end_body(self) -> None:
        if self._incoming is not None:
            self._bodies.end(self._incoming)
            self._incoming = None

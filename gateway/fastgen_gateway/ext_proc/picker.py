"""The endpoint picker: answers Envoy's messages about each request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final, Protocol

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import HttpHeaders, ProcessingRequest, ProcessingResponse
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorServicer

from fastgen_gateway.ext_proc import messages
from fastgen_gateway.ext_proc.holding import Holding, Outcome
from fastgen_gateway.ext_proc.incoming_bodies import Incoming, IncomingBodies
from fastgen_gateway.ext_proc.pool_exchange import POOL_HEADER, PoolExchange, PoolStream
from fastgen_gateway.metrics import Metrics
from fastgen_gateway.model_list import model_list, one_model
from fastgen_gateway.routing.access import Access
from fastgen_gateway.routing.client import Client, GivenKey
from fastgen_gateway.routing.held_requests import Held
from fastgen_gateway.routing.model_table import Exposed
from fastgen_gateway.routing.refusal import Refusal, body_too_slow, unknown_path
from fastgen_gateway.routing.request_body import RequestBody, client_fields, with_fields
from fastgen_gateway.routing.router import Choice, Router

_MODELS: Final = "/v1/models"
# Envoy waits this much longer for a held request than it may be held.
_MARGIN_SECONDS: Final = 30.0

logger = logging.getLogger(__name__)


class _Stream(PoolStream, Protocol):
    """What is used of grpc.aio.ServicerContext."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None: ...


class Picker(ExternalProcessorServicer):  # type: ignore[misc]  # generated without types
    """Serves one stream of messages for each HTTP request.

    Args:
        router: decides.
        access: knows the clients.
        holding: releases held requests.
        hold_seconds: how long a request may be held.
        body_seconds: how long the body of a request may take to arrive.
        bodies: counts the bodies in transit.
        metrics: of the gateway.
    """

    def __init__(
        self,
        router: Router,
        access: Access,
        holding: Holding,
        hold_seconds: float,
        body_seconds: float,
        bodies: IncomingBodies,
        metrics: Metrics,
    ) -> None:
        self.router = router
        self.access = access
        self.holding = holding
        self.hold_seconds = hold_seconds
        self.body_seconds = body_seconds
        self.bodies = bodies
        self.metrics = metrics

    async def Process(self, _: AsyncIterator[ProcessingRequest], context: _Stream) -> None:
        """Answer the messages about one HTTP request, until its response has ended."""
        called = dict(context.invocation_metadata() or ())
        if (authority := called.get(POOL_HEADER)) is None:
            await _Exchange(self, context).run()
        else:
            parts = self.router, self.bodies, self.body_seconds, self.metrics
            await PoolExchange(*parts, context, str(authority)).run()


class _Exchange:
    """One HTTP request. Envoy sends its headers and body, then the headers of the response, and ends the stream.

    It ends the stream at any time, or cancels it, when the client is gone or the request has failed.
    """

    def __init__(self, picker: Picker, stream: _Stream) -> None:
        self._picker = picker
        self._router = picker.router
        self._stream = stream
        self._choice: Choice | None = None
        # The request while it is held, and its future outcome.
        self._hold: tuple[Held, asyncio.Future[Outcome]] | None = None
        self._held_seconds = 0.0
        self._is_explained = False
        # Whether the headers of the request have arrived, and its body has not.
        self._expects_body = False
        # The body, from the headers until it was read.
        self._incoming: Incoming | None = None
        # The message that is being answered. Nothing else may refer to it: its body must be freed once it is parsed.
        self._message: ProcessingRequest | None = None
        # Whether the headers of a response have arrived.
        self._is_answered = False
        self._limits = picker.access.limits
        # The API key of the request; None if the gateway asks for none.
        self._key: GivenKey | None = None
        # Tokens that were charged to the client, once the request was admitted.
        self._charged: int | None = None
        # A read that had begun while the request was held.
        self._reading: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        try:
            while await self._read():
                await self._answer()
        finally:
            self._end_body()
            if self._reading is not None:
                self._reading.cancel()
            self._abandon()
            if self._choice is not None:
                self._router.end(self._choice)
            self._discharge()

    @property
    def _client(self) -> Client | None:
        return None if self._key is None else self._key.client

    async def _read(self) -> bool:
        """Read Envoy's next message; return False at the end of the stream, or if a body is too slow and was refused.

        Envoy has no timeout for bodies, and keeps what it has received of one in memory.
        """
        reading, self._reading = self._reading, None
        seconds = self._picker.body_seconds
        try:
            async with asyncio.timeout(seconds if self._expects_body else None):
                message = await (reading if reading is not None else self._stream.read())
        except TimeoutError:
            await self._stream.write(self._refused(None, body_too_slow(seconds)))
            return False
        self._message = None if message is grpc.aio.EOF else message
        return self._message is not None

    async def _answer(self) -> None:
        message, self._message = self._message, None
        assert message is not None
        match message.WhichOneof("request"):
            case "request_headers":
                await self._stream.write(self._begin(message.request_headers))
            case "request_body":
                self._expects_body = False
                self._message = message
                del message
                await self._route()
            case "response_headers":
                self._is_answered = True
                await self._stream.write(self._answered(messages.served_address(message)))

    def _begin(self, request: HttpHeaders) -> ProcessingResponse:
        """Return the answer to the headers of a request."""
        headers = messages.headers_of(request)
        method = headers.get(":method", "")
        found = self._picker.access.identify(headers.get(messages.AUTHORIZATION))
        if isinstance(found, Refusal):
            return self._refused(None, found)
        self._key = found
        # Engines generate for POST only. A GET with a body would reach anything at a replica's address.
        if request.end_of_stream or method != "POST":
            return self._without_body(method, headers.get(":path", "").partition("?")[0])
        incoming = self._picker.bodies.begin(
            headers.get("content-length"), "" if self._client is None else self._client.name
        )
        if isinstance(incoming, Refusal):
            return self._refused(None, incoming)
        self._incoming = incoming
        self._is_explained, self._expects_body = messages.is_explained(request), True
        return messages.CONTINUE_REQUEST if self._client is None else messages.accepted(self._client.name)

    def _without_body(self, method: str, path: str) -> ProcessingResponse:
        """Return the answer to a request without a body: the list of models, one of them, or an error."""
        models, client = self._router.models, self._client
        if method == "GET" and path == _MODELS:
            return messages.immediate(200, model_list(models, client))
        if method == "GET" and path.startswith(f"{_MODELS}/"):
            found = one_model(models, path.removeprefix(f"{_MODELS}/"), client)
            return messages.refusal(found) if isinstance(found, Refusal) else messages.immediate(200, found)
        return self._refused(None, unknown_path(method, path))

    def _end_body(self) -> None:
        if self._incoming is not None:
            self._picker.bodies.end(self._incoming)
            self._incoming = None

    async def _route(self) -> None:
        """Answer the body of a request: with a replica, perhaps after a wait, or with an error."""
        assert self._message is not None
        text, self._message = self._message.request_body.body, None
        body = RequestBody.parse(text, 0 if self._key is None else self._key.salt)
        exposed = None if isinstance(body, Refusal) else self._router.models.find(body.model, self._client)
        outcome: Choice | Held | Refusal
        outcome, changed = (body, None) if isinstance(body, Refusal) else self._decide(text, body, exposed)
        del text
        if isinstance(outcome, Held):
            self._end_body()  # from now on, it counts as held
            held = outcome
            waited = await self._released()
            if waited is None:
                return
            outcome = waited
            if isinstance(outcome, Choice):
                self._held_seconds = outcome.sent.time - held.time
            self._picker.metrics.released(held, outcome)
        if isinstance(outcome, Refusal):
            self._discharge()  # before the client can send the next one
            key = None if exposed is None else exposed.key
            await self._stream.write(self._refused(key, outcome))
            return
        self._picker.metrics.routed(outcome, self._client)
        facts = self._facts(outcome)
        if self._client is not None and self._charged is not None:
            facts |= {"client": self._client.name, "charged_tokens": self._charged}
        await self._stream.write(
            messages.destination(outcome.address, outcome.fallback, facts, changed, self._authorization(outcome))
        )
        self._end_body()

    def _decide(
        self, text: bytes, body: RequestBody, exposed: Exposed | None
    ) -> tuple[Choice | Held | Refusal, bytes | None]:
        """Decide on a request; return the outcome, and the changed body if the engine does not get the original.

        Everything that can fail runs before the router has the request; from then on, `run` ends it.
        """
        fields = self._fields(text, body, exposed)
        if isinstance(fields, Refusal):
            return fields, None
        if (refused := self._admit(body)) is not None:
            return refused, None
        changed = with_fields(text, fields) if fields and exposed is not None else None
        if isinstance(changed, Refusal):
            return changed, None
        outcome = self._router.arrive(body, self._client)
        if isinstance(outcome, Choice):
            self._choice = outcome
        elif isinstance(outcome, Held):
            self._hold = outcome, self._picker.holding.outcome(outcome)
        return outcome, changed

    def _fields(self, text: bytes, body: RequestBody, exposed: Exposed | None) -> dict[str, Any] | Refusal:
        """Return the fields of a body to change for the engine, with their new values."""
        renamed = {} if exposed is None or exposed.model == body.model else {"model": exposed.model}
        fields = {} if self._key is None else client_fields(text, self._key)
        return fields if isinstance(fields, Refusal) else fields | renamed

    def _admit(self, body: RequestBody) -> Refusal | None:
        """Charge a request to its client, or return the error for one beyond its limits."""
        if self._client is None:
            return None
        charged = self._limits.admit(self._client, body.prompt_tokens)
        if isinstance(charged, Refusal):
            return charged
        self._charged = charged
        return None

    def _discharge(self) -> None:
        """Count the end of an admitted request. If no replica has answered, refund its client.

        Envoy may have given up waiting for the picker, and asks it again. If the client has left, the access log
        charges it.
        """
        if self._client is None or self._charged is None:
            return
        self._limits.end(self._client)
        if self._choice is None or not self._is_answered:
            self._limits.correct(self._client.name, -self._charged)
        self._charged = None

    def _authorization(self, choice: Choice) -> str | None:
        """Return the Authorization header for the engine: None to remove it, and an empty text to keep the client's."""
        if self._key is None:
            return ""
        key = self._picker.access.engine_key(choice.key)
        return None if key is None else f"Bearer {key}"

    def _answered(self, address: str | None) -> ProcessingResponse:
        """Return the answer to the headers of a response of the replica at `address`; None if Envoy itself responds."""
        choice = self._choice
        if choice is None:
            return messages.CONTINUE_RESPONSE
        chosen = choice.pod
        if address is not None:
            self._picker.metrics.answered(choice, address)
            self._router.served_by(choice, address)
        shown = {**self._facts(choice), "replica": choice.address} if self._is_explained else {}
        if self._key is None:
            # They would tell a client whether another one has sent the same prompt. Keys share no prefixes.
            shown.pop("cached_tokens", None)
            shown.pop("reason", None)
        logged = {"pod": choice.pod} if choice.pod != chosen else {}
        return messages.answered(shown, logged) if shown or logged else messages.CONTINUE_RESPONSE

    def _facts(self, choice: Choice) -> dict[str, str | float]:
        """Return what the access log and explained responses tell of a choice."""
        return {
            "deployment": "/".join(choice.key),
            "pod": choice.pod,
            "reason": choice.reason,
            "prompt_tokens": choice.sent.tokens,
            "cached_tokens": choice.sent.tokens - choice.sent.uncached,
            "held_seconds": round(self._held_seconds, 3),
        }

    async def _released(self) -> Outcome | None:
        """Wait until the held request is released; None if Envoy needs no answer any more."""
        assert self._hold is not None
        _, outcome = self._hold
        await self._stream.write(messages.more_time(self._picker.hold_seconds + _MARGIN_SECONDS))
        reading = self._reading = asyncio.create_task(self._stream.read())
        await asyncio.wait({outcome, reading}, return_when=asyncio.FIRST_COMPLETED)
        if not outcome.done():
            self._abandon()  # the client is gone, or Envoy has answered itself
            return None
        self._hold = None
        released = outcome.result()
        if isinstance(released, Choice):
            self._choice = released
        return released

    def _abandon(self) -> None:
        """End the wait of a held request, if it still waits. If it was released just now, `run` counts its end."""
        if self._hold is None:
            return
        (held, outcome), self._hold = self._hold, None
        if not outcome.done():
            self._picker.holding.abandon(held)
        elif isinstance(released := outcome.result(), Choice):
            self._choice = released

    def _refused(self, key: tuple[str, str] | None, refused: Refusal) -> ProcessingResponse:
        self._picker.metrics.refused(key, refused, self._client)
        return messages.refusal(refused)

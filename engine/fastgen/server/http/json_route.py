"""Routes whose body is strict JSON: receive it, parse it and validate it, without blocking the event loop."""

from __future__ import annotations

import re
import time
from email.message import Message
from typing import Any, get_type_hints

import msgspec
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from fastgen.server.http.api_error import APIError
from fastgen.server.http.json_census import MOST_ITEMS, MOST_NODES, JSONCensus, largest_field
from fastgen.server.http.off_loop import is_large, off_loop
from fastgen.server.http.request_context import current
from fastgen.server.http.sse import CLIENT_CLOSED_REQUEST

# JSON schemas and tools nest a few dozen levels; a thousand would exhaust Python's stack in later code.
MAX_LEVELS = 100
# Half of a surrogate pair, as in a text that a client has cut within an emoji. Both alternatives begin with the text
# before the group, so the search skips what is no escape: 16 MiB of white space take 5 ms instead of 300.
_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
_TAIL_BYTES = 32
_OTHER_HALF = "is half of a character, such as an emoji that was cut; send both halves, or none"


class JSONRoute(APIRoute):
    """A route whose endpoint takes a `request` and a `body`, a pydantic model.

    A body must be strict JSON, nested no deeper than `MAX_LEVELS`, with at most `MOST_NODES` objects, lists and
    strings, and about `MOST_ITEMS` other values. The values are counted while the body arrives; a body with too many
    is rejected at once. A large body is then given to the application's `state.check_large_body`, which may reject it
    unparsed.
    """

    def get_route_handler(self) -> Any:
        """Return a handler that calls the endpoint with the validated body."""
        endpoint = self.endpoint
        model: type[BaseModel] = get_type_hints(endpoint)["body"]

        async def handle(request: Request) -> Response:
            _check_headers(request)
            context = current()
            try:
                body = await _received(request)
            except ClientDisconnect:
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            context.arrival = time.monotonic()
            if context.is_large:
                await off_loop(request.app.state.check_large_body, body)
            validated = await off_loop(_validated, body, model)
            del body  # what follows may take long
            response: Response = await endpoint(body=validated, request=request)
            return response

        return handle


def _check_headers(request: Request) -> None:
    """Reject a body whose headers say that it is compressed or not JSON.

    A browser sends text, a form, or a body without a type to another site without a CORS preflight.
    """
    given = Message()
    given["content-type"] = request.headers.get("content-type", "")
    subtype = given.get_content_subtype()
    if given.get_content_maintype() != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise _invalid_json("the body must be a JSON object with Content-Type: application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise APIError(
            415, f"Content-Encoding {encoding[:40]!r} is not supported; send the body uncompressed", code="encoded_body"
        )


async def _received(request: Request) -> bytearray:
    """Return the body of a request; set `is_large` in its context.

    Raises:
        APIError: 400 as soon as it has too many values, naming the field with most of them; 503 if all bodies together
            are too large.
        HTTPException: 413 if it is too large.
        ClientDisconnect: if the client disconnects.
    """
    body, census, context = bytearray(), JSONCensus(), current()
    async for piece in request.stream():
        census.feed(piece)
        body += piece
        context.is_large = context.is_large or is_large(len(body), census.num_nodes, census.num_commas)
        if census.is_exceeded:
            raise _too_many_values(await off_loop(largest_field, body), census)
    return body


def _too_many_values(field: str | None, census: JSONCensus) -> APIError:
    found = (
        f"more than {MOST_NODES} objects, lists and strings"
        if census.num_nodes > MOST_NODES
        else f"more than {MOST_ITEMS} numbers"
    )
    if field is None:
        return APIError(400, f"the body has {found}; send several requests", code="invalid_value")
    return APIError(
        400,
        f"{field}: the body has {found}, most of them here; shorten it, or send several requests",
        code="invalid_value",
        param=field,
    )


def _validated(body: bytearray, model: type[BaseModel]) -> BaseModel:
    try:
        return model.model_validate(parse(body))
    except ValidationError as error:
        raise _invalid_fields(error) from None


def parse(body: bytes | bytearray) -> Any:
    """Parse strict JSON.

    The standard library's parser accepts NaN, lone surrogates and deep nesting, on which later code fails.

    Raises:
        APIError: 400 if it is not JSON or nested too deeply.
    """
    too_deep = f"nested deeper than {MAX_LEVELS} levels"
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _not_json(too_deep) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = str(error)
        # A half in the last bytes counts as truncation. Searching all of them holds the interpreter's lock.
        half = _HALF.search(body, 0 if "surrogate" in why else max(0, len(body) - _TAIL_BYTES))
        if half is not None:
            why = f"{half[0].decode()} (byte {half.start()}) {_OTHER_HALF}"
        raise _not_json(why) from None
    # Fast path: few bodies have more brackets than the allowed depth.
    if body.count(b"[") + body.count(b"{") > MAX_LEVELS and _num_levels(value) > MAX_LEVELS:
        raise _not_json(too_deep)
    return value


def _not_json(why: str) -> APIError:
    return _invalid_json(f"the body is not valid JSON: {why}")


def _num_levels(value: Any) -> int:
    levels, containers = 0, [value]
    while containers:
        levels += 1
        containers = [
            inner
            for container in containers
            for inner in (container.values() if isinstance(container, dict) else container)
            if isinstance(inner, dict | list)
        ]
    return levels


def _invalid_json(message: str) -> APIError:
    """Return the error for a body that is not a JSON object."""
    return APIError(400, message, code="invalid_json")


def _invalid_fields(error: ValidationError) -> APIError:
    """Return the error for a body with invalid fields; it names the first one."""
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    if not param:
        return _invalid_json(f"the body must be a JSON object with Content-Type: application/json ({message})")
    return APIError(400, f"{param}: {message}", code="invalid_value", param=param)

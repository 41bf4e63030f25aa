"""Refuses requests that a web page made a browser send to this server under another name.

A page on `evil.example` may change the address of its name to 127.0.0.1 after the browser has loaded it (DNS
rebinding). The browser then takes this server for a part of that page, and without an API key nothing else keeps the
page out. The Host header still says `evil.example`.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from fastgen.server.http.api_error import APIError

AUTO = "auto"


class HostCheck:
    """Middleware that rejects requests for other hosts than this one with 403.

    IP addresses, names without a dot, names below `localhost` and this machine's own name are always allowed: no page
    of another site can have them. `allowed` lists further names; `*.example.com` allows the names below it, `*` all.

    With `auto`, all other names are rejected if the request comes from a browser and the connection was made to the
    loopback address. That protects a developer's machine and `kubectl port-forward`. Requests by other programs, and
    those that a Service or an ingress forwards, pass with whatever name they were made for.
    """

    def __init__(self, app: ASGIApp, allowed: str, on_rejection: Callable[[APIError], object]) -> None:
        self._app = app
        self._names = [name.strip().lower() for name in allowed.split(",")]
        self._own_name = socket.gethostname().lower()
        self._on_rejection = on_rejection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI request."""
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            given = headers.get("host", "")
            host = _name_of(given)
            is_checked = self._names != [AUTO] or (is_loopback(_server(scope)) and _is_from_browser(headers))
            if is_checked and not (_is_local(host) or host == self._own_name or self._allows(host)):
                error = APIError(
                    403,
                    f"Host {given[:100]!r} is not allowed; list it in --allowed-hosts or, if that is auto, "
                    "configure an API key",
                    code="host_not_allowed",
                )
                self._on_rejection(error)
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        return any(
            name in ("*", host) or (name.startswith("*.") and host.endswith(name.removeprefix("*")))
            for name in self._names
        )


def _name_of(host: str) -> str:
    """Return the host of a Host header, without its port."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if host.count(":") == 1 else host


def _is_local(host: str) -> bool:
    """Return whether no page of another site can have this host."""
    host = host.removesuffix(".")
    if "." not in host or host.endswith(".localhost"):
        return True
    return _is_address(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _server(scope: Scope) -> str:
    """Return the address to which the connection was made."""
    return str((scope.get("server") or ("",))[0])


def is_loopback(address: str) -> bool:
    """Return whether this is an IP address that only programs on the same machine, or in the same pod, reach."""
    address = address.removeprefix("::ffff:")
    return _is_address(address) and ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_from_browser(headers: Headers) -> bool:
    """Return whether a browser sent the request.

    A page cannot make a browser leave out Origin from a POST, or the language from any request. Node.js sends `*`.
    """
    has_origin = "origin" in headers or "referer" in headers or "sec-fetch-site" in headers
    has_language = headers.get("accept-language", "*") != "*"
    return has_origin or has_language or headers.get("user-agent", "").startswith("Mozilla/")

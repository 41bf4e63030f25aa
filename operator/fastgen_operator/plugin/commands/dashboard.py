"""`kubectl fastgen dashboard`: serve web pages with all resources on this machine.

It has the user's own rights and runs nothing in the cluster. The load of pods is in `top`, and in Grafana.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final
from urllib.parse import unquote, urlsplit

from fastgen_operator.labels_and_annotations import OWNER_LABEL
from fastgen_operator.plugin import pages
from fastgen_operator.plugin.cluster import Cluster, PluginError, UsageError
from fastgen_operator.plugin.overview import overview_of
from fastgen_operator.plugin.screen import Screen

_ADDRESS: Final = "127.0.0.1"
# Other host names are rejected, because a page of another site could make its name resolve to this address.
_HOSTS: Final = (_ADDRESS, "localhost")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's own arguments."""
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="all FastGenDeployments of the cluster")
    parser.add_argument("--port", type=int, default=8090, help="port on this machine (default: %(default)s)")


def run(options: argparse.Namespace, cluster: Cluster, screen: Screen) -> int:
    """Serve the pages until interrupted."""
    namespace = None if options.all_namespaces else cluster.namespace
    cluster.resources(namespace)  # fail now if the cluster cannot be read
    server = serve(cluster, namespace, options.port)
    screen.write([f"http://{_ADDRESS}:{server.server_address[1]}/   (end with Ctrl-C)"])
    with server:
        server.serve_forever()
    return 0


def serve(cluster: Cluster, namespace: str | None, port: int) -> ThreadingHTTPServer:
    """Return a server of the pages of one namespace, or of all for None; not yet serving.

    Raises:
        UsageError: the port cannot be used.
    """

    def page(path: str, nonce: str) -> str | None:
        now = datetime.now(UTC)
        resources = cluster.resources(namespace)
        if path == "/":
            return pages.fleet_page([overview_of(each, [], now) for each in resources], now, nonce)
        for resource in resources:
            where, name = resource["metadata"]["namespace"], resource["metadata"]["name"]
            if unquote(path) == f"/fgd/{where}/{name}":
                pods = cluster.pods_with(where, f"{OWNER_LABEL}={name}")
                return pages.resource_page(overview_of(resource, pods, now), now, nonce)
        return None

    try:
        server = ThreadingHTTPServer((_ADDRESS, port), partial(_Handler, page))
    except (OSError, OverflowError) as error:
        raise UsageError(f"--port {port}: {getattr(error, 'strerror', None) or error}: choose another port") from error
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, page: Callable[[str, str], str | None], *args: object) -> None:
        self._page = page
        super().__init__(*args)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        nonce = secrets.token_urlsafe(16)
        status, text = self._answer(nonce)
        body = text.encode()
        policy = (
            f"default-src 'none'; style-src 'unsafe-inline'; script-src 'nonce-{nonce}'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", policy)
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def _answer(self, nonce: str) -> tuple[int, str]:
        if (urlsplit(f"//{self.headers.get('Host', '')}").hostname or "") not in _HOSTS:
            return 403, pages.page("Forbidden", f"<p>Open {_ADDRESS} or localhost.</p>", nonce)
        try:
            text = self._page(urlsplit(self.path).path, nonce)
        except PluginError as error:
            return 502, pages.page("The cluster cannot be read", f"<p>{escape(str(error))}</p>", nonce)
        if text is None:
            return 404, pages.page("No such page", '<p><a href="/">all FastGenDeployments</a></p>', nonce)
        return 200, text

    def log_message(self, *_: object) -> None:
        """Log nothing, because the page renews itself."""

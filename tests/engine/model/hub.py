"""A hub of the tests' own: what huggingface_hub asks for when it downloads a snapshot."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "1234567890" * 4
TOKEN = "hf_secret"


@dataclass
class Hub:
    """Serves the files of `folder` as tests/tiny, and as tests/gated to those who have the token.

    Attributes:
        url: where.
        downloads: paths of files that were fetched.
    """

    folder: Path
    url: str = ""
    downloads: list[str] = field(default_factory=list)

    def answer(self, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of a GET."""
        if path.startswith("/api/models/tests/tiny/revision/gone"):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if "tests/gated" in path and token != TOKEN:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b""
        if not any(name in path for name in ("tests/tiny", "tests/gated")):
            return 401, {"X-Error-Code": "RepoNotFound"}, b""
        files = sorted(file for file in self.folder.rglob("*") if file.is_file())
        if "/tree/" in path:
            entries = [
                {
                    "type": "file",
                    "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                    "size": file.stat().st_size,
                    "path": str(file.relative_to(self.folder)),
                }
                for file in files
            ]
            return 200, {}, json.dumps(entries).encode()
        if path.startswith("/api/"):
            info = {"id": "tests/tiny", "modelId": "tests/tiny", "sha": COMMIT, "siblings": [], "private": False}
            return 200, {}, json.dumps(info).encode()
        name = path.split(f"/resolve/{COMMIT}/", 1)[1]
        body = (self.folder / name).read_bytes()
        self.downloads.append(name)
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}, body


@contextmanager
def serving(folder: Path) -> Iterator[Hub]:
    """A hub on a port of its own."""
    hub = Hub(folder)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            status, headers, body = hub.answer(self.path.split("?")[0], token)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_arguments: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()

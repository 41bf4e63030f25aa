"""A fake Hugging Face hub that serves what huggingface_hub needs to list a model and download its files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

COMMIT = "1234567890" * 4
TOKEN = "hf_secret"
PIECE = 1 << 16


@dataclass
class Hub:
    """Serves the files of `folder` as tests/tiny, and with the token as tests/gated.

    Attributes:
        url: base URL.
        downloads: paths of the files requested.
        starts: first byte of each file sent.
        served: bytes of files sent.
        cut_after: totals of bytes sent after which the connection is cut, once each.
        failures: status codes of the next responses.
        fails_after_cuts: whether all responses are failures once the connection has been cut.
        ranges: whether Range headers are honoured.
        before_file: called with a file's path before it is sent.
    """

    folder: Path
    url: str = ""
    downloads: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    served: int = 0
    cut_after: list[int] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    fails_after_cuts: bool = False
    ranges: bool = True
    before_file: Callable[[str], None] | None = None

    def answer(self, path: str, token: str | None) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body for a GET."""
        if self.failures:
            return self.failures.pop(0), {}, b""
        if re.search(r"/(revision|resolve)/gone(/|$)", path):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if token not in (None, TOKEN):
            return 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""
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
            siblings = [self._sibling(file) for file in files]
            info = {"id": "tests/tiny", "modelId": "tests/tiny", "sha": COMMIT, "siblings": siblings, "private": False}
            return 200, {}, json.dumps(info).encode()
        name = path.split(f"/resolve/{COMMIT}/", 1)[1]
        body = (self.folder / name).read_bytes()
        self.downloads.append(name)
        if self.before_file is not None:
            self.before_file(name)
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(body).hexdigest()}"'}, body

    def _sibling(self, file: Path) -> dict[str, Any]:
        body = file.read_bytes()
        sibling = {
            "rfilename": str(file.relative_to(self.folder)),
            "size": len(body),
            "blobId": hashlib.sha1(body).hexdigest(),
        }
        if file.suffix in (".safetensors", ".gguf"):
            sibling["lfs"] = {"size": len(body), "sha256": hashlib.sha256(body).hexdigest(), "pointerSize": 100}
        return sibling

    def sendable(self) -> int | None:
        """Return the bytes left to send before the connection is cut; None for all."""
        return self.cut_after[0] - self.served if self.cut_after else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        path = self.path.split("?")[0]
        status, headers, body = self.hub.answer(path, token)
        start, is_file = 0, "/resolve/" in path and status == 200
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if is_file and asked is not None and self.hub.ranges:
            start, status = int(asked[1]), 206
            headers |= {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        if self.command == "GET":
            if is_file:
                self.hub.starts.append(start)
                # A view, because slicing the bytes would copy them for each piece.
                self._send_file(memoryview(body)[start:])
            else:
                self.wfile.write(body)

    do_HEAD = do_GET

    def _send_file(self, body: memoryview) -> None:
        while body:
            sendable = self.hub.sendable()
            piece = body[: PIECE if sendable is None else min(PIECE, sendable)]
            if not piece:
                self.hub.cut_after.pop(0)
                if self.hub.fails_after_cuts:
                    self.hub.failures = [503] * 100
                self.close_connection = True
                return
            self.wfile.write(piece)
            self.hub.served += len(piece)
            body = body[len(piece) :]

    def log_message(self, *_arguments: object) -> None:
        """Do not log."""


@contextmanager
def serving(folder: Path, address: str = "127.0.0.1") -> Iterator[Hub]:
    """Run a hub on a free port."""
    hub = Hub(folder)
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer((address, 0), handler) as server:
        hub.url = f"http://{address}:{server.server_port}"
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()

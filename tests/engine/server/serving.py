"""A `fastgen serve` process for tests, on a free port."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

from cluster.controlplane import free_ports
from support.demo_weights import demo_model
from support.forking import Forked, fork_server
from support.waiting import HANG_SECONDS, wait_until

REAL = (sys.executable, "-m", "fastgen")
SCRIPTED = (sys.executable, str(Path(__file__).with_name("scripted_command.py")))
_START_SECONDS = 60.0
# Otherwise every httpx call loads the system's certificates, which takes longer than the request.
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@dataclass
class Serving:
    """A server process and a client for it."""

    process: subprocess.Popen[bytes] | Forked
    log_path: Path
    port: int = 0
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=HANG_SECONDS)

    def get(self, path: str, **options: object) -> httpx.Response:
        return httpx.get(self.url + path, timeout=HANG_SECONDS, verify=_NO_TLS, **options)  # type: ignore[arg-type]

    def status(self, path: str) -> int | None:
        """Return the status of a GET; None if the connection fails."""
        try:
            return self.get(path).status_code
        except httpx.TransportError:
            return None

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=HANG_SECONDS, verify=_NO_TLS)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return httpx.request(method, self.url + path, timeout=HANG_SECONDS, verify=_NO_TLS, **options)

    def metric(self, name: str, default: float | None = None, **labels: str) -> float:
        """Return a sample's value, summed over the labels not given; `default` if there is no sample yet."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        if not samples and default is not None:
            return default
        assert samples, f"no metric {name}"
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def num_files(self) -> int:
        """Return the number of file descriptors that the server process has open."""
        return len(list(Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def resident_bytes(self) -> int:
        """Return the resident memory of the server process."""
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines())
        return int(fields["VmRSS"].split()[0]) << 10

    def engine_pid(self) -> int:
        """Return the pid of the engine process, the server's only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        assert len(children) == 1, children
        return int(children[0])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait_exit(self) -> int:
        return self.process.wait(HANG_SECONDS)

    def wait_status(self, path: str, status: int, seconds: float = _START_SECONDS) -> None:
        def arrived() -> bool:
            assert self.process.poll() is None, f"the server has ended:\n{self.log}"
            return self.status(path) == status

        wait_until(arrived, f"{path} {status}", seconds)


@contextmanager
def serving(
    folder: Path,
    *options: str,
    command: tuple[str, ...] = SCRIPTED,
    environment: Mapping[str, str] | None = None,
    model: str | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
) -> Iterator[Serving]:
    """Start a server and kill it on exit. It may still be loading: use `wait_status("/ready", 200)`.

    The scripted command is a fork of a process that has imported it.
    """
    port, log_path = port or free_ports(1)[0], folder / "server.log"
    arguments = ["serve", model or str(demo_model()), "--host", host, "--port", str(port)]
    variables = {**os.environ, **(environment or {})}
    process: subprocess.Popen[bytes] | Forked
    with log_path.open("wb") as log:
        if command == SCRIPTED:
            process = fork_server("engine.server.scripted_command").start([*arguments, *options], log_path, variables)
        else:
            process = subprocess.Popen([*command, *arguments, *options], stdout=log, stderr=log, env=variables)
    server = Serving(process, log_path, port, host)
    try:
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def leaves_its_grammar(server: Serving, path: str, body: dict[str, Any]) -> bool:
    """Return whether a generation ends because its tokens do not match its grammar, as only scripted engines' do."""
    response = server.post(path, body)
    return response.status_code == 400 and response.json()["error"]["code"] == "grammar_too_complex"

"""A gateway pod's two programs, the real Envoy and the picker, on free ports of this machine."""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import envoy
import httpx
from prometheus_client.parser import text_string_to_metric_families

from cluster.controlplane import free_ports
from fastgen_gateway.bootstrap import (
    CERTIFICATE,
    CERTIFICATE_FOLDER,
    CERTIFICATE_PATH,
    Ports,
    bootstrap,
    with_tls,
)
from fastgen_gateway.pool_certificate import write_certificate
from gateway.stand_ins import ApiServerStandIn, ReplicaStandIn
from support.waiting import PATIENCE, wait_until

ENVOY = Path(envoy.__path__[0]) / "_bin" / "envoy"
_START_SECONDS = 60.0
# How long a client waits for what it reads next. Only a gateway that hangs takes as long.
CLIENT_SECONDS = PATIENCE * 30.0
# On a busy machine, a test's picker may take longer to start than Envoy retries without it, which is half a minute. And
# one that is stopped for seconds would make Envoy send a request again, which then is twice in counts, turns and logs.
_CHANGES = {
    "num_retries: 60\n": "num_retries: 600\n",
    "num_retries: 24\n": "num_retries: 600\n",
    "message_timeout: 5s\n": "message_timeout: 150s\n",
}
_NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class GatewayPod:
    """Envoy and the picker.

    Envoy asks the kernel to end it with the thread that starts it: start it from the main thread.

    Attributes:
        changes: texts of Envoy's bootstrap, and those that replace them.

    Args:
        folder: for logs and Envoy's bootstrap.
        api_server: URL of the API server.
        options: further options of the picker.
        certificate: folder with the files of a Secret of type kubernetes.io/tls; without it, Envoy speaks plain HTTP.
        address: on which both programs listen; None for the default, which is all addresses.
    """

    changes: ClassVar[Mapping[str, str]] = _CHANGES

    def __init__(
        self,
        folder: Path,
        api_server: str,
        options: Sequence[str] = (),
        certificate: Path | None = None,
        address: str | None = "127.0.0.1",
    ) -> None:
        *ports, http = free_ports(7)
        self.folder, self.ports, self.http_port = folder, Ports(*ports), http
        self._certificate, self._address = certificate, address
        self._picker_command = [
            *(sys.executable, "-m", "fastgen_gateway.main", "--api-server", api_server, "--log-format", "text"),
            *(
                "--picker-port",
                str(self.ports.picker),
                "--admin-port",
                str(self.ports.admin),
                *([] if address is None else ["--http-address", address]),
                "--http-port",
                str(http),
                *options,
            ),
        ]
        self._picker: subprocess.Popen[bytes] | None = None
        self._envoy: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients send requests."""
        return f"http://127.0.0.1:{self.ports.front}"

    @property
    def picker_log(self) -> str:
        return (self.folder / "picker.log").read_text()

    def start(self) -> None:
        """Start both programs and wait until they are ready."""
        self.start_envoy()
        self.start_picker()
        self.wait_ready()

    def start_envoy(self) -> None:
        config = self.folder / "envoy.yaml"
        (self.folder / "pools").mkdir(exist_ok=True)
        write_certificate(self.folder / "pools")
        config.write_text(self._bootstrap())
        command = [
            *(str(ENVOY), "-c", str(config), "--log-level", "warning", "--concurrency", "2"),
            *("--use-dynamic-base-id", "--drain-time-s", "600", "--file-flush-interval-msec", "100"),
        ]
        with (self.folder / "envoy.log").open("ab") as log:
            self._envoy = subprocess.Popen(command, stdout=log, stderr=log)

    def _bootstrap(self) -> str:
        text = bootstrap(self.ports, self._address, self.folder / "pools")
        for old, new in self.changes.items():
            assert old in text
            text = text.replace(old, new)
        return text if self._certificate is None else with_certificate(text, self.folder, self._certificate)

    def start_picker(self, *options: str) -> None:
        with (self.folder / "picker.log").open("ab") as log:
            self._picker = subprocess.Popen([*self._picker_command, *options], stdout=log, stderr=log)

    def wait_ready(self) -> None:
        wait_until(lambda: self.status(self.ports.status, "/ready") == 200, "Envoy is ready", _START_SECONDS)
        wait_until(self._is_serving, "the picker is ready", _START_SECONDS)

    def _is_serving(self) -> bool:
        assert self._picker is None or self._picker.poll() is None, self.picker_log
        return self.status(self.http_port, "/readyz") == 200

    def stop(self) -> None:
        """End both programs; the picker must end by itself."""
        for process in (self._picker, self._envoy):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in (self._picker, self._envoy):
            if process is not None:
                assert process.wait(PATIENCE * 20) in (0, -signal.SIGKILL), self.picker_log

    def kill_picker(self) -> None:
        assert self._picker is not None
        self._picker.kill()
        self._picker.wait()

    def signal_picker(self, number: signal.Signals) -> None:
        assert self._picker is not None
        self._picker.send_signal(number)

    def drain(self) -> None:
        """Wait until the pod has no request, as the containers' preStop hooks do."""
        httpx.get(f"http://127.0.0.1:{self.http_port}/drain", timeout=PATIENCE * 120, verify=_NO_TLS).raise_for_status()

    @property
    def access_log(self) -> list[dict[str, Any]]:
        """The lines of Envoy's access log, without one that is being written."""
        *lines, _ = (self.folder / "envoy.log").read_text().split("\n")
        return [json.loads(line) for line in lines if line.startswith("{")]

    @property
    def pids(self) -> tuple[int, int]:
        """Process ids of Envoy and of the picker."""
        assert self._picker is not None
        assert self._envoy is not None
        return self._envoy.pid, self._picker.pid

    def resident_bytes(self) -> tuple[int, int]:
        """Return the resident memory of Envoy and of the picker."""
        envoy_pid, picker_pid = self.pids
        return _resident(envoy_pid), _resident(picker_pid)

    def status(self, port: int, path: str) -> int | None:
        """Return the status of a GET; None if the connection fails."""
        try:
            return self.fetch(port, path).status_code
        except httpx.TransportError:
            return None

    def fetch(self, port: int, path: str) -> httpx.Response:
        """Return the response to a GET at one of the ports."""
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=CLIENT_SECONDS, verify=_NO_TLS)

    def demand(self) -> dict[str, Any]:
        """Return what the picker tells the operator."""
        answer: dict[str, Any] = self.fetch(self.http_port, "/demand").json()
        return answer

    def metrics(self) -> str:
        return self.fetch(self.http_port, "/metrics").text

    def envoy_metrics(self) -> str:
        return self.fetch(self.ports.status, "/stats/prometheus").text

    def values(self, name: str) -> dict[tuple[str, ...], float]:
        """Return a metric of the picker by the values of its labels, in the order of the labels' names."""
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(self.metrics())
            for sample in family.samples
            if sample.name == name
        }

    def ask(
        self,
        model: object = "m",
        path: str = "/v1/completions",
        seconds: float = CLIENT_SECONDS,
        key: str | None = None,
        **fields: Any,
    ) -> httpx.Response:
        """Send a request, with an API key if given, and return its response."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return self.post({"model": model, **fields}, path, seconds, **headers)

    def post(
        self, body: object, path: str = "/v1/completions", seconds: float = CLIENT_SECONDS, **headers: str
    ) -> httpx.Response:
        """Send a body, as it is if it is bytes."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return httpx.post(f"{self.url}{path}", timeout=seconds, verify=_NO_TLS, headers=headers, **content)  # type: ignore[arg-type]

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=CLIENT_SECONDS, verify=_NO_TLS, headers=headers)


def client_options(
    folder: Path, keys: Mapping[str, str], limits: object, engine_keys: Mapping[str, str] | None = None
) -> list[str]:
    """Write `keys`, `limits.json` and perhaps `engines` to the folder, and return the picker's options for them.

    Args:
        folder: an existing folder.
        keys: text of the file of each client.
        limits: content of the file of limits.
        engine_keys: text of the file of each namespace or deployment.
    """
    (folder / "limits.json").write_text(json.dumps(limits))
    options = ["--client-limits", str(folder / "limits.json")]
    for flag, name, files in (("--client-keys", "keys", keys), ("--engine-keys", "engines", engine_keys)):
        if files is not None:
            (folder / name).mkdir()
            for file, text in files.items():
                (folder / name / file).write_text(text)
            options += [flag, str(folder / name)]
    return options


def with_certificate(text: str, folder: Path, certificate: Path) -> str:
    """Return a bootstrap with TLS for clients and the certificate in a folder; its resource is written to `folder`."""
    resource = folder / "certificate.yaml"
    resource.write_text(CERTIFICATE.read_text().replace(CERTIFICATE_FOLDER, str(certificate)))
    return with_tls(text).replace(CERTIFICATE_PATH, str(resource))


def expose(
    api: ApiServerStandIn, pod: GatewayPod, name: str, *replicas: ReplicaStandIn, model: str | None = None
) -> None:
    """Expose a model with these replicas, and wait until the picker knows them."""
    api.deployment(name, model=model)
    api.endpoints(name, *(replica.address for replica in replicas))
    wait_for_ready(pod, name, len(replicas))


def wait_for_idle(pod: GatewayPod, name: str = "m") -> None:
    """Wait until the picker has counted the end of all requests of a model: a client may get its response before."""
    wait_until(lambda: pod.demand()["deployments"][f"default/{name}"]["running"] == 0, f"{name} is idle")


def wait_for_ready(pod: GatewayPod, name: str, number: int) -> None:
    """Wait until the picker knows so many ready replicas."""
    line = f'fastgen_gateway_ready_replicas{{name="{name}",namespace="default"}} {float(number)}'
    wait_until(lambda: line in pod.metrics(), line)


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")

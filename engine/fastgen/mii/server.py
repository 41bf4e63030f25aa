"""`fastgen.serve`: a server that outlives the program that starts it."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastgen.api_client.api_keys import keys_of_file
from fastgen.api_client.http import RemoteError, RemoteServer
from fastgen.mii import deployments
from fastgen.mii.arguments import check_model_arguments
from fastgen.mii.client import Client
from fastgen.mii.deployments import Deployment, DeploymentError
from fastgen.model.hub import hub_repository
from fastgen.model.source import ModelSource
from fastgen.settings import (
    ENGINE_SETTINGS,
    SERVER_SETTINGS,
    ConfigError,
    EngineConfig,
    ServerConfig,
    default_model_name,
    parsed_settings,
)
from fastgen.terminal import progress_bar

# Command that starts a server, without its arguments.
COMMAND = (sys.executable, "-m", "fastgen")
_POLL_SECONDS = 0.1


def serve(
    model: str | os.PathLike[str],
    deployment_name: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    replica_num: int = 1,
    **settings: Any,
) -> Client:
    """Start a server process on this machine; return when it is ready. It outlives this program.

    Args:
        model: a GGUF file, a Hugging Face directory, or a hub name such as org/name@revision.
        deployment_name: name for `fastgen.client`; defaults to the model's file or folder name without `.gguf`, or to
            the name of a hub model without its organisation.
        host, port: address to listen on; port 0 chooses a free port.
        replica_num: must be 1; more replicas require a FastGenDeployment.
        settings: settings of engine and server, named as in `fastgen.settings`.

    Raises:
        ConfigError: the model, a setting or the host is not supported.
        DeploymentError: as `deployments.reserve`, or the server exits before it is ready.
    """
    check_model_arguments(settings | ({"replica_num": replica_num} if replica_num != 1 else {}))
    settings = parsed_settings(settings, (*ENGINE_SETTINGS, *SERVER_SETTINGS))
    # Report errors here, not in a log.
    server_names = {setting.name for setting in SERVER_SETTINGS}
    engine = EngineConfig(
        model=os.fspath(model), **{name: value for name, value in settings.items() if name not in server_names}
    )
    server = ServerConfig(**{name: value for name, value in settings.items() if name in server_names})
    checked = asdict(engine) | asdict(server)
    source = ModelSource.open(engine.model)
    name = deployment_name or default_model_name(hub_repository(engine.model) or engine.model)
    deployments.reserve(name)
    with ExitStack() as on_failure:
        on_failure.callback(deployments.forget, name)
        port = port or _free_port(host)
        log = deployments.log_file(name)
        words = ["serve", str(source.path.absolute()), "--host", host, "--port", str(port)]
        pid = _start([*words, "--served-model-name", name, *_flags({name: checked[name] for name in settings})], log)
        shown = "127.0.0.1" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        deployment = Deployment(
            name=name,
            url=f"http://{shown}:{port}",
            pid=pid,
            began=deployments.process_began(pid) or 0,
            drain_seconds=server.drain_seconds,
            log=str(log),
        )
        deployments.note(deployment)
        on_failure.callback(Client(deployment).kill)
        _wait_until_ready(deployment)
        on_failure.pop_all()
    keys = [] if server.api_key_file is None else keys_of_file(Path(server.api_key_file))
    return Client(deployment, api_key=next(iter(keys), None))


def _start(arguments: list[str], log: Path) -> int:
    """Start a process in its own session, which signals to this program or its terminal do not reach."""
    with log.open("wb") as output:
        return os.posix_spawn(
            COMMAND[0],
            [*COMMAND, *arguments],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, output.fileno(), 2),
            ],
            setsid=True,
        )


def _wait_until_ready(deployment: Deployment) -> None:
    """Wait with a progress bar until the server is ready.

    Raises:
        DeploymentError: the server exits before it is ready.
    """
    remote = RemoteServer(deployment.url, timeout=10.0)
    with progress_bar() as on_progress:
        while True:
            try:
                remote.get("/ready")
                return
            except RemoteError as error:
                if error.status is not None:
                    on_progress(*_stage(str(error)))
            if not deployment.alive:
                raise DeploymentError(f"deployment {deployment.name!r}: {_last_error(Path(deployment.log))}")
            time.sleep(_POLL_SECONDS)


def _stage(error: str) -> tuple[str, float]:
    """Parse the stage and its completed fraction from `.../ready: 503 loading weights 40 %`."""
    words = error.rpartition(": 503 ")[2].split()
    if len(words) > 2 and words[-1] == "%" and words[-2].isdigit():
        return " ".join(words[:-2]), int(words[-2]) / 100
    return " ".join(words) or "starting", 0.0


def _last_error(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if line.startswith("fastgen: error: ")]
    if errors:
        return errors[-1].removeprefix("fastgen: error: ")
    return f"the server exited before it was ready: {lines[-1] if lines else 'no output'} (see {log})"


def _flags(settings: dict[str, Any]) -> list[str]:
    words: list[str] = []
    for setting in (*ENGINE_SETTINGS, *SERVER_SETTINGS):
        value = settings.get(setting.name)
        if value is not None and setting.kind == "switch":
            words.append(setting.flag if value else "--no-" + setting.flag.removeprefix("--"))
        elif value is not None:
            words += [setting.flag, str(value)]
    return words


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, 0), family=family) as listener:
            return int(listener.getsockname()[1])
    except OSError as error:
        raise ConfigError(f"host {host}: {error.strerror}; use an address of this machine") from None

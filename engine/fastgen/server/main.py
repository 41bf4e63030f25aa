"""The server: checks its settings, listens, and starts its API processes."""

from __future__ import annotations

import logging
import os
import time

import prometheus_client
import uvloop

from fastgen import exit_codes
from fastgen.link.client import EngineError
from fastgen.link.launch import EngineProcess, Launch
from fastgen.link.shared_counts import SharedCounts
from fastgen.server.api_process import APIProcess, Role
from fastgen.server.http.auth import KeyRing
from fastgen.server.http.listening import allow_many_connections, listen
from fastgen.server.http.tracing import Tracer, is_configured
from fastgen.server.loading import ModelFiles
from fastgen.server.processes import APIProcesses
from fastgen.settings import ConfigError, EngineConfig, ServerConfig

log = logging.getLogger("fastgen.server")


def run(engine_config: EngineConfig, server_config: ServerConfig, launch: Launch) -> int:
    """Serve until SIGTERM or SIGINT and return the exit code.

    Args:
        engine_config: the engine's settings.
        server_config: the server's settings.
        launch: the engine process, which waits for its configuration.

    Raises:
        ConfigError: if a setting, the model or the address cannot be used.
        EngineStartError: if the engine fails to start for another reason.
        EngineDeadError: if the engine dies or hangs while it serves.
        APIProcessError: if an API process other than the first ends by itself.
    """
    started = time.monotonic()
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # twice the output, and unused
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # Quick checks first, so that their errors appear before anything is started or logged.
    files = ModelFiles.open(engine_config, server_config)
    keys = KeyRing(server_config.api_key_file, os.environ)
    endpoint = server_config.otlp_endpoint
    allow_many_connections()
    num_processes = server_config.api_processes
    listeners = listen(server_config.host, server_config.port, num_processes)
    counts = SharedCounts(num_processes)

    def serve(process: int, engine: EngineProcess, others: APIProcesses | None) -> int:
        for number, listener in enumerate(listeners):
            if number != process:
                listener.close()  # its process alone accepts its connections
        tracer = Tracer(endpoint) if is_configured(endpoint, os.environ) else None  # after the fork: it starts a thread
        role = Role(process, engine, counts, launch.folder, others)
        listener = listeners[process]
        try:
            return uvloop.run(
                APIProcess(engine_config, server_config, files, listener, keys, tracer, role, started).run()
            )
        finally:
            listener.close()

    def serve_beside(process: int) -> int:
        try:
            return serve(process, launch.shared(process), None)
        except (ConfigError, EngineError) as error:  # the first process fails too, and reports it last
            log.error("API process %d: %s", process, error)
            return error.exit_code if isinstance(error, EngineError) else exit_codes.BAD_CONFIGURATION

    others = APIProcesses(num_processes - 1, serve_beside)
    return serve(0, launch, others)

"""`fastgen serve`: a model over HTTP."""

from __future__ import annotations

import argparse
import sys

from fastgen import logs
from fastgen.commands.flags import Subcommands, add_command, add_model, add_settings, engine_config, given
from fastgen.config import ENGINE_SETTINGS, SERVER_SETTINGS, ServerConfig
from fastgen.engine.launch import Launch


def add(commands: Subcommands) -> None:
    """Adds the command."""
    serve = add_command(commands, "serve", "serve a model over HTTP, as OpenAI does", run)
    add_model(serve)
    serve.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one (default: 8000)")
    serve.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="what requests may call the model; the first is its name in metrics (default: the model's file name)",
    )
    add_settings(serve, [*SERVER_SETTINGS, *ENGINE_SETTINGS])


def run(options: argparse.Namespace) -> int:
    """Serves until told to stop."""
    config = engine_config(options)
    server_config = ServerConfig(
        host=options.host,
        port=options.port,
        served_model_names=tuple(options.served_model_name),
        **given(options, SERVER_SETTINGS),
    )
    logs.configure(server_config.log_format)
    launch = Launch(server_config.log_format)
    try:
        # Imported only now, so that the engine process is on its way.
        from fastgen.engine.client import EngineStartError
        from fastgen.server.main import run as serve

        try:
            return serve(config, server_config, launch)
        except EngineStartError as error:
            print(f"fastgen: error: {error}", file=sys.stderr)
            return error.exit_code
    finally:
        launch.end()

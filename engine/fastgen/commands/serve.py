"""`fastgen serve`: serve a model over HTTP."""

from __future__ import annotations

import argparse
import sys

from fastgen import logs
from fastgen.commands.flags import Subcommands, add_command, add_model, add_settings, engine_config, given
from fastgen.link.launch import Launch
from fastgen.settings import ENGINE_SETTINGS, SERVER_SETTINGS, ServerConfig


def add(commands: Subcommands) -> None:
    """Add the command."""
    serve = add_command(commands, "serve", "serve a model over an OpenAI-compatible HTTP API", run)
    add_model(serve)
    serve.add_argument("--host", default="::", help="address to listen on (default: %(default)s, all of IPv4 and IPv6)")
    serve.add_argument("--port", type=int, default=8000, help="port to listen on; 0 chooses a free one (default: 8000)")
    serve.add_argument(
        "--served-model-name",
        nargs="+",
        default=[],
        metavar="NAME",
        help="names of the model in requests; the first is also its name in metrics (default: owner/name on a hub, "
        "otherwise the name of the file or folder)",
    )
    add_settings(serve, [*SERVER_SETTINGS, *ENGINE_SETTINGS])


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT, or until the engine or an API process fails; return the exit code."""
    config = engine_config(options)
    server_config = ServerConfig(
        host=options.host,
        port=options.port,
        served_model_names=tuple(options.served_model_name),
        **given(options, SERVER_SETTINGS),
    )
    logs.configure(server_config.log_format)
    launch = Launch(server_config.log_format, server_config.api_processes)
    try:
        # Imported after the launch, while the engine process already imports torch.
        from fastgen.link.client import EngineError
        from fastgen.server.main import run as serve

        try:
            return serve(config, server_config, launch)
        except EngineError as error:
            # The last line: the operator shows it in the resource's condition.
            print(f"fastgen: error: {error}", file=sys.stderr)
            return error.exit_code
    finally:
        launch.end()

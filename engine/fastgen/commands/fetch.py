"""`fastgen fetch`: download a model into a folder, resuming an interrupted download."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from fastgen.commands.flags import Subcommands, add_command
from fastgen.fetch.download import fetch
from fastgen.fetch.errors import FetchError
from fastgen.fetch.source import DEFAULT_REVISION, FORMS, Source


def add(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(commands, "fetch", "download a model into a folder, resuming an interrupted download", run)
    parser.add_argument("source", metavar="SOURCE", help=FORMS)
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="target folder")
    parser.add_argument(
        "--revision",
        default=DEFAULT_REVISION,
        help="branch, tag or commit of a hub repository (default: %(default)s)",
    )
    parser.add_argument(
        "--keep",
        action="append",
        metavar="NAME",
        help="remove all models next to FOLDER except those in folders of these names; repeatable",
    )


def run(options: argparse.Namespace) -> int:
    """Download the model; return 0, or the exit code of the FetchError."""
    # PID 1 of a container only receives the signals that it handles.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        fetch(Source(options.source, options.revision), options.to, keep=options.keep)
    except FetchError as error:
        print(f"fastgen: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0

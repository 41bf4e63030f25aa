"""`fastgen fetch`: a model's files from a hub or an object store into a folder, whole or not at all."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from fastgen.commands.flags import Subcommands, add_command
from fastgen.fetch.download import fetch
from fastgen.fetch.errors import FetchError
from fastgen.fetch.source import DEFAULT_REVISION, Source


def add(commands: Subcommands) -> None:
    """Adds the command."""
    parser = add_command(commands, "fetch", "download a model into a folder, going on where it was cut off", run)
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="hf://owner/name, hf://owner/name/file.gguf, s3://bucket/prefix or s3://bucket/file.gguf",
    )
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER", help="where the files go")
    parser.add_argument(
        "--revision",
        default=DEFAULT_REVISION,
        help="branch, tag or commit of a repository on a hub (default: %(default)s)",
    )
    parser.add_argument(
        "--keep",
        action="append",
        metavar="NAME",
        help="remove the models beside FOLDER, but those in folders of these names; repeatable",
    )


def run(options: argparse.Namespace) -> int:
    """Fetches it; returns 0, or the exit code of what went wrong (see `fastgen.fetch.errors`)."""
    # The first process of a container gets no signal that it does not handle.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        fetch(Source(options.source, options.revision), options.to, keep=options.keep)
    except FetchError as error:
        print(f"fastgen: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0

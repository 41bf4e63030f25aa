"""The command `fastgen`. Invalid arguments, settings and models are one line on standard error, with exit code 2."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from fastgen.api_client.http import RemoteError
from fastgen.core.request_error import RequestError
from fastgen.settings import ConfigError

_MISUSE, _FAILURE = 2, 1
_COMMANDS = ("serve", "generate", "fetch", "calibrate", "bench", "top", "verify")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    if os.getpid() == 1:  # of a container: the kernel drops signals that process 1 does not handle
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        given = sys.argv[1:] if arguments is None else list(arguments)
        options = _parser(given).parse_args(given)
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except (ConfigError, RequestError) as error:
        return _fail(str(error), _MISUSE)
    except RemoteError as error:
        return _fail(str(error), _FAILURE)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe, as in `fastgen generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail too
        return _FAILURE


def _fail(message: str, exit_code: int) -> int:
    print(f"fastgen: error: {message}", file=sys.stderr)
    return exit_code


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(_MISUSE, f"fastgen: error: {message}\n")


class _Version(argparse.Action):
    """Prints the version, which is read only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from fastgen.version import VERSION

        print(f"fastgen {VERSION}")
        parser.exit()


def _parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Build the parser of the given command, or of all: each command's imports take time."""
    parser = _Parser(prog="fastgen", description="Serve language models with Dynamic SplitFuse.", allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="show program's version number and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    chosen = [name for name in _COMMANDS if name in arguments[:1]]
    for name in chosen or (() if "--version" in arguments[:1] else _COMMANDS):
        importlib.import_module(f"fastgen.commands.{name}").add(commands)
    return parser

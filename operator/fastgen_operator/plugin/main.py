"""The program `kubectl-fastgen`, which kubectl runs as `kubectl fastgen`.

Exit codes: 0 for success; 1 if the command fails, a drain test loses a request or a replayed decision differs; 2 for a
wrong command line or kubeconfig, or a missing module; 130 if interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final, NoReturn

from fastgen.version import VERSION

_MISUSE: Final = 2
_INTERRUPTED: Final = 130
_KINDS: Final = ("fgd", "fastgendeployment", "fastgendeployments", "fastgendeployments.fastgen.dev")


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(_MISUSE, f"error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    try:
        from fastgen_operator.plugin import cluster as clusters
        from fastgen_operator.plugin.screen import Screen, printable
    except ModuleNotFoundError as error:
        print(f"error: the module {error.name} is missing: install fastgen[operator]", file=sys.stderr)
        return _MISUSE
    options = parser().parse_args(arguments)
    try:
        if getattr(options, "name", None) is not None:
            options.name = _name(options.name)
        used = {key: getattr(options, key, None) for key in ("kubeconfig", "context", "namespace")}
        return int(options.run(options, clusters.open_cluster(**used), Screen()))
    except clusters.PluginError as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader closed the pipe, as in `kubectl fastgen logs chat | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # let the flush at exit succeed
        return 1


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    from fastgen_operator.plugin.commands import dashboard, drain_test, explain_scaling, logs, status, top, what_if

    commands: dict[ModuleType, str] = {
        status: "show a FastGenDeployment on one screen, or a table of all",
        explain_scaling: "repeat the last decisions of the autoscaler and show their arithmetic",
        what_if: "replay the recorded arrivals with another number of replicas or another target",
        logs: "print the logs of all pods",
        top: "show load and latency of all pods, live",
        drain_test: "restart a pod under load and report whether a request was lost",
        dashboard: "serve a page with all resources on this machine",
    }
    common = _common()
    made = _Parser(
        prog="kubectl fastgen", description="Look at FastGenDeployments.", parents=[common], allow_abbrev=False
    )
    made.add_argument("--version", action="version", version=f"kubectl-fastgen {VERSION}")
    subparsers = made.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for module, summary in commands.items():
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        description = f"{summary[0].upper()}{summary[1:]}."
        sub = subparsers.add_parser(name, help=summary, description=description, parents=[common], allow_abbrev=False)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return made


def _common() -> _Parser:
    """Return the flags of kubectl, which are allowed before and after the command."""
    common = _Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument("-n", "--namespace", metavar="NAMESPACE", help="namespace; default: the context's")
    common.add_argument("--context", metavar="NAME", help="context of the kubeconfig; default: the current one")
    common.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig; default: as kubectl finds it")
    return common


def _name(given: str) -> str:
    """Return the name in NAME or fgd/NAME."""
    from fastgen_operator.plugin.cluster import UsageError

    kind, slash, name = given.rpartition("/")
    if (slash and kind.lower() not in _KINDS) or not name:
        raise UsageError(f"{given}: give the name of a FastGenDeployment, as NAME or fgd/NAME")
    return name


if __name__ == "__main__":
    sys.exit(main())

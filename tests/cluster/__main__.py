"""The test bed's commands: `python -m cluster COMMAND`."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console

from cluster import bed, demo, images, node
from cluster.commands import print_to_stderr
from cluster.controlplane import ControlPlane
from cluster.programs import ensure_programs


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Expected errors are printed without a traceback."""
    options = _parser().parse_args(arguments)
    console = Console()
    try:
        return _carry_out(options, console)
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        print_to_stderr(f"\nerror: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("up", help="start the cluster, the operator and a small model, and send a request")
    commands.add_parser("down", help="remove everything that `up` created")
    commands.add_parser("prepare", help="install packages, compile kernels and build the operator's image")
    commands.add_parser("open", help="start the cluster and load the images")
    commands.add_parser("status", help="list the processes of the native node")
    commands.add_parser("kubeconfig", help="print the path of the cluster's kubeconfig")
    commands.add_parser(
        "programs", help="find or build kubectl, helm and the control plane programs, and print their folder"
    )
    commands.add_parser("control-plane", help="run a bare control plane until interrupted")
    build = commands.add_parser("build", help="build an image with buildah and print its name")
    build.add_argument("target", choices=["engine", "gateway", "operator"])
    build.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    return parser


def _carry_out(options: argparse.Namespace, console: Console) -> int:
    match options.command:
        case "up":
            demo.up(console)
        case "down":
            demo.down(console)
        case "prepare":
            bed.prepare_bed(print_to_stderr)
        case "open":
            print(bed.open_bed(print_to_stderr).kubeconfig)
        case "status":
            return _status()
        case "kubeconfig":
            print(bed.existing_bed(print_to_stderr).kubeconfig)
        case "programs":
            print(ensure_programs())
        case "control-plane":
            _control_plane()
        case "build":
            print(images.build(options.target, dict(pair.split("=", 1) for pair in options.build_arg)))
    return 0


def _status() -> int:
    pids = node.Node(bed.UNUSED, node.state_folder()).status()
    for name, pid in pids.items():
        print(f"{name:24} {'not running' if pid is None else f'process {pid}'}")
    return 0 if all(pid is not None for pid in pids.values()) else 1


def _control_plane() -> None:
    with ControlPlane(ensure_programs()) as plane:
        print(plane.kubeconfig, flush=True)
        print_to_stderr("running; press Ctrl-C to stop")
        ending = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, ending)
        signal.sigwait(ending)


if __name__ == "__main__":
    sys.exit(main())

"""Test and measure the engine on a machine with one GPU and no network: one command, what says most comes first.

    PYTHONPATH=engine OUT=results python -m benchmarks.gpu.first_run

Each part writes its output to $OUT as it comes, and its result to $OUT/summary.md when it ends. So a time limit loses
nothing that was found before. Without a GPU the program says why, and exits with 2. `first_run PART...` runs some parts
only, for example those for which there was no time.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu import standins

_KERNELS = "tests/gpu/test_kernels.py"
# Tests that say whether the engine gives right tokens at all.
_ESSENTIAL = "paged_attention or the_sampler or generations or loader or largest_graphs"


@dataclass(frozen=True, slots=True)
class Part:
    """A command of Python's, without the interpreter, and the most seconds that it may take."""

    name: str
    arguments: tuple[str, ...]
    seconds: float


def _tests(name: str, seconds: float, *arguments: str) -> Part:
    options = ("-c", "/dev/null", "--noconftest", "-v", "--tb=short", "-m", "gpu", "-p", "no:cacheprovider")
    # Kernels are compiled meanwhile.
    parallel = ("-n", "12") if find_spec("xdist") is not None else ()
    return Part(name, ("-m", "pytest", *options, *parallel, *arguments), seconds)


def _sections(name: str, seconds: float, only: str, *arguments: str) -> Part:
    return Part(name, ("-m", "benchmarks.gpu", "--only", only, "--output", f"{{out}}/{name}", *arguments), seconds)


def parts() -> tuple[Part, ...]:
    """Return the parts in their order."""
    return (
        _tests("essential-tests", 200, _KERNELS, "-k", _ESSENTIAL),
        _sections("decode", 200, "decode,prefill,batch,small-decode"),
        _tests("other-tests", 180, _KERNELS, "-k", f"not ({_ESSENTIAL})"),
        _tests("device-tests", 120, "tests/gpu/test_device.py", "tests/gpu/test_ranks.py"),
        _sections("attention", 150, "attention,mixture,curve"),
        _sections("load", 200, "long-prompts,tail,requests"),
        _sections("transformers", 100, "transformers"),
        _sections("vllm", 300, "vllm", "--seconds", "280"),  # it compiles the model and its graphs first
    )


def run(part: Part, out: Path, seconds: float) -> str:
    """Run a part for at most `seconds`; its output goes to `OUT/NAME.txt`. Return its result in words."""
    if seconds < 1:
        return "not run: the time is over"
    command = [sys.executable, *(argument.replace("{out}", str(out)) for argument in part.arguments)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with (out / f"{part.name}.txt").open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its children use the GPU, too
            process.wait()
            return f"stopped after {seconds:.0f} s"
    return "passed" if code == 0 else f"exit code {code}"


def missing_gpu() -> str | None:
    """Return why there is no usable GPU, or None."""
    standins.install()
    from fastgen.runner.device import choose_device
    from fastgen.settings import ConfigError, EngineConfig

    try:
        choose_device(EngineConfig(model="", device="cuda"))
    except ConfigError as error:
        return str(error)
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit code."""
    known = {part.name: part for part in parts()}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.first_run",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("part", nargs="*", metavar="PART", help=f"of {', '.join(known)}; default: all")
    parser.add_argument("--seconds", type=float, default=570.0, help="of the whole run (default: 570)")
    given = parser.parse_args(arguments)
    if unknown := set(given.part) - known.keys():
        parser.error(f"{', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    end = time.monotonic() + given.seconds
    out = Path(os.environ.get("OUT", "gpu-results"))
    out.mkdir(parents=True, exist_ok=True)
    if (reason := missing_gpu()) is not None:
        print(reason, file=sys.stderr)
        return 2
    failed = False
    for part in [known[name] for name in given.part or known]:
        started = time.monotonic()
        result = run(part, out, min(part.seconds, end - started))
        line = f"| {part.name} | {time.monotonic() - started:.0f} s | {result} |"
        print(line, flush=True)
        with (out / "summary.md").open("a") as summary:
            summary.write(f"{line}\n")
        failed |= result != "passed"
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

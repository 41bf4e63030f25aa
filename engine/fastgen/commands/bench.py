"""`fastgen bench`: closed-loop load on a model in this process or on a server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from fastgen.api_client.api_keys import own_key
from fastgen.api_client.http import RemoteServer
from fastgen.bench.results import SHARES, Results, as_json
from fastgen.bench.workload import Workload
from fastgen.commands.flags import Subcommands, add_command, add_settings, engine_config, load_model
from fastgen.settings import ENGINE_SETTINGS, ConfigError


def add(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(commands, "bench", "measure throughput and latency under a closed loop of clients", run)
    parser.add_argument(
        "model", metavar="MODEL|URL", help="model to load into this process, or the URL of a server: http://..."
    )
    parser.add_argument("--requests", type=int, default=64, help="total number of requests (default: 64)")
    parser.add_argument("--clients", type=int, default=8, help="concurrent requests (default: 8)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="mean prompt length (default: 512)")
    parser.add_argument("--generation-tokens", type=int, default=64, help="mean generation length (default: 64)")
    parser.add_argument(
        "--deviation",
        type=float,
        default=0.3,
        help="standard deviation of the lengths over their mean (default: 0.3)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and lengths (default: 0)")
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="model name to request (default: the server's first)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    add_settings(parser, ENGINE_SETTINGS)


def run(options: argparse.Namespace) -> int:
    """Measure and print the results; return 1 if every request failed."""
    workload = _workload(options)
    results = _over_server(options, workload) if "://" in options.model else _in_process(options, workload)
    if options.json:
        print(json.dumps(as_json(workload, results)))
    else:
        _print(results)
    if results.failures:
        print(f"fastgen: {len(results.failures)} requests failed, the first: {results.failures[0]}", file=sys.stderr)
    return 0 if results.answers else 1


def _workload(options: argparse.Namespace) -> Workload:
    for name in ("requests", "clients", "prompt_tokens", "generation_tokens"):
        if getattr(options, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)}: must be at least 1")
    if not 0 <= options.deviation <= 1:
        raise ConfigError(f"--deviation {options.deviation}: must be from 0 to 1")
    return Workload(
        options.requests,
        options.clients,
        options.prompt_tokens,
        options.generation_tokens,
        options.deviation,
        options.seed,
    )


def _over_server(options: argparse.Namespace, workload: Workload) -> Results:
    from fastgen.bench.http_clients import run_against

    remote = RemoteServer(options.model, own_key())
    with _answered(workload.requests) as on_answer:
        return run_against(remote, workload, options.served_model_name, on_answer)


def _in_process(options: argparse.Namespace, workload: Workload) -> Results:
    from fastgen.bench.in_process import run_in_process

    model = load_model(engine_config(options))

    def encode(text: str) -> list[int]:
        return model.tokenizer.encode(text, add_special_tokens=True)

    with _answered(workload.requests) as on_answer:
        return run_in_process(model.engine, encode, workload, model.max_model_length, on_answer)


@contextmanager
def _answered(total: int) -> Iterator[Callable[[], None]]:
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("requests", total=total)
        yield lambda: progress.advance(task)


def _print(results: Results) -> None:
    console = Console(file=sys.stdout)
    totals = Table(box=None, show_header=False, pad_edge=False)
    rows = {
        "requests answered": f"{len(results.answers)} in {results.seconds:.1f} s",
        "requests failed": str(len(results.failures)),
        "prompt tokens": str(results.prompt_tokens),
        "generated tokens": str(results.generated_tokens),
        "requests/s": f"{results.rate(len(results.answers)):.2f}",
        "generated tokens/s": f"{results.rate(results.generated_tokens):.1f}",
        "total tokens/s": f"{results.rate(results.prompt_tokens + results.generated_tokens):.1f}",
    }
    for name, value in rows.items():
        totals.add_row(name, value)
    console.print(totals, "")
    shown = Table(box=None, pad_edge=False)
    shown.add_column("milliseconds")
    for heading in ("mean", *(f"p{share * 100:g}" for share in SHARES), "max"):
        shown.add_column(heading, justify="right")
    for latency in results.latencies():
        figures = (latency.mean, *latency.percentiles, latency.most)
        shown.add_row(latency.name, *(f"{value * 1000:.1f}" for value in figures))
    console.print(shown)

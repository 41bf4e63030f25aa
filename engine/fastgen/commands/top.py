"""`fastgen top`: a live view of a server's metrics, or of those of all pods of a FastGenDeployment."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import NoReturn

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fastgen.api_client.api_keys import own_key
from fastgen.api_client.http import RemoteError, RemoteServer
from fastgen.api_client.metrics import Interval, Scrape
from fastgen.api_client.steps import ShownStep, StepWatch
from fastgen.commands.flags import Subcommands, add_command
from fastgen.settings import ConfigError

_BAR = 30
_STEPS = 12  # that are shown
_PLUGIN_MODULES = ("fastgen_operator", "kubernetes")
_KUBECTL_FLAGS = {"-n --namespace": "namespace", "--context": "context", "--kubeconfig": "kubeconfig"}


def add(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(commands, "top", "show a server's load and latency, live", run)
    parser.add_argument(
        "url",
        nargs="?",
        default="http://127.0.0.1:8000",
        metavar="URL|fgd/NAME",
        help="server URL (default: %(default)s), or a FastGenDeployment, of which kubectl fastgen top shows all pods",
    )
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two scrapes (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one interval and exit")
    for flag, text in _KUBECTL_FLAGS.items():
        parser.add_argument(*flag.split(), metavar="TEXT", help=f"{text} of fgd/NAME")


def run(options: argparse.Namespace) -> int:
    """Show the view until interrupted, or print it once.

    Raises:
        ConfigError: if an argument is not allowed.
        RemoteError: if the server cannot be reached at first, or returns an error.
    """
    given = {flag.split()[-1]: getattr(options, flag.rpartition("--")[2]) for flag in _KUBECTL_FLAGS}
    chosen = [word for flag, value in given.items() if value is not None for word in (flag, value)]
    kind, slash, name = options.url.partition("/")
    if slash and kind in ("fgd", "fastgendeployment"):
        return _hand_over(["top", name, "--interval", str(options.interval), *chosen, *["--once"] * options.once])
    if chosen:
        raise ConfigError(f"{chosen[0]} requires fgd/NAME instead of a URL")
    if not 0.05 <= options.interval <= 3600:
        raise ConfigError(f"--interval {options.interval}: must be from 0.05 to 3600 seconds")
    remote = RemoteServer(options.url, own_key(), timeout=10.0)

    def scrape() -> Scrape:
        text = remote.get("/metrics")
        try:
            return Scrape.parse(text, time.monotonic())
        except ValueError as error:
            raise RemoteError(f"{remote.url}/metrics: {error}; check that this is a FastGen server's URL") from error

    console = Console(file=sys.stdout)
    before = scrape()  # fails if the server cannot be reached
    steps = StepWatch(remote, _STEPS)
    if options.once:
        time.sleep(options.interval)
        console.print(view(options.url, Interval(before, scrape()), steps))
        return 0
    return _watch(options.url, options.interval, scrape, steps, console)


def _hand_over(arguments: list[str]) -> NoReturn:
    """Become `kubectl fastgen`: this program knows nothing of Kubernetes."""
    if any(find_spec(module) is None for module in _PLUGIN_MODULES):
        raise ConfigError("top fgd/NAME requires the kubectl plugin: install fastgen[operator]")
    os.execv(sys.executable, [sys.executable, "-m", f"{_PLUGIN_MODULES[0]}.plugin", *arguments])


def _watch(url: str, interval: float, scrape: Callable[[], Scrape], steps: StepWatch, console: Console) -> int:
    before = scrape()
    with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            try:
                after = scrape()
            except RemoteError as error:  # the server may be restarting
                live.update(Text(str(error), style="red"), refresh=True)
                continue
            live.update(view(url, Interval(before, after), steps), refresh=True)
            before = after


def view(url: str, interval: Interval, steps: StepWatch) -> RenderableType:
    """Render what happened in the interval, and the last steps."""
    now = interval.after
    title = Text.assemble((now.model_name or "?", "bold"), f"  {url}", style="")
    budget = now.value("token_budget")
    last = _last_steps(list(steps.last), budget) if steps.offered else Text("steps: start the server with --ui", "dim")
    return Group(title, "", _load(interval), "", _speed(interval), "", last)


def _last_steps(steps: list[ShownStep], budget: float) -> Table:
    """Render the last steps, each as a bar of decode and prompt tokens against the token budget."""
    table = Table(box=None, pad_edge=False)
    for title in ("step", "decode █ prompt ▒", "tokens", "time"):
        table.add_column(title, justify="left" if title.startswith("decode") else "right", header_style="dim")
    for step in steps:
        decode = min(_BAR, math.ceil(_BAR * step.decode_tokens / max(1.0, budget)))
        prompt = min(_BAR - decode, math.ceil(_BAR * step.prompt_tokens / max(1.0, budget)))
        bar = Text.assemble(("█" * decode, "green"), ("▒" * prompt, "cyan"), ("·" * (_BAR - decode - prompt), "dim"))
        tokens = f"{step.decode_tokens} + {step.prompt_tokens} of {step.num_prompts} prompts"
        table.add_row(str(step.number), bar, tokens, _milliseconds(step.seconds))
    return table


def _load(interval: Interval) -> Table:
    now = interval.after
    steps = interval.growth("step_tokens_count")
    budget = now.value("token_budget")
    fill = interval.growth("step_tokens_sum") / (steps * budget) if steps and budget else 0.0
    hits, queries = (interval.growth(f"prefix_cache_{kind}_tokens_total") for kind in ("hit", "query"))
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row(
        "budget fill", _bar(fill), f"{fill:.0%} of {budget:.0f} tokens, {steps / interval.seconds:.1f} steps/s"
    )
    used = now.value("kv_cache_usage_ratio")
    table.add_row(
        "KV cache", _bar(used),
        f"{used:.0%}, {now.value('kv_cache_tokens'):.0f} of {now.value('kv_cache_capacity_tokens'):.0f} tokens",
    )  # fmt: skip
    if queries:
        table.add_row("prefix hits", _bar(hits / queries), f"{hits / queries:.0%} of prompt tokens")
    waits = f"{now.value('num_requests_waiting'):.0f} waiting"
    if now.value("num_requests_waiting"):
        waits += f" (oldest {now.value('oldest_waiting_seconds'):.1f} s)"
    swapped = f", {now.value('num_requests_swapped'):.0f} swapped" if now.value("num_requests_swapped") else ""
    table.add_row("requests", f"{now.value('num_requests_running'):.0f} running", waits + swapped)
    table.add_row("backlog", f"{now.value('backlog_prompt_tokens'):.0f} prompt tokens", "")
    return table


def _speed(interval: Interval) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    prompt, generated = (interval.rate("scheduled_tokens_total", phase) for phase in ("prefill", "decode"))
    table.add_row("tokens/s", f"{prompt:.0f} prompt", f"{generated:.0f} decode")
    table.add_row(
        "requests/s", f"{interval.rate('request_success_total'):.2f} ended",
        f"{interval.rate('request_rejected_total'):.2f} rejected",
    )  # fmt: skip
    for name, metric in (
        ("between tokens", "inter_token_latency_seconds"),
        ("first token", "time_to_first_token_seconds"),
        ("step", "step_seconds"),
    ):
        p50, p99 = (interval.quantile(metric, share) for share in (0.5, 0.99))
        table.add_row(name, f"{_milliseconds(p50)} median", f"{_milliseconds(p99)} p99")
    if interval.growth("preemptions_total"):
        table.add_row("preemptions/s", f"{interval.rate('preemptions_total'):.2f}", "")
    return table


def _bar(share: float) -> Text:
    full = round(_BAR * min(1.0, max(0.0, share)))
    return Text.assemble(("█" * full, "green" if share < 0.9 else "yellow"), ("░" * (_BAR - full), "dim"))


def _milliseconds(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1000:.1f} ms"

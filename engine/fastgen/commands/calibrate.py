"""`fastgen calibrate`: measure step times by token count and derive the token budget.

On a CPU, unless the settings name a format, it measures the default format and its alternatives: float32, int8 and, for
GGUF files whose default is int8, the processor's format.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from fastgen.commands.curve import Fit, draw
from fastgen.commands.flags import Subcommands, add_command, add_model, add_settings, engine_config
from fastgen.core.budget_tuning import TunedBudget, measured_sizes, monotone_curve
from fastgen.model.processor import Processor, choose_cpu_dtype, this_processor
from fastgen.model.source import ModelSource
from fastgen.model.weight_storage import with_storage
from fastgen.settings import ENGINE_SETTINGS, ConfigError, EngineConfig, default_model_name
from fastgen.terminal import progress_bar

if TYPE_CHECKING:
    from fastgen.engine.calibration import Calibration

_BAR = 20


def add(commands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(commands, "calibrate", "measure step times and derive the token budget", run)
    add_model(parser)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="plot the curve into this PNG or SVG file; needs matplotlib"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="repeat the measurements of a format for this time, in at most five rounds (default: 20)",
    )
    parser.add_argument(
        "--most-tokens",
        type=int,
        metavar="N",
        help="tokens of the largest step (default: 1024 on cpu, 8192 on cuda)",
    )
    add_settings(parser, ENGINE_SETTINGS)


def run(options: argparse.Namespace) -> int:
    """Measure, and print the curve and the budget of each format. The plot shows only the first format.

    Raises:
        ConfigError: if an argument is not allowed, or the model cannot be served.
    """
    config = replace(engine_config(options), token_budget="auto")
    if options.seconds <= 0:
        raise ConfigError(f"--seconds {options.seconds}: must be above 0")
    if options.output is not None and options.output.suffix not in (".png", ".svg"):
        raise ConfigError(f"--output {options.output}: must end in .png or .svg")
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise ConfigError(f"--output {options.output}: its directory does not exist: create it first")
    if options.output is not None and find_spec("matplotlib") is None:
        raise ConfigError(
            f"--output {options.output}: matplotlib is not installed: run `pip install matplotlib`, "
            "or omit the flag: the curve is printed too"
        )
    most_tokens = config.most_tokens if options.most_tokens is None else options.most_tokens
    if not 1 <= most_tokens <= config.most_tokens:
        raise ConfigError(f"--most-tokens {most_tokens}: must be from 1 to {config.most_tokens}")
    source = ModelSource.open(config.model)
    console = Console(file=sys.stdout)
    choices = formats(config, this_processor(), with_storage(config, source), is_native=source.native is not None)
    for place, (name, settings) in enumerate(choices.items()):
        calibration, budget = _measure(source, settings, most_tokens, options.seconds)
        fit = Fit.of(calibration)
        if len(choices) > 1:
            console.print(f"\n{name}" if place else name, highlight=False, soft_wrap=True)
        console.print(table(calibration, budget, fit))
        for line in conclusion(budget, fit):
            console.print(line, highlight=False, soft_wrap=True)
        if options.output is not None and not place:
            draw(options.output, default_model_name(config.model), calibration.curve, budget, fit)
            console.print(f"drawn into {options.output}", highlight=False, soft_wrap=True)
    return 0


def formats(
    config: EngineConfig, processor: Processor, default: EngineConfig, *, is_native: bool
) -> dict[str, EngineConfig]:
    """Return the settings of each format to measure, by its heading; the default format comes first.

    Args:
        config: the settings. If they name a format, only that is measured.
        processor: the processor of this machine.
        default: the settings with the model's storage of weights, see `with_storage`.
        is_native: whether FastGen's own code runs the model: only then can it be quantized.
    """
    if config.device != "cpu" or config.dtype != "auto" or config.quantization != "auto":
        return {"": default}
    choice = choose_cpu_dtype(replace(config, quantization="none"), processor)
    weights = replace(config, dtype=choice.dtype, quantization="none")
    if default.quantization == "int8":
        found = {"int8, the default for this GGUF file": default, f"--dtype {choice.dtype}": weights}
    else:
        found = {f"{choice.dtype}, the default: {choice.reason}": weights}
    if choice.dtype != "float32":
        found["--dtype float32"] = replace(weights, dtype="float32")
    if is_native and default.quantization != "int8":
        found["--quantization int8"] = replace(config, quantization="int8")
    return found


def _measure(
    source: ModelSource, config: EngineConfig, most_tokens: int, seconds: float
) -> tuple[Calibration, TunedBudget]:
    with progress_bar() as on_progress:
        from fastgen.engine.build import load_on_ranks
        from fastgen.engine.calibration import measure, tuned_budget

        runner = load_on_ranks(source, config, on_progress)
        sizes = measured_sizes(most_tokens)
        calibration = measure(
            runner,
            sizes,
            seconds=seconds,
            patience=len(sizes),
            on_progress=lambda fraction: on_progress("calibrating", fraction),
        )
    return calibration, tuned_budget(calibration, config)


def table(calibration: Calibration, budget: TunedBudget, fit: Fit) -> Table:
    """Return a row per size with a bar of its share of the peak.

    The first size at or above the budget is marked.
    """
    shown = Table(box=None, pad_edge=False)
    for heading in ("tokens", "ms", "ms by fit", "tokens/s", "of peak"):
        shown.add_column(heading, justify="right")
    shown.add_column("")
    curve = monotone_curve(calibration.curve)
    marked = next((point.tokens for point in curve if point.tokens >= budget.token_budget), curve[-1].tokens)
    for point in curve:
        share = point.throughput / budget.peak
        at_budget = point.tokens == marked
        shown.add_row(
            str(point.tokens),
            f"{point.seconds * 1000:.1f}",
            f"{fit.seconds(point) * 1000:.1f}",
            f"{point.throughput:.0f}",
            f"{share:.0%}",
            "█" * round(_BAR * share) + (" <- budget" if at_budget else ""),
            style="bold" if at_budget else None,
        )
    return shown


def conclusion(budget: TunedBudget, fit: Fit) -> list[str]:
    """Return the lines printed below the table."""
    from fastgen.engine.calibration import describe_budget

    costs = fit.coefficients
    per_kv = f" + {costs.kv_token * 1e6:.3f} µs per resident KV token" if costs.kv_token > 0 else ""
    # Contexts of prompts are easier to imagine in thousands.
    per_context = (
        f", {costs.context_pair * 1e9:.1f} µs more for each 1000 tokens before it" if costs.context_pair > 0 else ""
    )
    return [
        "",
        describe_budget(budget),
        f"a step takes about {costs.base * 1000:.2f} ms + {costs.token * 1e6:.1f} µs per token{per_context}{per_kv} "
        f"(mean error {fit.error:.0%})",
    ]

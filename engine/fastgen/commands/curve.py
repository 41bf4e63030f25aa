"""The curve of `fastgen calibrate`: a fit of the step model, and a plot of throughput and step time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgen.core.budget_tuning import PEAK_SHARE, TunedBudget, monotone_curve
from fastgen.core.step_model import StepModel
from fastgen.core.step_times import StepCoefficients, StepTime

if TYPE_CHECKING:
    from fastgen.engine.calibration import Calibration

_MEASURED, _FITTED, _CHOSEN, _QUIET = "#1f5fa8", "#8a8f98", "#c8501e", "#e3e5e8"


@dataclass(frozen=True, slots=True)
class Fit:
    """The engine's step model of the measurements. `error` is the mean relative error of the points."""

    coefficients: StepCoefficients
    error: float

    @classmethod
    def of(cls, calibration: Calibration) -> Fit:
        """Fit as the engine does at its start."""
        coefficients = StepModel.of(calibration.points).coefficients
        errors = [abs(coefficients.seconds(point.work) / point.seconds - 1) for point in calibration.points]
        return cls(coefficients, sum(errors) / len(errors))

    def seconds(self, point: StepTime) -> float:
        """Return the modelled time of a step of this size."""
        return self.coefficients.seconds(point.work)


def draw(path: Path, model_name: str, points: Sequence[StepTime], budget: TunedBudget, fit: Fit) -> None:
    """Write the plot; the file's suffix chooses the format."""
    # Not pyplot, which keeps global state and looks for a display.
    from matplotlib.figure import Figure

    curve = monotone_curve(points)
    figure = Figure(figsize=(9.6, 4.2), layout="constrained")
    figure.suptitle(f"{model_name}: a token budget of {budget.token_budget}, set by the {budget.bound}", fontsize=12)
    left, right = figure.subplots(1, 2)
    _throughput(left, curve, budget)
    _seconds(right, curve, budget, fit)
    for axes in (left, right):
        axes.set_xlabel("forward tokens in the step")
        axes.grid(color=_QUIET, linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=150)


def _throughput(axes: Any, curve: Sequence[StepTime], budget: TunedBudget) -> None:
    axes.set_title("throughput", loc="left", fontsize=10)
    axes.set_ylabel("forward tokens per second")
    axes.plot([p.tokens for p in curve], [p.throughput for p in curve], "o-", color=_MEASURED, markersize=4)
    axes.axhline(PEAK_SHARE * budget.peak, color=_FITTED, linestyle=":", linewidth=1)
    axes.annotate(
        f"{PEAK_SHARE:.0%} of the peak", (curve[0].tokens, PEAK_SHARE * budget.peak), color=_FITTED, fontsize=8,
        xytext=(0, 4), textcoords="offset points",
    )  # fmt: skip
    axes.set_ylim(bottom=0, top=1.1 * budget.peak)
    # Logarithmic, base 2: the curve saturates over doublings of the tokens.
    axes.set_xscale("log", base=2)
    sizes = [p.tokens for p in curve if p.tokens & (p.tokens - 1) == 0] or [p.tokens for p in curve]
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    _mark(axes, budget, budget.throughput, f"{budget.token_budget} tokens, {budget.throughput:.0f} tokens/s")


def _seconds(axes: Any, curve: Sequence[StepTime], budget: TunedBudget, fit: Fit) -> None:
    axes.set_title("step time", loc="left", fontsize=10)
    axes.set_ylabel("milliseconds")
    tokens = [p.tokens for p in curve]
    axes.plot(tokens, [p.seconds * 1000 for p in curve], "o-", color=_MEASURED, markersize=4, label="measured")
    axes.plot(
        tokens, [fit.seconds(p) * 1000 for p in curve], "--", color=_FITTED, linewidth=1.2,
        label=f"fit: {fit.coefficients.base * 1000:.1f} ms + {fit.coefficients.token * 1e6:.0f} µs per token",
    )  # fmt: skip
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    _mark(axes, budget, budget.seconds * 1000, f"{budget.token_budget} tokens, {budget.seconds * 1000:.0f} ms")
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def _mark(axes: Any, budget: TunedBudget, height: float, text: str) -> None:
    """Mark the budget: a line up to the curve, a diamond on it, figures at the foot."""
    axes.vlines(budget.token_budget, 0, height, color=_CHOSEN, linewidth=1, linestyle="--")
    axes.plot([budget.token_budget], [height], "D", color=_CHOSEN, markersize=8, zorder=3)
    low, high = axes.get_xlim()
    beyond_half = budget.token_budget > (low * high) ** 0.5 if low > 0 else budget.token_budget > (low + high) / 2
    axes.annotate(
        text, (budget.token_budget, 0), color=_CHOSEN, fontsize=9, ha="right" if beyond_half else "left",
        xytext=(-6 if beyond_half else 6, 6), textcoords="offset points",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip

"""Render the comparison as tables and plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.autoscaling.comparison import OURS, Row, better_rows
from benchmarks.autoscaling.traces import WARM_UP

_COLORS = {
    OURS: "#d62728",
    "HPA on waiting": "#7f7f7f",
    "Knative": "#1f77b4",
    "KubeAI": "#2ca02c",
    "llm-d V1": "#9467bd",
    "llm-d V2": "#ff7f0e",
}
HEAD = (
    "| policy | in time | first token p50 / p99 | lost | GPU-hours | changes an hour | worst backlog, tokens |\n"
    "|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    """Return one run as a row of a Markdown table."""
    got = row.figures
    return (
        f"| {row.configuration.name}{' (tuned)' if row.configuration.tuned else ''} | {100 * got.attainment:.1f} % "
        f"| {got.first_p50:.2f} / {got.first_p99:.2f} s | {100 * got.lost:.1f} % | {got.gpu_hours:.2f} "
        f"| {got.changes_per_hour:.1f} | {got.worst_backlog:,} |"
    )


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the tables of all traces."""
    for trace, ahead in better_rows(rows):
        yield f"\n### {trace.name}\n\n{trace.what[0].upper()}{trace.what[1:]}.\n\n{HEAD}"
        yield from (line(row) for row in rows if row.trace is trace)
        ours = [row.figures.gpu_hours for row in rows if row.trace is trace and row.configuration.family == OURS]
        if not ours:
            continue
        within = [row for row in ahead if row.figures.gpu_hours <= max(ours)]
        costlier = [row for row in ahead if row.figures.gpu_hours > max(ours)]
        yield (
            f"\nAhead of FastGen: {_named(within)}." if within else "\nNo policy is ahead of FastGen at the same cost."
        )
        if costlier:
            yield f"\nBetter than any FastGen setting, at higher cost: {_named(costlier)}."


def _named(rows: Sequence[Row]) -> str:
    return "; ".join(
        f"{row.configuration.name} ({100 * row.figures.attainment:.1f} % at {row.figures.gpu_hours:.2f})"
        for row in rows
    )


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draw two plots: attainment against cost per trace, and replicas over time of each family's best run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    traces = list(dict.fromkeys(row.trace for row in rows))
    figure, grid = pyplot.subplots(2, (len(traces) + 1) // 2, figsize=(13, 6.5), squeeze=False)
    axes = [axis for line_ in grid for axis in line_]
    for axis, trace in zip(axes, traces, strict=False):
        for family, color in _COLORS.items():
            points = sorted(
                (row.figures.gpu_hours, 100 * row.figures.attainment)
                for row in rows
                if row.trace is trace and row.configuration.family == family
            )
            style = "o-" if family == OURS else "o"
            axis.plot([x for x, _ in points], [y for _, y in points], style, color=color, markersize=5, label=family)
        axis.set_title(trace.name, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[len(traces) :]:
        axis.axis("off")
    axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="center", fontsize=9)
    figure.supxlabel("GPU-hours")
    figure.supylabel("requests in time, %")
    figure.tight_layout()
    figure.savefig(folder / "attainment.png", dpi=70)
    pyplot.close(figure)

    shown = [trace for trace in traces if trace.name in ("step", "bursts")] or traces[:1]
    figure, grid = pyplot.subplots(len(shown), 1, figsize=(11, 3 * len(shown)), squeeze=False)
    for (axis,), trace in zip(grid, shown, strict=True):
        for family, color in _COLORS.items():
            found = [row for row in rows if row.trace is trace and row.configuration.family == family]
            if found:
                best = max(found, key=lambda row: row.figures.attainment)
                samples = [sample for sample in best.samples if sample.time >= WARM_UP]
                times = [(sample.time - WARM_UP) / 60 for sample in samples]
                axis.step(
                    times,
                    [sample.ready for sample in samples],
                    color=color,
                    linewidth=1.2,
                    label=best.configuration.name,
                )
        axis.set_title(f"{trace.name}: ready replicas", fontsize=10)
        axis.legend(fontsize=7, loc="upper right")
        axis.grid(alpha=0.3)
    figure.supxlabel("minutes")
    figure.tight_layout()
    figure.savefig(folder / "replicas.png", dpi=70)
    pyplot.close(figure)

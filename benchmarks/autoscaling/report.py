"""The comparison for people: a table, and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.autoscaling.comparison import OURS, Row, verdicts
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
    """One run, as a line of a Markdown table."""
    got = row.figures
    return (
        f"| {row.contestant.name}{' (tuned)' if row.contestant.tuned else ''} | {100 * got.attainment:.1f} % "
        f"| {got.first_p50:.2f} / {got.first_p99:.2f} s | {100 * got.lost:.1f} % | {got.gpu_hours:.2f} "
        f"| {got.changes_per_hour:.1f} | {got.worst_backlog:,} |"
    )


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """All of it, trace by trace."""
    for trace, ahead in verdicts(rows):
        yield f"\n### {trace.name}\n\n{trace.what[0].upper()}{trace.what[1:]}.\n\n{HEAD}"
        yield from (line(row) for row in rows if row.trace is trace)
        ours = [row.figures.gpu_hours for row in rows if row.trace is trace and row.contestant.family == OURS]
        if not ours:
            continue
        within = [row for row in ahead if row.figures.gpu_hours <= max(ours)]
        dearer = [row for row in ahead if row.figures.gpu_hours > max(ours)]
        yield f"\nAhead of FastGen: {_named(within)}." if within else "\nNobody is ahead of FastGen at the same cost."
        if dearer:
            yield f"\nBetter than any of FastGen's settings, and dearer: {_named(dearer)}."


def _named(rows: Sequence[Row]) -> str:
    return "; ".join(
        f"{row.contestant.name} ({100 * row.figures.attainment:.1f} % at {row.figures.gpu_hours:.2f})" for row in rows
    )


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Two pictures: attainment against cost on every trace, and on two of them each family at its best over time."""
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
                if row.trace is trace and row.contestant.family == family
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
            found = [row for row in rows if row.trace is trace and row.contestant.family == family]
            if found:
                best = max(found, key=lambda row: row.figures.attainment)
                looks = [look for look in best.looks if look.time >= WARM_UP]
                times = [(look.time - WARM_UP) / 60 for look in looks]
                axis.step(times, [look.ready for look in looks], color=color, linewidth=1.2, label=best.contestant.name)
        axis.set_title(f"{trace.name}: ready replicas", fontsize=10)
        axis.legend(fontsize=7, loc="upper right")
        axis.grid(alpha=0.3)
    figure.supxlabel("minutes")
    figure.tight_layout()
    figure.savefig(folder / "replicas.png", dpi=70)
    pyplot.close(figure)

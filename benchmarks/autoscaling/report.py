"""Render the comparison as tables and plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.autoscaling.comparison import Grid, Row, Verdict, verdicts
from benchmarks.autoscaling.configurations import BASELINES, CLAIRVOYANT, CONSTANT, OURS
from benchmarks.autoscaling.traces import WARM_UP

_COLORS = {
    OURS: "#d62728",
    "HPA on waiting": "#7f7f7f",
    "Knative": "#1f77b4",
    "KubeAI": "#2ca02c",
    "llm-d V1": "#9467bd",
    "llm-d V2": "#ff7f0e",
    CONSTANT: "#000000",
    CLAIRVOYANT: "#17becf",
}
HEAD = (
    "| policy | in time, % | GPU-hours | first token p50 / p99 | lost | changes an hour | worst backlog, tokens |\n"
    "|---|---|---|---|---|---|---|"
)


def line(row: Row) -> str:
    """Return one policy as a row of a Markdown table: means over the seeds, and the worst backlog of all."""
    runs = row.runs

    def average(values: Iterable[float]) -> float:
        return sum(values) / len(runs)

    return (
        f"| {row.configuration.name}{' (tuned)' if row.configuration.is_rival and row.configuration.tuned else ''} "
        f"| {row.attainment.show(100, 1)} | {row.gpu_hours.show(1, 2)} "
        f"| {average(run.first_p50 for run in runs):.2f} / {average(run.first_p99 for run in runs):.2f} s "
        f"| {100 * average(run.lost for run in runs):.1f} % | {average(run.changes_per_hour for run in runs):.1f} "
        f"| {max(run.worst_backlog for run in runs):,} |"
    )


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table and a verdict for each trace."""
    judged = {verdict.trace: verdict for verdict in verdicts(rows)}
    for trace in dict.fromkeys(row.trace for row in rows):
        yield f"\n### {trace.name}\n\n{trace.what[0].upper()}{trace.what[1:]}.\n\n{HEAD}"
        yield from (line(row) for row in rows if row.trace is trace)
        if trace in judged:
            yield f"\n{_told(judged[trace])}"


SUMMARY_HEAD = (
    "| trace | FastGen's default | other policy | FastGen's lead, points | constant fleet | clairvoyant | way |\n"
    "|---|---|---|---|---|---|---|"
)


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a table with one row a trace: requests in time in percent at GPU-hours, with the number of seeds."""
    yield SUMMARY_HEAD
    for verdict in verdicts(rows):
        rival = "–"
        lead = "–"
        if verdict.rival is not None:
            rival = f"{verdict.rival.configuration.name}: {_seeded(verdict.rival)}"
            lead = f"{100 * (verdict.paired.attainment.mean - verdict.rival.attainment.mean):+.1f}"
        constant, clairvoyant, way = (
            "–" if value is None else f"{100 * value:.{digits}f}"
            for value, digits in ((verdict.constant, 1), (verdict.clairvoyant, 1), (verdict.way, 0))
        )
        way = way if verdict.way is None else f"{way} %"
        cells = (verdict.trace.name, _seeded(verdict.ours), rival, lead, constant, clairvoyant, way)
        yield f"| {' | '.join(cells)} |"


def _seeded(row: Row) -> str:
    return f"{row.attainment.show(100, 1)} at {row.gpu_hours.show(1, 2)} ({len(row.runs)})"


def _told(verdict: Verdict) -> str:
    ours = verdict.ours
    parts = [f"FastGen's default: {_point(ours)}."]
    if verdict.rival is not None:
        rival, paired = verdict.rival, verdict.paired
        lead = 100 * (paired.attainment.mean - rival.attainment.mean)
        parts.append(
            f"With {len(paired.runs)} seeds: {_point(paired)}; the best other policy at no more GPU-hours, "
            f"{rival.configuration.name}, {_point(rival)}: FastGen leads by {lead:.1f} points."
        )
    if verdict.constant is not None:
        parts.append(f"A constant fleet of that cost, chosen with hindsight, has {100 * verdict.constant:.1f} %.")
    if verdict.clairvoyant is not None:
        parts.append(f"The clairvoyant policy of that cost has {100 * verdict.clairvoyant:.1f} %.")
    if verdict.way is not None:
        parts.append(f"FastGen goes {100 * verdict.way:.0f} % of the way between the two.")
    return " ".join(parts)


def _point(row: Row) -> str:
    return f"{row.attainment.show(100, 1)} % at {row.gpu_hours.show(1, 2)}"


def draw(grid: Grid, rows: Sequence[Row], folder: Path) -> None:
    """Draw two plots: attainment against cost per trace, and replicas over time of each family's best run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    traces = list(dict.fromkeys(row.trace for row in rows))
    figure, cells = pyplot.subplots(2, (len(traces) + 1) // 2, figsize=(13, 6.5), squeeze=False)
    axes = [axis for line_ in cells for axis in line_]
    for axis, trace in zip(axes, traces, strict=False):
        for family, color in _COLORS.items():
            points = sorted(
                (row.gpu_hours.mean, 100 * row.attainment.mean)
                for row in rows
                if row.trace is trace and row.configuration.family == family
            )
            style = "o-" if family == OURS else "--" if family in BASELINES else "o"
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
    figure, cells = pyplot.subplots(len(shown), 1, figsize=(11, 3 * len(shown)), squeeze=False)
    for (axis,), trace in zip(cells, shown, strict=True):
        for family, color in _COLORS.items():
            found = [row for row in rows if row.trace is trace and row.configuration.family == family != CONSTANT]
            if found:
                best = max(found, key=lambda row: row.attainment.mean)
                run = grid.simulate(trace, best.configuration, 1)
                samples = [sample for sample in run.samples if sample.time >= WARM_UP]
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

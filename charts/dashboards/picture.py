"""Draw a dashboard, so that a person sees it without Grafana. Titles, units and layout are Grafana's, looks are not."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, DateFormatter
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from dashboards.queries import Query, Rendered, event_queries, panel_queries

# Runs a query, and returns the samples of each series by its labels.
Runner = Callable[[str], list["Series"]]

_COLUMNS: Final = 24
_WIDTH: Final = 1200
_UNIT: Final = 25  # height of a grid unit in pixels
_ROW_UNITS: Final = 1
_DPI: Final = 100
_TEXT: Final = "#24292e"
_MUTED: Final = "#6e7781"
_PALETTE: Final = (
    *("#3274d9", "#e0752d", "#2f9e44", "#c92a2a", "#8f3bb8", "#b8860b", "#0b7285", "#d6336c", "#5c6b7a", "#74b816"),
)
_COLOURS: Final = {"blue": "#3274d9", "orange": "#e0752d"}
_EVENT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Series:
    """A series: its labels, and values by time in seconds since the epoch."""

    labels: Mapping[str, str]
    points: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Span:
    """The time range of a picture, and the distance of samples, in seconds."""

    start: float
    end: float
    step: float


def draw(dashboard: Rendered, run: Runner, span: Span, *, colours: int = 96) -> bytes:
    """Return a PNG of the dashboard.

    Args:
        dashboard: as parsed from its JSON.
        run: evaluates an expression over the span. It knows the values of the dashboard's variables.
        span: of the samples.
        colours: size of the PNG's palette.
    """
    panels = dashboard["panels"]
    units = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels) + 2
    figure = Figure(figsize=(_WIDTH / _DPI, units * _UNIT / _DPI), dpi=_DPI, facecolor="#f4f5f5")
    figure.text(0.01, 1 - 0.9 / units, dashboard["title"], fontsize=14, color=_TEXT, va="center", weight="bold")
    events = [(query, _event_colour(dashboard, query), run(query.expression)) for query in event_queries(dashboard)]
    _legend_of_events(figure, events, 1 - 0.9 / units)
    for panel in panels:
        place = panel["gridPos"]
        box = _Box(
            place["x"] / _COLUMNS, 1 - (place["y"] + 2) / units, place["w"] / _COLUMNS, place["h"] / units, units
        )
        if panel["type"] == "row":
            y = box.top - 0.55 / units
            figure.text(0.01, y, panel["title"], fontsize=11, color=_TEXT, va="center", weight="bold")
            continue
        results = [(query, run(query.expression)) for query in panel_queries(panel)]
        corner = (box.left + 0.003, box.top - box.height + 0.12 / units)
        frame = Rectangle(corner, box.width - 0.006, box.height - 0.2 / units, facecolor="white", edgecolor="#d8dadd")
        frame.set(transform=figure.transFigure, zorder=-1)
        figure.add_artist(frame)
        figure.text(box.left + 0.009, box.top - 0.6 / units, panel["title"], fontsize=8.5, color=_TEXT, va="center")
        if panel["type"] == "stat":
            _draw_stat(figure, box, panel, results, span)
        else:
            if panel["type"] == "state-timeline":
                names = [query.name(each.labels) for query, series in results for each in series]
                axes = _axes(figure, box, span, 0.015 + 0.0046 * max(map(len, names), default=0))
                _draw_timeline(axes, panel, results, span)
            else:
                axes = _axes(figure, box, span)
                _draw_lines(figure, axes, box, panel, results, span)
            _draw_events(axes, events)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return _with_palette(Image.open(buffer).convert("RGB"), colours)


def _with_palette(image: Image.Image, colours: int) -> bytes:
    """Return a PNG with the most frequent colours, for a small file. The others become the nearest of these."""
    counted = image.getcolors(image.width * image.height)
    assert counted is not None
    most = [colour for _, colour in sorted(counted, reverse=True)[:colours]]
    palette = Image.new("P", (1, 1))
    palette.putpalette([part for colour in most for part in colour])  # type: ignore[attr-defined]
    buffer = io.BytesIO()
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class _Box:
    """A panel's place in fractions of the figure, and the figure's height in grid units."""

    left: float
    top: float
    width: float
    height: float
    units: int


def _axes(figure: Figure, box: _Box, span: Span, margin: float = 0.045) -> Axes:
    """Add the axes of a panel, with a margin on the left as a fraction of the figure."""
    below, above = 1.9 / box.units, 1.1 / box.units
    axes = figure.add_axes(
        (box.left + margin, box.top - box.height + below, box.width - margin - 0.023, box.height - below - above)
    )
    axes.set_xlim(_time(span.start), _time(span.end))
    axes.xaxis.set_major_locator(AutoDateLocator(minticks=3, maxticks=7))  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S" if span.end - span.start < 600 else "%H:%M"))  # type: ignore[no-untyped-call]
    axes.tick_params(labelsize=6.5, colors=_MUTED, length=0)
    axes.grid(color="#e9ebed", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in axes.spines.values():
        side.set_visible(False)
    return axes


def _draw_lines(
    figure: Figure, axes: Axes, box: _Box, panel: dict[str, Any], results: list[tuple[Query, list[Series]]], span: Span
) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults.get("custom", {})
    is_stacked = custom.get("stacking", {}).get("mode") == "normal"
    named = [(query.name(each.labels), each) for query, series in results for each in series]
    grid = [span.start + place * span.step for place in range(round((span.end - span.start) / span.step) + 1)]
    times = [_time(each) for each in grid]
    below = [0.0] * len(grid)
    for place, (_, series) in enumerate(named):
        colour = _PALETTE[place % len(_PALETTE)]
        by_time = {round((at - span.start) / span.step): value for at, value in series.points}
        values = [by_time.get(number, math.nan) for number in range(len(grid))]
        if is_stacked:
            above = [low + (0.0 if math.isnan(value) else value) for low, value in zip(below, values, strict=True)]
            axes.fill_between(times, below, above, color=colour, alpha=0.35, linewidth=0)
            values = [high if not math.isnan(value) else math.nan for high, value in zip(above, values, strict=True)]
            below = above
        axes.plot(times, values, color=colour, linewidth=1.1)
    low, high = axes.get_ylim()
    axes.set_ylim(defaults.get("min", low), defaults.get("max", max(high * 1.05, 1e-3)))
    unit = defaults.get("unit", "short")
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, unit)))
    if not named:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", color=_MUTED, fontsize=8)
    x, y = box.left + 0.012, box.top - box.height + 0.62 / box.units
    for place, (name, _) in enumerate(named):
        rest = f"+ {len(named) - place}"
        if x + 0.0051 * len(name) + 0.035 > box.left + box.width:
            figure.text(x, y, rest, fontsize=7, color=_MUTED, va="center")
            break
        figure.text(x, y, "■", fontsize=7, color=_PALETTE[place % len(_PALETTE)], va="center")
        figure.text(x + 0.009, y, name, fontsize=7, color=_TEXT, va="center")
        x += 0.0051 * len(name) + 0.021


def _draw_timeline(axes: Axes, panel: dict[str, Any], results: list[tuple[Query, list[Series]]], span: Span) -> None:
    colour = _COLOURS[panel["fieldConfig"]["defaults"]["color"]["fixedColor"]]
    rows = [(query.name(each.labels), each) for query, series in results for each in series]
    names = list(dict.fromkeys(name for name, _ in rows))
    for name, series in rows:
        place = names.index(name)
        for start, end in _runs([at for at, value in series.points if value], span.step):
            width = _time(end + span.step) - _time(start)
            axes.barh(place, width, left=_time(start), height=0.7, color=colour)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks([])
    for place, name in enumerate(names):
        # Beside the axes, as in Grafana.
        transform = axes.get_yaxis_transform()
        axes.text(-0.008, place, name, transform=transform, fontsize=7, color=_TEXT, va="center", ha="right")


def _draw_stat(
    figure: Figure, box: _Box, panel: dict[str, Any], results: list[tuple[Query, list[Series]]], span: Span
) -> None:
    is_name = panel["options"].get("textMode") == "name"
    unit = panel["fieldConfig"]["defaults"].get("unit", "short")
    values = []
    for query, series in results:
        for each in series:
            last = [value for at, value in each.points if at > span.end - 3 * span.step and not math.isnan(value)]
            if last:
                values.append((query.name(each.labels), shown(last[-1], unit)))
    texts = [name if is_name else value for name, value in values] or ["none"]
    for place, text in enumerate(texts):
        x = box.left + box.width * (place + 0.5) / len(texts)
        room = box.width / len(texts) * _WIDTH * 0.9
        size = min(19.0, room / max(1, len(text)) / 0.85)
        figure.text(x, box.top - box.height * 0.58, text, fontsize=size, color="#3274d9", ha="center", va="center")
        if not is_name and len(texts) > 1:
            y = box.top - box.height * 0.84
            figure.text(x, y, values[place][0], fontsize=7, color=_MUTED, ha="center", va="center")


def _draw_events(axes: Axes, events: list[tuple[Query, str, list[Series]]]) -> None:
    for _, colour, series in events:
        for each in series:
            # Grafana asks once a minute for the events of the last minute.
            for start, _ in _runs([at for at, _ in each.points], _EVENT_SECONDS):
                axes.axvline(_time(start), color=colour, linewidth=0.7, linestyle="--")


def _legend_of_events(figure: Figure, events: list[tuple[Query, str, list[Series]]], y: float) -> None:
    x = 0.985
    for query, colour, _ in reversed(events):
        figure.text(x, y, query.title, fontsize=8, color=_TEXT, va="center", ha="right")
        x -= 0.0052 * len(query.title) + 0.012
        figure.text(x, y, "┆", fontsize=11, color=colour, va="center", weight="bold")
        x -= 0.015


def _event_colour(dashboard: Rendered, query: Query) -> str:
    (found,) = [each["iconColor"] for each in dashboard["annotations"]["list"] if each["name"] == query.title]
    return _COLOURS[found]


def _runs(times: list[float], step: float) -> list[tuple[float, float]]:
    """Return first and last time of each run of samples without a gap."""
    runs: list[tuple[float, float]] = []
    for at in times:
        if runs and at - runs[-1][1] < 1.5 * step:
            runs[-1] = (runs[-1][0], at)
        else:
            runs.append((at, at))
    return runs


def _time(seconds: float) -> Any:
    return datetime.fromtimestamp(seconds)


def shown(value: float, unit: str) -> str:
    """Return a value with its unit, as Grafana shows it."""
    if math.isnan(value):
        return "-"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        if value == 0:
            return "0 s"
        size, name = next(each for each in ((60, "min"), (1, "s"), (1e-3, "ms"), (0, "µs")) if abs(value) >= each[0])
        return f"{value / (size or 1e-6):.3g} {name}"
    ending = {"reqps": " req/s", "ops": " /s", "wps": " /s"}.get(unit, "")
    if unit == "none" or abs(value) < 1000:
        return f"{value:.3g}{ending}"
    size, name = next(each for each in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= each[0])
    return f"{value / size:.3g} {name}{ending}"

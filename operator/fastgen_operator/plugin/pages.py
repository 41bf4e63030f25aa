"""The pages of `kubectl fastgen dashboard` as HTML, with pages.css and pages.js. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from typing import Final
from urllib.parse import quote

from fastgen_operator.plugin.engines import Figures, milliseconds
from fastgen_operator.plugin.overview import Overview
from fastgen_operator.plugin.screen import Cell, age_of, printable
from fastgen_operator.plugin.tables import coloured, condition_table, pod_table, unready_first

RELOAD_SECONDS: Final = 5
_CLASSES: Final = {"green": "good", "red": "bad"}

_STYLE: Final = files(__package__).joinpath("pages.css").read_text()
_SCRIPT: Final = files(__package__).joinpath("pages.js").read_text()
_LOAD_HEADER: Final = (
    *("Pod", "Steps", "Prompt/s", "Decode/s", "Running", "Waiting", "KV cache"),
    *("First token p50", "p99", "Between tokens p50", "p99"),
)
_LOAD_NOTE: Final = (
    "Steps: mean share of the token budget, filled by decode tokens (solid) and prompt tokens (hatched). Tokens per "
    "second and milliseconds since the page was last loaded."
)


def fleet_page(fleet: Sequence[Overview], now: datetime, nonce: str) -> str:
    """Return the page with a row for each resource, those that are not ready first."""
    rows = []
    for each in unready_first(fleet):
        path = f"/fgd/{quote(each.namespace)}/{quote(each.name)}"
        link = f'<td><a id="{path}" href="{path}">{_text(each.name)}</a>'
        pods = f"{each.replicas['ready']} of {each.replicas['desired']}"
        load = "" if each.load.utilization is None else f"{each.load.utilization:.0%}"
        change = "".join(f"{replicas}, {when}" for when, replicas, *_ in _changes(each, now)[:1])
        facts = (coloured(each.ready), each.reason, pods, load, change, each.problem_reasons)
        rows.append(_cells(each.namespace) + link + _cells(*facts))
    header = ("Namespace", "Name", "Ready", "Reason", "Pods", "Load", "Last change", "Problems")
    return page("FastGenDeployments", _table(header, rows) if rows else "<p>There are none.</p>", nonce)


def resource_page(
    found: Overview, load: Mapping[str, Figures | str], whole: Figures | None, now: datetime, nonce: str
) -> str:
    """Return the page of one resource.

    Args:
        load: the figures of each ready pod, or why there are none.
        whole: the figures of all pods together.
    """
    parts = ['<p><a id="all" href="/">all FastGenDeployments</a></p>']
    if found.problems:
        parts.append("<h2>What to do</h2><dl>")
        for problem in found.problems:
            parts.append(f"<dt><b>{_text(problem.reason)}</b> ({_text(problem.type)})</dt>")
            parts.append(f"<dd>{_text(problem.message)}<br><b>{_text(problem.remedy)}</b></dd>")
        parts.append("</dl>")
    for title, (header, *rows) in (("Conditions", condition_table(found, now)), ("Pods", pod_table(found, now))):
        parts += [f"<h2>{title}</h2>", _table(map(str, header), (_cells(*row) for row in rows))]
    if load:
        loads = [_load_row(name, figures) for name, figures in load.items()]
        loads += [] if whole is None else [_load_row("all", whole)]
        parts += ["<h2>Load</h2>", _table(_LOAD_HEADER, loads), f'<p class="note">{_text(_LOAD_NOTE)}</p>']
    if told := found.autoscaling.get("message"):
        parts += ["<h2>Autoscaler</h2>", f"<p>{_text(told)}</p>"]
    if changes := _changes(found, now):
        parts.append(_table(("When", "Replicas", "Reason", "Message"), (_cells(*change) for change in changes)))
    return page(f"{found.namespace}/{found.name}: {found.reason}", "".join(parts), nonce)


def _text(text: str) -> str:
    """Return text of the cluster as HTML, without control characters, which also turn the direction of text."""
    return escape(printable(text))


def _changes(found: Overview, now: datetime) -> list[tuple[str, str, str, str]]:
    """Return age, replicas, reason and message of the last changes, the newest first."""
    return [
        (
            f"{age_of(step['time'], now)} ago",
            f"{step['fromReplicas']} → {step['toReplicas']}",
            step["reason"],
            step["message"],
        )
        for step in found.autoscaling.get("history", ())
    ]


def page(title: str, body: str, nonce: str) -> str:
    """Return a page. Its only script renews the content, and runs with this nonce."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<noscript><meta http-equiv="refresh" content="{RELOAD_SECONDS}"></noscript>'
        f'<title>{_text(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style>'
        f"<main><h1>{_text(title)}</h1>{body}</main>"
        f'<p class="note">Renewed every {RELOAD_SECONDS} seconds. <span id="said" class="bad" role="status"></span></p>'
        f'<script nonce="{nonce}">const RELOAD_MILLISECONDS = {1000 * RELOAD_SECONDS};\n{_SCRIPT}</script></html>'
    )


def _load_row(name: str, figures: Figures | str) -> str:
    if not isinstance(figures, Figures):
        note = _text(figures or "measured from the next renewal on")
        return f'{_cells(name)}<td colspan="{len(_LOAD_HEADER) - 1}" class="note">{note}'
    numbers = (
        *(f"{figures.prompt_tokens:,.0f}", f"{figures.decode_tokens:,.0f}"),
        *(f"{figures.running:.0f}", f"{figures.waiting:.0f}", f"{figures.kv_cache:.0%}"),
        *map(milliseconds, (*figures.first_token, *figures.inter_token)),
    )
    return f"{_cells(name)}<td>{_bar(figures)}" + "".join(f'<td class="number">{number}' for number in numbers)


def _bar(figures: Figures) -> str:
    """Return the mean step as a stacked bar against the token budget."""
    tokens = figures.prompt_tokens + figures.decode_tokens
    decode = figures.step * figures.decode_tokens / tokens if tokens else 0.0
    prompt = figures.step - decode if tokens else 0.0
    label = f"{decode + prompt:.0%} of the token budget: {decode:.0%} decode, {prompt:.0%} prompt tokens"
    parts = "".join(
        f'<i class="{kind}" style="width:{share:.1%}"></i>' for kind, share in (("decode", decode), ("prompt", prompt))
    )
    return f'<span class="bar" role="img" aria-label="{label}" title="{label}">{parts}</span> {decode + prompt:.0%}'


def _cells(*cells: Cell | str) -> str:
    """Return the cells of a row, in colour if a Cell is green or red."""
    row = ""
    for cell in cells:
        shown = cell if isinstance(cell, Cell) else Cell(cell)
        style = _CLASSES.get(shown.colour)
        row += f'<td class="{style}">{_text(shown.text)}' if style else f"<td>{_text(shown.text)}"
    return row


def _table(header: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f'<th scope="col">{_text(title)}' for title in header)
    return f"<div><table><tr>{head}{''.join(f'<tr>{row}' for row in rows)}</table></div>"

"""The pages of `kubectl fastgen dashboard` as HTML, with pages.css and pages.js. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from importlib.resources import files
from typing import Final
from urllib.parse import quote

from fastgen_operator.plugin.overview import Overview
from fastgen_operator.plugin.screen import Cell, Row, age_of, printable
from fastgen_operator.plugin.tables import coloured, condition_table, pod_table, unready_first

RELOAD_SECONDS: Final = 5
_CLASSES: Final = {"green": "good", "red": "bad"}

_STYLE: Final = files(__package__).joinpath("pages.css").read_text()
_SCRIPT: Final = files(__package__).joinpath("pages.js").read_text()


def fleet_page(fleet: Sequence[Overview], now: datetime, nonce: str) -> str:
    """Return the page with a row for each resource, those that are not ready first."""
    header = ("Name", "Namespace", "Ready", "Reason", "Pods", "Load", "Last change", "Problems")
    rows = []
    for each in unready_first(fleet):
        pods = f"{each.replicas['ready']} of {each.replicas['desired']}"
        load = "" if each.load.utilization is None else f"{each.load.utilization:.0%}"
        change = "".join(f"{replicas}, {when}" for when, replicas, *_ in _changes(each, now)[:1])
        facts = (each.namespace, coloured(each.ready), each.reason, pods, load, change, each.problem_reasons)
        rows.append(_link(f"/fgd/{quote(each.namespace)}/{quote(each.name)}", each.name) + _cells(facts))
    return page("FastGenDeployments", _table(header, rows) if rows else "<p>There are none.</p>", nonce)


def resource_page(found: Overview, now: datetime, nonce: str) -> str:
    """Return the page of one resource: what to do, its conditions, its pods, and what the autoscaler did."""
    parts = ['<p><a id="all" href="/">all FastGenDeployments</a></p>']
    if found.problems:
        parts.append("<h2>What to do</h2><dl>")
        for problem in found.problems:
            parts.append(f"<dt><b>{_text(problem.reason)}</b> ({_text(problem.type)})</dt>")
            parts.append(f"<dd>{_text(problem.message)}<br><b>{_text(problem.remedy)}</b></dd>")
        parts.append("</dl>")
    changes: list[Row] = [("When", "Replicas", "Reason", "Message"), *_changes(found, now)]
    tables = {"Conditions": condition_table(found, now), "Pods": pod_table(found, now), "Autoscaler": changes}
    for title, (header, *rows) in tables.items():
        told = found.autoscaling.get("message", "") if title == "Autoscaler" else ""
        if rows or told:
            parts += [f"<h2>{title}</h2><p>{_text(told)}</p>", _table(map(str, header), map(_cells, rows))]
    return page(f"{found.namespace}/{found.name}: {found.reason}", "".join(parts), nonce)


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


def _changes(found: Overview, now: datetime) -> list[tuple[str, str, str, str]]:
    """Return age, replicas, reason and message of the last changes, the newest first."""
    steps = found.autoscaling.get("history", ())
    replicas = (f"{step['fromReplicas']} → {step['toReplicas']}" for step in steps)
    ages = (f"{age_of(step['time'], now)} ago" for step in steps)
    return [(age, of, step["reason"], step["message"]) for age, of, step in zip(ages, replicas, steps, strict=True)]


def _text(text: str) -> str:
    """Return text of the cluster as HTML, without control characters or marks that reorder text."""
    return escape(printable(text))


def _link(path: str, text: str) -> str:
    return f'<td><a id="{path}" href="{path}">{_text(text)}</a>'


def _cells(row: Row) -> str:
    """Return the cells of a row, in colour if a Cell is green or red."""
    cells = (each if isinstance(each, Cell) else Cell(each) for each in row)
    return "".join(f'<td class="{_CLASSES.get(cell.colour, "")}">{_text(cell.text)}' for cell in cells)


def _table(header: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f'<th scope="col">{_text(title)}' for title in header)
    return f"<div><table><tr>{head}{''.join(f'<tr>{row}' for row in rows)}</table></div>"

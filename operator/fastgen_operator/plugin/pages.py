"""The pages of `kubectl fastgen dashboard` as HTML, without external assets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Final
from urllib.parse import quote

from fastgen_operator.plugin.engines import Figures, milliseconds
from fastgen_operator.plugin.overview import Overview
from fastgen_operator.plugin.screen import Cell, age_of
from fastgen_operator.plugin.tables import coloured, condition_table, pod_table, unready_first

RELOAD_SECONDS: Final = 5
_CLASSES: Final = {"green": "good", "red": "bad"}

_STYLE: Final = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif;
  --ground: #fff; --ink: #16181d; --quiet: #565d6b; --line: #d5d9e0; --link: #1f5fbf; --good: #1a7f37; --bad: #cf222e }
@media (prefers-color-scheme: dark) { :root { --ground: #101216; --ink: #e8eaee; --quiet: #a3abb8; --line: #363c47;
  --link: #8ab4f8; --good: #57d364; --bad: #ff9a91 } }
body { max-width: 80rem; margin: 2rem auto; padding: 0 1rem; background: var(--ground); color: var(--ink) }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem; margin-top: 2rem } a { color: var(--link) }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
div { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line) }
th { font-weight: 600; white-space: nowrap } .number { text-align: right; font-variant-numeric: tabular-nums }
.good { color: var(--good) } .bad { color: var(--bad) } .note { color: var(--quiet) }
.bar { display: inline-flex; width: 10rem; height: .8rem; border: 1px solid var(--quiet) }
.bar i { background: var(--ink) }
.bar .prompt { background: repeating-linear-gradient(135deg, var(--ink) 0 1.5px, transparent 1.5px 5px) }
"""
# Replaces the content instead of the page, so that focus and scroll position stay. Waits while the page is hidden or
# text is selected.
_SCRIPT: Final = """
const said = document.getElementById("said");
setInterval(async () => {
  if (document.hidden || !getSelection().isCollapsed) return;
  try {
    const text = await (await fetch(location.href)).text();
    const next = new DOMParser().parseFromString(text, "text/html");
    const focused = document.activeElement.id;
    document.querySelector("main").replaceWith(next.querySelector("main"));
    document.title = next.title;
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
    said.textContent = "";
  } catch {
    said.textContent = "kubectl fastgen dashboard does not answer. What is shown is old.";
  }
}, %d);
"""
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
        link = f'<td><a id="{path}" href="{path}">{escape(each.name)}</a>'
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
            parts.append(f"<dt><b>{escape(problem.reason)}</b> ({escape(problem.type)})</dt>")
            parts.append(f"<dd>{escape(problem.message)}<br><b>{escape(problem.remedy)}</b></dd>")
        parts.append("</dl>")
    for title, (header, *rows) in (("Conditions", condition_table(found, now)), ("Pods", pod_table(found, now))):
        parts += [f"<h2>{title}</h2>", _table(map(str, header), (_cells(*row) for row in rows))]
    if load:
        loads = [_load_row(name, figures) for name, figures in load.items()]
        loads += [] if whole is None else [_load_row("all", whole)]
        parts += ["<h2>Load</h2>", _table(_LOAD_HEADER, loads), f'<p class="note">{escape(_LOAD_NOTE)}</p>']
    if told := found.autoscaling.get("message"):
        parts += ["<h2>Autoscaler</h2>", f"<p>{escape(told)}</p>"]
    if changes := _changes(found, now):
        parts.append(_table(("When", "Replicas", "Reason", "Message"), (_cells(*change) for change in changes)))
    return page(f"{found.namespace}/{found.name}: {found.reason}", "".join(parts), nonce)


def _changes(found: Overview, now: datetime) -> list[tuple[str, str, str, str]]:
    """Return age, replicas, reason and message of the autoscaler's last changes, the newest first."""
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
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style>'
        f"<main><h1>{escape(title)}</h1>{body}</main>"
        f'<p class="note">Renewed every {RELOAD_SECONDS} seconds. <span id="said" class="bad" role="status"></span></p>'
        f'<script nonce="{nonce}">{_SCRIPT % (RELOAD_SECONDS * 1000)}</script></html>'
    )


def _load_row(name: str, figures: Figures | str) -> str:
    if not isinstance(figures, Figures):
        note = escape(figures or "measured from the next renewal on")
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
        row += f'<td class="{style}">{escape(shown.text)}' if style else f"<td>{escape(shown.text)}"
    return row


def _table(header: Iterable[str], rows: Iterable[str]) -> str:
    head = "".join(f'<th scope="col">{escape(title)}' for title in header)
    return f"<div><table><tr>{head}{''.join(f'<tr>{row}' for row in rows)}</table></div>"

"""The pages of `kubectl fastgen dashboard` as HTML, without external assets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any, Final
from urllib.parse import quote

from fastgen_operator.plugin.engines import Figures, milliseconds
from fastgen_operator.plugin.overview import Overview
from fastgen_operator.plugin.screen import age_of

RELOAD_SECONDS: Final = 5
_CLASSES: Final = {"True": "good", "Ready": "good", "False": "bad", "Failing": "bad", "Lost": "bad"}
# Of these conditions, True is not good news.
_LIMITS: Final = ("ScalingLimited",)

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
# It replaces the content instead of the page, so that focus and place stay. It waits while text is selected or hidden.
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
    """Return the page with a row for each resource, the ones that are not ready first."""
    rows = []
    for each in sorted(fleet, key=lambda each: (each.ready == "True", each.namespace, each.name)):
        share = each.load.utilization
        last = next(iter(each.autoscaling.get("history", ())), None)
        change = (
            "" if last is None else f"{last['fromReplicas']} → {last['toReplicas']}, {age_of(last['time'], now)} ago"
        )
        path, name = f"/fgd/{quote(each.namespace)}/{quote(each.name)}", escape(each.name)
        rows.append(
            (
                *(_cell(each.namespace), f'<td><a id="{path}" href="{path}">{name}</a>'),
                *(_cell(each.ready, _CLASSES.get(each.ready, "")), _cell(each.reason)),
                _cell(f"{each.replicas['ready']} of {each.replicas['desired']}"),
                *(_cell("" if share is None else f"{share:.0%}"), _cell(change)),
                _cell(", ".join(dict.fromkeys(problem.reason for problem in each.problems))),
            )
        )
    header = ("Namespace", "Name", "Ready", "Reason", "Pods", "Load", "Last change", "Problems")
    return page("FastGenDeployments", _table(header, rows) if rows else "<p>There are none.</p>", nonce)


def resource_page(
    found: Overview, load: Mapping[str, Figures | str], whole: Figures | None, now: datetime, nonce: str
) -> str:
    """Return the page of one resource.

    Args:
        load: the figures of each ready pod, or why there are none.
        whole: those of all pods together.
    """
    parts = ['<p><a id="all" href="/">all FastGenDeployments</a></p>']
    if found.problems:
        parts.append("<h2>What to do</h2><dl>")
        for problem in found.problems:
            parts.append(f"<dt><b>{escape(problem.reason)}</b> ({escape(problem.type)})</dt>")
            parts.append(f"<dd>{escape(problem.message)}<br><b>{escape(problem.remedy)}</b></dd>")
        parts.append("</dl>")
    conditions = [
        (
            *(_cell(each["type"]), _cell(each["status"], _colour(each)), _cell(each["reason"])),
            *(_cell(age_of(each["lastTransitionTime"], now)), _cell(each["message"])),
        )
        for each in found.conditions
    ]
    parts += ["<h2>Conditions</h2>", _table(("Condition", "Status", "Reason", "Since", "Message"), conditions)]
    pods = [
        (
            *(_cell(pod.name), _cell(pod.state, _CLASSES.get(pod.state, "")), _cell(str(pod.restarts))),
            *(_cell(pod.node), _cell(age_of(pod.created, now)), _cell(pod.message)),
        )
        for pod in found.pods
    ]
    parts += ["<h2>Pods</h2>", _table(("Pod", "State", "Restarts", "Node", "Age", "Message"), pods)]
    if load:
        rows = [_load_row(name, figures) for name, figures in load.items()]
        rows += [] if whole is None else [_load_row("all", whole)]
        parts += ["<h2>Load</h2>", _table(_LOAD_HEADER, rows), f'<p class="note">{escape(_LOAD_NOTE)}</p>']
    if told := found.autoscaling.get("message"):
        parts += ["<h2>Autoscaler</h2>", f"<p>{escape(told)}</p>"]
    changes = [
        (
            *(_cell(f"{age_of(step['time'], now)} ago"), _cell(f"{step['fromReplicas']} → {step['toReplicas']}")),
            *(_cell(step["reason"]), _cell(step["message"])),
        )
        for step in found.autoscaling.get("history", ())
    ]
    if changes:
        parts.append(_table(("When", "Replicas", "Reason", "Message"), changes))
    return page(f"{found.namespace}/{found.name}: {found.reason}", "".join(parts), nonce)


def page(title: str, body: str, nonce: str) -> str:
    """Return a page. Its only script is the one that renews the content; it runs with this nonce."""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<noscript><meta http-equiv="refresh" content="{RELOAD_SECONDS}"></noscript>'
        f'<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style>'
        f"<main><h1>{escape(title)}</h1>{body}</main>"
        f'<p class="note">Renewed every {RELOAD_SECONDS} seconds. <span id="said" class="bad" role="status"></span></p>'
        f'<script nonce="{nonce}">{_SCRIPT % (RELOAD_SECONDS * 1000)}</script></html>'
    )


def _load_row(name: str, figures: Figures | str) -> tuple[str, ...]:
    if not isinstance(figures, Figures):
        words = escape(figures or "measured from the next renewal on")
        return _cell(name), f'<td colspan="{len(_LOAD_HEADER) - 1}" class="note">{words}'
    numbers = (
        *(f"{figures.prompt_tokens:,.0f}", f"{figures.decode_tokens:,.0f}"),
        *(f"{figures.running:.0f}", f"{figures.waiting:.0f}", f"{figures.kv_cache:.0%}"),
        *map(milliseconds, (*figures.first_token, *figures.inter_token)),
    )
    return (_cell(name), f"<td>{_bar(figures)}", *(_cell(number, "number") for number in numbers))


def _bar(figures: Figures) -> str:
    """Return the mean step as a stacked bar against the token budget."""
    tokens = figures.prompt_tokens + figures.decode_tokens
    decode = figures.step * figures.decode_tokens / tokens if tokens else 0.0
    prompt = figures.step - decode if tokens else 0.0
    words = f"{decode + prompt:.0%} of the token budget: {decode:.0%} decode, {prompt:.0%} prompt tokens"
    parts = "".join(
        f'<i class="{kind}" style="width:{share:.1%}"></i>' for kind, share in (("decode", decode), ("prompt", prompt))
    )
    return f'<span class="bar" role="img" aria-label="{words}" title="{words}">{parts}</span> {decode + prompt:.0%}'


def _colour(condition: dict[str, Any]) -> str:
    return "" if condition["type"] in _LIMITS else _CLASSES.get(condition["status"], "")


def _cell(text: str, of: str = "") -> str:
    return f'<td class="{of}">{escape(text)}' if of else f"<td>{escape(text)}"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(title)}' for title in header)
    body = "".join("<tr>" + "".join(row) for row in rows)
    return f"<div><table><tr>{head}{body}</table></div>"

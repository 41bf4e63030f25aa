"""The scorecard of contenders: `python -m benchmarks.serving.scorecard CONTENDERS.toml --out FOLDER [--only SECTION]`.

Measures each section of a TOML file (`cpu.toml`), adds the results to FOLDER/NAME.json, and writes its tables into
FOLDER/NAME.md between two comments; NAME is that of the TOML file. A contender that is not present or fails has a row
with the reason. Nothing else should run on the machine.

A section has the keys `title`, `text`, `rounds`, `ratios` (pairs of contenders) and `contenders`, and a load: `flags`
of `fastgen bench` for the contenders of `compare.py`, or a table `long_prompts` for those of `long_prompts.py`. Its key
`figures` names the columns to show, by default all. A contender's `version` is a command that prints it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.serving import compare, long_prompts
from benchmarks.serving.contenders import HERE, ContenderError, Outcome, expand, in_turn, medians, ratios
from fastgen.model.processor import this_processor

BEGIN: Final = "<!-- measured: written by benchmarks/serving/scorecard.py -->"
END: Final = "<!-- end of what was measured -->"


def measure_section(section: Mapping[str, Any], svg: Path | None) -> dict[str, Any]:
    """Measure the contenders of a section, and return what is recorded of it."""
    contenders, rounds = section["contenders"], section["rounds"]
    versions = {name: version(contender) for name, contender in contenders.items()}
    if "long_prompts" in section:
        load = long_prompts.Load(**section["long_prompts"])
        outcomes, found = long_prompts.measure_all(contenders, load, rounds)
        if svg is not None and found:
            long_prompts.draw(found, load, svg)
    else:
        flags = shlex.split(section["flags"])
        outcomes = in_turn(contenders, rounds, lambda _name, each, seed: compare.measure(each, flags, seed))
    return {
        "title": section["title"],
        "text": section["text"],
        "machine": machine(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "ratios": section["ratios"],
        "figures": section.get("figures"),
        "contenders": {
            name: {
                "version": versions[name],
                "command": contenders[name].get("server") or contenders[name]["run"],
                "rounds": outcome.rounds,
                "reason": outcome.reason,
            }
            for name, outcome in outcomes.items()
        },
    }


def machine() -> str:
    """Return the processor, its instruction sets, and the number of cores."""
    return f"{this_processor()}, {os.cpu_count()} cores"


def version(contender: Mapping[str, Any]) -> str:
    """Return the first line that a contender's command for its version prints, or "unknown"."""
    with contextlib.suppress(OSError, KeyError, IndexError, ContenderError):
        command = shlex.split(expand(contender["version"]))
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
        return (done.stdout + done.stderr).strip().splitlines()[0]
    return "unknown"


def tables(recorded: Mapping[str, Any]) -> Iterator[str]:
    """Yield the Markdown of the recorded sections."""
    for section in recorded.values():
        outcomes = {name: Outcome(found["rounds"], found["reason"]) for name, found in section["contenders"].items()}
        measured = [outcome for outcome in outcomes.values() if outcome.rounds]
        rounds = max((len(outcome.rounds) for outcome in measured), default=0)
        known = measured[0].rounds[0] if measured else dict[str, float]()
        figures = section.get("figures") or [name for name in known if name not in (*compare.PARTS, compare.PROCESSOR)]
        yield f"## {section['title']}\n"
        number = "one round" if rounds == 1 else f"medians of {rounds} rounds"
        yield f"{section['text']} {section['machine']}, {section['date']}, {number}.\n"
        yield f"{medians(outcomes, figures)}\n"
        if rows := ratios(outcomes, section["ratios"], figures):
            yield f"{rows}\n"
        parts = {name: outcome for name, outcome in outcomes.items() if compare.PARTS[0] in (outcome.rounds or [{}])[0]}
        if parts and not section.get("figures"):
            yield f"The mean time to a first token by parts:\n\n{medians(parts, compare.PARTS)}\n"
        yield "| contender | version | command |\n|---|---|---|"
        for name, found in section["contenders"].items():
            yield f"| {name} | {found['version']} | `{found['command']}` |"
        yield ""


def write_page(page: Path, recorded: Mapping[str, Any]) -> None:
    """Replace what a page has between the two comments; create a page that does not exist."""
    text = page.read_text() if page.exists() else f"# {page.stem}\n\n{BEGIN}\n{END}\n"
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n" + "\n".join(tables(recorded)) + f"\n{END}{after}")


def main() -> None:
    """Measure the sections and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contenders", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the page and the results are")
    parser.add_argument("--only", action="append", metavar="SECTION", help="measure this one; can be repeated")
    parser.add_argument("--tables", action="store_true", help="measure nothing; write the page from the results")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the streams beside long prompts")
    options = parser.parse_args()
    results = options.out / f"{options.contenders.stem}.json"
    sections = tomllib.loads(options.contenders.read_text())
    recorded = json.loads(results.read_text()) if results.exists() else {}
    if not options.tables:
        for name in options.only or sections:
            recorded[name] = measure_section(sections[name], options.svg)
            recorded = {each: recorded[each] for each in sections if each in recorded}
            results.write_text(json.dumps(recorded, indent=1) + "\n")
    write_page(results.with_suffix(".md"), recorded)


if __name__ == "__main__":
    main()

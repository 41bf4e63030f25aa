"""The table `Where changes go` of CONTRIBUTING.md, held to what earlier changes of each kind touched."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from chart_files.files import ROOT

PRODUCT = ("engine/fastgen", "operator/fastgen_operator", "gateway/fastgen_gateway", "charts/dashboards")
MOST_FILES = 4

# A name that an earlier change of the kind introduced, as a pattern, and what NAME was then. The files of code that
# contain the name are those that the change touched.
EXAMPLES = {
    "add a sampling parameter": ("typical_p|TYPICAL_P", ""),
    "add a model family": ("gemma2", ""),
    "add a metric of each step": ("swapped_out|fastgen_preemptions_total", ""),
    "add a tool-call format": ("qwen3_coder|Qwen3Coder", "qwen3_coder"),
    "add an autoscaling signal and its reason": ("kv_used|KVCacheFull", ""),
    "add a condition": ("pods_restricted|PODS_RESTRICTED|PodsRestricted", "pods_restricted"),
    "add a reason of a condition": ("VolumeNotBound", "model_cached"),
    "add a reason for which a pod fails": ("OutOfMemory", ""),
    "add a subcommand of `kubectl fastgen`": ("drain_test|_evict", "drain_test"),
    "add a model source": ("S3Remote|s3://.*", "s3"),
    "read another format of quantised weights": ("AWQ|AWQWeight", "awq"),
}
# Changes without an example of a name of their own: what must be in each file.
POINTS = {
    "add a CRD field that becomes a variable of the pod's environment": ("class Engine(", '"env": ['),
    "reject a request field by name, or accept it without effect": ("class ExtensionFields",),
    "change which sequence is preempted": ("class Preemption",),
    "add a flag that the scheduler reads": ("class EngineConfig", "config.preemption"),
    "add a flag that decides which requests are accepted": (
        "trust_request_chat_template",
        "self.settings.trust_request_chat_template",
    ),
    "add a flag about the model's tokenizer, chat template or parsers": (
        "reasoning_parser",
        "config.reasoning_parser",
        "reasoning_format:",
    ),
    "reject requests that the model cannot serve": ("def check(",),
    "fail an admitted request for a new reason": (
        "OUT_OF_MEMORY =",
        "def out_of_memory()",
        "return out_of_memory()",
    ),
    "add an alert": ("- alert: FastGenCrashLoop",),
    "read another type of GGUF tensors": ("TYPES",),
    "add a value of the chart that becomes an argument of the operator": (
        "scrapeSeconds:",
        '"scrapeSeconds":',
        "--scrape-seconds={{ .Values.operator.scrapeSeconds }}",
    ),
}
# What must be in the files that only some changes touch, and in the page.
ALSO = {
    "add a model family": ('"post_attention_layernorm": "ffn_norm"',),
    "add a tool-call format": ('"qwen3_coder" if "<function=" in template',),
    "add an autoscaling signal and its reason": ("class Rates",),
}
ON_PAGE = {
    "add a metric of each step": "fastgen_preemptions_total",
    "add an autoscaling signal and its reason": "| `KVCacheFull` |",
    "add a condition": "### PodsRestricted",
    "add a reason of a condition": "| `VolumeNotBound` |",
    "add a reason for which a pod fails": "| `OutOfMemory` |",
    "add a subcommand of `kubectl fastgen`": "## drain-test",
    "add an alert": "### FastGenCrashLoop",
    "reject a request field by name, or accept it without effect": "| `lora_path` |",
    "read another format of quantised weights": "| `awq` |",
}
# Rows that add to another one.
MORE_FOR = {
    "let generation_config.json set a sampling parameter": "add a sampling parameter",
    "apply a sampling parameter on GPUs, too": "add a sampling parameter",
}


@dataclass(frozen=True)
class Row:
    """A change, its files, those that only some of these changes touch, its page, and the number in the table."""

    change: str
    files: tuple[str, ...]
    optional: tuple[str, ...]
    page: str | None
    number: str


def table() -> dict[str, Row]:
    """Return the rows by change."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split("\n## Where changes go\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:2] == "| "]
    return {row[0]: _row(*row) for row in rows[1:]}


def _row(change: str, files: str, number: str) -> Row:
    code, _, page = files.partition("; page: ")
    always, _, sometimes = code.partition(", for ")
    paths = re.compile(r"`([\w./-]+)`")
    return Row(change, tuple(paths.findall(always)), tuple(paths.findall(sometimes)), page.strip("`") or None, number)


@cache
def words(file: Path) -> frozenset[str]:
    """Return the names and strings of a module, without docstrings and comments, or the keys of a data file."""
    if file.suffix == ".yaml":
        return frozenset(re.findall(r"^ *(\w+):", file.read_text(), re.MULTILINE))
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        found |= {
            value for name in ("id", "attr", "arg", "name") if isinstance(value := getattr(node, name, None), str)
        }
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= set(node.module.split("."))
    return frozenset(found)


def touched(pattern: str) -> set[str]:
    """Return the files of the product that contain a word that matches."""
    files = (file for folder in PRODUCT for kind in ("py", "yaml") for file in (ROOT / folder).rglob(f"*.{kind}"))
    return {str(file.relative_to(ROOT)) for file in files if any(re.fullmatch(pattern, word) for word in words(file))}


def test_every_row_is_checked_by_an_example_or_by_what_its_files_contain() -> None:
    assert set(table()) == EXAMPLES.keys() | POINTS.keys() | MORE_FOR.keys()


@pytest.mark.parametrize("row", table().values(), ids=lambda row: row.change)
def test_files_and_pages_exist_and_are_counted(row: Row) -> None:
    for path in (*row.files, *row.optional, *filter(None, [row.page])):
        assert (ROOT / path).parent.is_dir() if "NAME" in path else (ROOT / path).is_file(), path
    least, most = len(row.files), len(row.files) + len(row.optional)
    assert row.number == (f"{least} or {most}" if row.optional else str(least))
    assert most <= MOST_FILES


@pytest.mark.parametrize("change", EXAMPLES)
def test_an_earlier_change_touched_the_files_of_its_row(change: str) -> None:
    rows = [table()[change], *(table()[more] for more, base in MORE_FOR.items() if base == change)]
    pattern, name = EXAMPLES[change]
    files = {path.replace("NAME", name) for row in rows for path in row.files}
    optional = {path for row in rows for path in row.optional}
    assert files <= touched(pattern) <= files | optional


@pytest.mark.parametrize("row", table().values(), ids=lambda row: row.change)
def test_a_further_file_and_the_page_contain_what_the_change_extends(row: Row) -> None:
    for path, text in zip(row.optional, ALSO.get(row.change, ()), strict=True):
        assert text in (ROOT / path).read_text(), path
    assert (row.page is None) == (row.change not in ON_PAGE)
    if row.page is not None:
        assert ON_PAGE[row.change] in (ROOT / row.page).read_text(), row.page


@pytest.mark.parametrize("change", POINTS)
def test_each_file_contains_what_the_change_extends(change: str) -> None:
    for path, text in zip(table()[change].files, POINTS[change], strict=True):
        assert text in (ROOT / path).read_text(), path

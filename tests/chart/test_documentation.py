"""The documentation: the site builds, and what it tells to install exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harness.chart import CHART, Helm
from support.pages import PAGES, ROOT, blocks, documents

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """Strict: a link or an anchor that does not exist, and a page that the navigation omits, are errors."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    home = (tmp_path / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="(?:https?:)?//(?!squidfunk)[^"]*\.(?:js|css|woff2?)', home), "external assets"


def test_the_readme_leads_with_a_picture_a_table_and_the_two_commands() -> None:
    readme = (ROOT / "README.md").read_text()
    lead, _, rest = readme.partition("\n```")
    assert len(lead.splitlines()) < 40
    picture, table = lead.find("\n!["), lead.find("\n|")
    assert -1 < picture < table
    assert len(re.findall(r"^\|[-: |]+\|$", lead, re.MULTILINE)) == 1
    assert re.match(r"sh\nmake up .*\nmake test .*\n```\n", rest)


def test_every_picture_has_a_description_and_is_shown_or_linked() -> None:
    used = set()
    for page in PAGES:
        text = page.read_text()
        assert "![](" not in text, page
        used |= {(page.parent / target).resolve() for target in re.findall(r"\]\(([^)\s]*images/[^)\s]+)\)", text)}
    assert used == {file for file in (ROOT / "docs" / "images").rglob("*") if file.is_file()}


def test_every_block_of_chart_values_is_accepted(helm: Helm, tmp_path: Path) -> None:
    """Each YAML block whose top-level names are all values of the chart is rendered with it."""
    places = []
    for place, values in documents():
        if "apiVersion" not in values and values.keys() <= VALUES.keys():
            file = tmp_path / f"{len(places)}.yaml"
            file.write_text(yaml.safe_dump(values))
            helm.render("--values", str(file))
            places.append(place)
    assert {"docs/how-to/openshift.md", "docs/how-to/air-gapped.md"} <= {place.partition(":")[0] for place in places}


def test_commands_set_only_values_that_exist(helm: Helm) -> None:
    settings = {
        setting
        for language in ("sh", "console")
        for _, text in blocks(language)
        for setting in re.findall(r"--set ([\w.\[\]]+)=", text)
    }
    assert settings
    for setting in settings:
        helm.render("--set", f"{setting}=x")


@pytest.mark.parametrize("command", ["install", "upgrade", "rollback", "uninstall", "test"])
def test_commands_use_flags_that_helm_has(helm: Helm, command: str) -> None:
    known = set(re.findall(r"--[a-z-]+", helm.run(command, "--help")))
    for language in ("sh", "console"):
        for place, text in blocks(language):
            for line in text.replace("\\\n", " ").splitlines():
                if re.match(rf"(\$ )?helm {command}\b", line):
                    assert set(re.findall(r"(?<= )--[a-z-]+", line)) <= known, place

"""The documentation: the site builds, and what it tells to install exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fastgen.server.openai.generation_request import ChatRequest
from harness.chart import CHART, Helm
from harness.edits import fields, spec_schema
from support.pages import PAGES, ROOT, blocks, documents

# By a pattern: the tests that try the command of a line in a shell block, or that check what it names.
TRIED_BY = {
    r"kubectl .*": "tests/operator/api/test_page_commands.py",
    r"fastgen .*": "tests/engine/commands/test_pages.py",
    r"helm (install|test) fastgen .*": "tests/e2e/test_quickstart.py",
    r"helm upgrade .*": "tests/chart/test_api_server.py",
    r"helm (package|push) .*|gpg .*|rm .*|sed .*|docker buildx .*": "tests/chart/test_releasing_page.py",
    r"curl http://127.0.0.1:8000/v1/chat/completions .*": "tests/e2e/test_quickstart.py",
    r"buildah .*": "tests/operator/api/test_model_images_page.py",
    r"make (up|test)": "tests/e2e/test_installation.py",
    # Below.
    r"(PYTHONPATH=engine )?(timeout \d+ )?python -m .*": "tests/chart/test_documentation.py",
    r"docker (build|push) .*|pip install .*": "tests/chart/test_documentation.py",
}
# Where the modules of `python -m` are, and those of other projects.
CODE = (".", "engine", "operator", "gateway", "tests", "charts")
OTHERS_MODULES = ("pytest", "debugpy", "mii.entrypoints.openai_api_server")
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
    # Material loads this from another host: such a diagram is source text where that host cannot be reached.
    assert [page for page in tmp_path.rglob("*.html") if 'class="mermaid"' in page.read_text()] == []
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


def shell_lines() -> Iterator[tuple[str, str]]:
    """Yield "page:line" and each command of the shell blocks, without a prompt, a comment or a loop around it."""
    for language, prompt in (("sh", ""), ("console", "$ ")):
        for place, text in blocks(language):
            for line in text.replace("\\\n", " ").splitlines():
                command = re.sub(r"\s+# .*|\s&$", "", line.removeprefix(prompt)).strip()
                inner = re.sub(r"^for .*?(?:; do |; do$)|; done$|^done$", "", command).strip()
                if line.startswith(prompt) and inner:
                    yield place, " ".join(inner.split())


def test_each_command_of_a_shell_block_is_tried_by_a_test() -> None:
    used = set()
    for place, command in shell_lines():
        matching = [pattern for pattern in TRIED_BY if re.fullmatch(pattern, command)]
        assert len(matching) == 1, f"{place}: {command}"
        used.update(matching)
    assert used == set(TRIED_BY)
    assert all((ROOT / test).is_file() for test in TRIED_BY.values())


def source_of(module: str) -> str:
    """Return the text of a module, or of the modules of a package."""
    places = [ROOT / folder / module.replace(".", "/") for folder in CODE]
    files = [file for place in places for file in (place.with_suffix(".py"), *place.glob("*.py")) if file.is_file()]
    assert files, f"no module {module}"
    return "".join(file.read_text() for file in files)


def test_modules_that_pages_run_exist_and_have_the_flags() -> None:
    makefile = (ROOT / "Makefile").read_text()
    found = set()
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        text = re.sub(r"`[^`\n]+\n *[^`\n]+`", lambda code: code[0].replace("\n", " "), page.read_text())
        for module, rest in re.findall(r"\bpython -m ([\w.]+)((?: [^`\n#]*)?)", text.replace("\\\n", " ")):
            if module not in OTHERS_MODULES:
                found.add(module.partition(".")[0])
                source = source_of(module)
                for flag in re.findall(r"(?<= )--[a-z-]+", rest):
                    assert f'"{flag}"' in source or f"-m {module} {flag}\n" in makefile, f"{page.name}: {module} {flag}"
            for path in re.findall(r"(?<= )tests/\S+", rest):
                assert all((ROOT / each).exists() for each in braces(path)), f"{page.name}: {path}"
    assert found == {"benchmarks", "cluster", "dashboards", "engine", "fastgen", "fastgen_operator"}


def braces(path: str) -> list[str]:
    """Return the paths of one with alternatives in braces, as a shell does."""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", path)
    return [f"{found[1]}{each}{found[3]}" for each in found[2].split(",")] if found else [path]


def test_make_targets_extras_and_build_targets_on_pages_exist() -> None:
    makefile, recipe = (ROOT / "Makefile").read_text(), (ROOT / "Dockerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    built, pushed = set(), set()
    for place, command in shell_lines():
        match command.split():
            case ["make", target]:
                assert re.search(rf"^{target}:.*##", makefile, re.MULTILINE), place
            case ["pip", "install", package]:
                assert re.fullmatch(r"'\.\[(\w+)\]'", package), place
                assert package[3:-2] in extras, place
            case ["docker", "build", "--target", target, "--tag", name, "."]:
                assert re.search(rf"^FROM \S+ AS {target}$", recipe, re.MULTILINE), place
                built.add(name)
            case ["docker", "push", name]:
                pushed.add(name)
            case ["docker", "build", *_]:
                pytest.fail(f"{place}: {command}")
    assert built == pushed == {f"REGISTRY/{VALUES[name]['image']}" for name in ("engine", "operator", "gateway")}


def test_requests_that_pages_send_with_curl_are_valid() -> None:
    found = [command for _, command in shell_lines() if command.startswith("curl ")]
    for command in found:
        _, url, *flags = shlex.split(command)
        assert flags[:3] == ["-H", "Content-Type: application/json", "-d"]
        assert url.endswith("/v1/chat/completions")
        assert ChatRequest.model_validate_json(flags[3]).messages
        assert flags[4:] == []
    assert len(found) == 2


def test_the_site_has_a_page_for_each_subject() -> None:
    folders = {
        "concepts": ["autoscaling", "paged-kv-cache", "splitfuse"],
        "how-to": [
            *("air-gapped", "canary", "external-autoscaler", "gated-models", "gateway", "gpu-nodes", "kueue"),
            *("model-images", "object-storage", "openshift", "upgrade", "volumes"),
        ],
        "coming-from": ["deepspeed-mii", "kserve", "kubeai", "vllm"],
        "reference": ["engine-flags", "helm-values", "kubectl-fastgen", "models", "openai", "resource"],
    }
    texts = {
        folder: {path.stem: path.read_text() for path in (ROOT / "docs" / folder).glob("*.md")} for folder in folders
    }
    assert {folder: sorted(pages) for folder, pages in texts.items()} == folders
    for name, text in texts["concepts"].items():
        assert re.search(r"^!\[.+\]\(.+\)", text, re.MULTILINE), f"{name} has no picture"
    for name, text in texts["coming-from"].items():
        assert re.search(r"^\|[-: |]+\|$", text, re.MULTILINE), f"{name} has no table"


def test_fields_that_pages_name_exist() -> None:
    """In tables of other projects' names, the first column is theirs."""
    known = {"".join(f".{part}" for part in path if isinstance(part, str)) for path in fields(spec_schema())}
    free = re.compile(r"\.(podTemplate\.spec|resources\.(limits|requests))\.\w+")
    found = set()
    for page in PAGES:
        for line in page.read_text().splitlines():
            ours = line.split("|", 2)[-1] if "coming-from" in page.parts and line.startswith("|") else line
            for field in re.findall(r"`spec((?:\.\w+)+)", ours):
                assert field in known or free.fullmatch(field), f"{page.name}: spec{field}"
                found.add(field)
    assert len(found) > 30

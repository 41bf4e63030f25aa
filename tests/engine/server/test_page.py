"""The page of `fastgen serve --ui` in a real browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.server.serving import Serving, serving
from support.browser import Page, browser_page

pytestmark = pytest.mark.slow  # it starts a browser


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("server")
    environment = {"FASTGEN_API_KEY": "sk-of-the-page", "SCRIPT_STEP_SECONDS": "0.005"}
    with serving(folder, "--ui", "--max-model-length", "2048", environment=environment) as server:
        server.wait_status("/ready", 200)
        yield server


@pytest.fixture
def page(tmp_path: Path, server: Serving) -> Iterator[Page]:
    with browser_page(tmp_path) as page:
        page.open(server.url)
        page.wait("document.getElementById('connection').textContent.includes('API key')")
        page.type("#key", "sk-of-the-page")
        page.press("Enter")
        page.wait("document.getElementById('connection').textContent === 'live'")
        page.problems.clear()  # the 401
        yield page
        assert page.problems == []


def text(name: str) -> str:
    return f"document.getElementById('{name}').textContent"


def test_a_person_chats_sees_probabilities_and_watches_a_prompt_split(page: Page) -> None:
    assert page.evaluate("Object.keys(localStorage).length + document.cookie.length") == 0
    assert page.evaluate("Object.values(sessionStorage).join()") == "sk-of-the-page"

    page.type("#prompt", "<img src=x onerror=document.title='hacked'> one two three")
    page.press("Enter")
    page.wait(f"{text('chat-status')}.includes('tokens in')")
    assert page.evaluate("document.querySelectorAll('.assistant .token').length") > 5
    assert page.evaluate("document.querySelectorAll('#messages img').length") == 0

    page.evaluate("document.querySelector('.token').focus()")
    assert "chosen" in page.evaluate(text("tooltip"))
    assert " %" in page.evaluate(text("tooltip"))
    page.press("ArrowRight")
    assert page.evaluate("document.activeElement === document.querySelectorAll('.token')[1]")
    page.press("Escape")
    assert page.evaluate("document.getElementById('tooltip').hidden")

    page.evaluate("document.getElementById('long').click()")
    assert page.evaluate("document.getElementById('long').getAttribute('aria-checked')") == "true"
    page.wait(f"{text('step-text')}.includes('decode; prompts: #')")  # fused
    page.wait(f"{text('owners')}.includes('block')")
    page.evaluate("document.getElementById('pause').click()")
    page.evaluate("document.getElementById('long').click()")
    page.evaluate("document.getElementById('steps').focus()")
    page.press("Home")
    first = page.evaluate(text("step-text"))
    page.press("ArrowRight")
    assert page.evaluate(text("step-text")) != first
    page.wait(f"{text('between-text')}.includes('half within')")
    page.wait(f"{text('queue-text')}.startsWith('0 running')")


def test_every_control_has_a_name_and_enough_contrast_in_both_schemes(page: Page) -> None:
    unnamed = """[...document.querySelectorAll('button, input, textarea, canvas')].filter((element) =>
        !element.textContent.trim() && !element.labels?.length && !element.getAttribute('aria-label')).length"""
    assert page.evaluate(unnamed) == 0
    contrast = """(() => {
        const style = getComputedStyle(document.documentElement);
        const light = (name) => {
            const hex = style.getPropertyValue(name).trim().replace(/^#(.)(.)(.)$/, '#$1$1$2$2$3$3');
            const part = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
                .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
            return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
        };
        const ratio = ([a, b]) => {
            const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
            return (high + 0.05) / (low + 0.05);
        };
        return Math.min(...[['--ink', '--card'], ['--quiet', '--card'], ['--quiet', '--ground'], ['--bad', '--card'],
            ['--good', '--card'], ['--ink', '--own'], ['--quiet', '--own'], ['--on-accent', '--accent'],
            ['--quiet', '--empty']].map(ratio));
    })()"""
    for scheme in ("light", "dark"):
        page.appearance(prefers_color_scheme=scheme)
        assert page.evaluate(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
        assert page.evaluate(contrast) >= 4.5, scheme  # WCAG 2.2 AA

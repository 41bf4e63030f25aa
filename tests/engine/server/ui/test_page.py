"""The page of `fastgen serve --ui` in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.server.openai.test_reasoning import CALL, THOUGHT, TOOLS
from engine.server.scripted_prompts import prompt_for
from engine.server.serving import Serving, serving
from engine.server.thinking_model import write_thinking_model
from fastgen.text.tokenizer import Tokenizer
from support.browser import Page, browser_page
from support.waiting import eventually

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


@pytest.fixture
def thinking_page(smollm2: Tokenizer, tmp_path: Path) -> Iterator[Page]:
    """The page of a model that thinks and calls tools."""
    folder = tmp_path / "model"
    folder.mkdir()
    write_thinking_model(folder, smollm2)
    with serving(folder, "--ui", model=str(folder)) as server, browser_page(tmp_path) as page:
        server.wait_status("/ready", 200)
        page.open(server.url)
        page.wait("document.getElementById('connection').textContent === 'live'")
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
    page.wait(f"{text('owners')}.includes('block')")
    assert page.evaluate("parseFloat(document.querySelector('#kv > div').style.width)") > 0
    eventually(lambda: kinds_of_bars(page) == {"decode", "fused"}, within=30, what="bars of both kinds")
    page.evaluate("document.getElementById('long').click()")
    page.evaluate("document.getElementById('steps').focus()")
    page.press("Home")
    first = page.evaluate(text("step-text"))
    page.press("ArrowRight")
    assert page.evaluate(text("step-text")) != first
    for histogram in ("first", "between"):
        page.wait(f"{text(f'{histogram}-text')}.includes('half within')")
    page.wait(f"{text('queue-text')}.startsWith('0 running')")


# Which share of the height up to the budget the bar of a step fills, and in how many colours.
BAR = """(index => {
    const canvas = document.getElementById('steps'), scale = devicePixelRatio, height = canvas.clientHeight - 19;
    const area = [(5 + 11 * index) * scale, 17 * scale, 1, height * scale], rows = [];
    const { data } = canvas.getContext('2d').getImageData(...area);
    for (let at = 0; at < data.length; at += 4) if (data[at + 3]) rows.push(data.slice(at, at + 4).join());
    return [4 * rows.length / data.length, new Set(rows).size];
})"""


def kinds_of_bars(page: Page) -> set[str]:
    """Pause the picture once a step is fused, compare all bars with the words for their steps, and return their kinds.

    It stays paused if there are two kinds.
    """
    page.wait(f"{text('step-text')}.includes('decode; prompts: #')")
    page.evaluate("document.getElementById('pause').click()")
    page.evaluate("document.getElementById('steps').focus()")
    page.press("Home")
    kinds, index, words = set(), 0, ""
    while words != (words := page.evaluate(text("step-text"))):
        found = re.search(r"\((\d+) % of the budget\).* (\d+) decode(; prompts: #)?", words)
        assert found is not None, words
        share, decodes, has_prompt = int(found[1]) / 100, int(found[2]), found[3] is not None
        filled, colours = page.evaluate(f"{BAR}({index})")
        # One token has at least two pixels of a hundred or more.
        assert share - 0.05 < filled < share + 0.05 + 0.02 * decodes, words
        if not has_prompt:
            assert colours == decodes, words
        kinds.add("fused" if has_prompt and decodes else "prompt" if has_prompt else "decode")
        page.press("ArrowRight")
        index += 1
    if not kinds >= {"decode", "fused"}:
        page.press("Escape")  # a chosen step would keep its words
        page.evaluate("document.getElementById('pause').click()")
    return kinds - {"prompt"}


def test_reasoning_and_tool_calls_are_shown_apart_from_the_answer(thinking_page: Page) -> None:
    page = thinking_page

    def ask(reply: str) -> dict[str, Any]:
        """Send a prompt with this reply; return what the last message shows, by part."""
        page.type("#prompt", prompt_for(reply))
        page.press("Enter")
        page.wait(f"document.getElementById('send').disabled === false && {text('chat-status')}.includes('tokens in')")
        shown: dict[str, Any] = page.evaluate(LAST_ANSWER)
        page.evaluate("document.getElementById('chat-status').textContent = ''")
        return shown

    # Its parts: the reasoning that can be folded away, the content, and calls.
    answer = ask(f"{THOUGHT}It is <b>Bern</b>.")
    assert answer == {"title": "Reasoning", "thought": "Let me see.", "content": "It is <b>Bern</b>.", "calls": []}
    assert page.evaluate("document.querySelectorAll('.assistant details .token').length") > 0, "no probabilities"
    assert page.evaluate("document.querySelectorAll('.assistant b').length") == 0
    page.evaluate("document.querySelector('.assistant summary').focus()")
    page.press("Enter")
    assert page.evaluate("document.querySelector('.assistant details').open") is False

    # The scripted engine takes its reply from the whole conversation.
    page.evaluate("document.getElementById('clear').click()")
    page.evaluate("document.querySelector('#chat-form details').open = true")
    page.type("#tools", json.dumps(TOOLS))
    page.type("#system", "Be brief.")
    page.type("[name=temperature]", "0.5")
    page.type("[name=seed]", "7")
    page.evaluate(
        "window.sent = []; const usual = fetch;"
        "window.fetch = (url, of) => { if (of?.body) sent.push(of.body); return usual(url, of); }"
    )
    answer = ask(f"{THOUGHT}I look.\n{CALL}\n{CALL}")
    assert (answer["thought"], answer["content"].strip()) == ("Let me see.", "I look.")
    assert answer["calls"] == ['f({"city": "Bern"})'] * 2
    sent = json.loads(page.evaluate("sent.at(-1)"))
    assert (sent["temperature"], sent["seed"], sent["tools"]) == (0.5, 7, TOOLS)
    assert "top_p" not in sent, "what is left empty is the server's default"
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    # The server accepts the calls in the messages of the next request.
    ask("Good.")
    assert page.evaluate("document.querySelectorAll('.message').length") == 4
    assert page.evaluate("document.querySelectorAll('.message.error').length") == 0

    page.evaluate("document.getElementById('tools').value = '{'")
    page.type("#prompt", "one")
    page.press("Enter")
    page.wait("document.querySelector('.message.error') !== null")
    assert "JSON" in page.evaluate("document.querySelector('.message.error').textContent")


LAST_ANSWER = """(() => {
    const last = [...document.querySelectorAll('.message.assistant')].at(-1), details = last.querySelector('details');
    return {
        title: details?.querySelector('summary').textContent, thought: details?.querySelector('span').textContent,
        content: last.querySelector(':scope > span').textContent,
        calls: [...last.querySelectorAll('pre')].map((call) => call.textContent),
    };
})()"""


def test_with_reduced_motion_the_picture_changes_once_per_second(page: Page) -> None:
    page.appearance(prefers_reduced_motion="reduce")
    page.evaluate(
        "window.drawn = []; const usual = requestAnimationFrame;"
        "window.requestAnimationFrame = (of) => { drawn.push(performance.now()); return usual(of); }"
    )
    page.evaluate("document.getElementById('long').click()")
    page.wait("drawn.length > 2")
    page.evaluate("document.getElementById('long').click()")
    gaps = page.evaluate("drawn.slice(1).map((at, index) => at - drawn[index])")
    assert min(gaps) > 900, "milliseconds"
    page.wait(f"{text('queue-text')}.startsWith('0 running')")


def test_the_page_is_not_higher_than_a_usual_window(page: Page, tmp_path: Path) -> None:
    page.screenshot(tmp_path / "page.png")
    assert page.evaluate("document.documentElement.scrollHeight - innerHeight") <= 0


def test_every_control_has_a_name_and_enough_contrast_in_both_schemes(page: Page) -> None:
    unnamed = """[...document.querySelectorAll('button, input, textarea, [tabindex]')].filter((element) =>
        !element.textContent.trim() && !element.labels?.length && !element.getAttribute('aria-label')).length"""
    assert page.evaluate(unnamed) == 0
    pairs = [
        *(("--ink", "--card"), ("--quiet", "--card"), ("--quiet", "--ground"), ("--bad", "--card")),
        *(("--good", "--card"), ("--ink", "--own"), ("--quiet", "--own"), ("--on-accent", "--accent")),
        ("--quiet", "--empty"),
    ]
    for scheme in ("light", "dark"):
        page.appearance(prefers_color_scheme=scheme)
        assert page.evaluate(f"matchMedia('(prefers-color-scheme: {scheme})').matches")
        assert page.least_contrast(*pairs) >= 4.5, scheme  # WCAG 2.2 AA

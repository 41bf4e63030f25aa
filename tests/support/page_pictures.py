"""Take the pictures of `fastgen serve --ui` in docs/images, with a real model:

`PYTHONPATH=engine:tests python -m support.page_pictures MODEL`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.controlplane import free_ports
from support.browser import browser_page

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
# Rounds of one long prompt and three short ones: their steps fill the width of the picture.
ROUNDS = 3
QUESTION = "What is the capital of France, and what is it known for?"


@contextmanager
def server(model: str) -> Iterator[str]:
    """Serve the model with its page, and yield the server's URL."""
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "fastgen", "serve", model, "--ui", "--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen([*command, "--token-budget", "128", "--kv-cache-memory", "128MiB"])
    try:
        while not _is_ready(f"{url}/ready"):
            if process.poll() is not None:
                raise RuntimeError("the server ended")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main(model: str) -> None:
    """Ask a question, switch long prompts on until one is split, and take a picture in each colour scheme."""
    with (
        server(model) as url,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        browser_page(Path(folder)) as page,
    ):
        page.open(f"{url}/ui")
        page.evaluate("document.querySelector('[name=temperature]').value = 0")
        page.type("#prompt", QUESTION)
        page.press("Enter")
        page.wait("document.querySelector('#stop').disabled && document.querySelectorAll('.token').length > 5", 120)
        page.evaluate("document.querySelector('#long').click()")
        page.wait(f"parseInt(document.getElementById('first-text').textContent) >= {1 + ROUNDS * 4}", 120)
        # Pause in the same expression: the next step may be of decodes alone.
        mixed = "/[1-9] decode; prompts: #/.test(document.getElementById('step-text').textContent)"
        page.wait(f"{mixed} && (document.querySelector('#pause').click(), true)", 120)
        page.evaluate("document.querySelector('.token.unsure').focus()")
        for scheme in ("light", "dark"):
            page.appearance(prefers_color_scheme=scheme)
            page.screenshot(IMAGES / f"page-{scheme}.png")
        assert not page.problems, page.problems


if __name__ == "__main__":
    main(sys.argv[1])

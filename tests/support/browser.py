"""Drives a headless Chromium by the DevTools protocol: open a page, evaluate JavaScript, press keys, take pictures."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import websocket

from support.waiting import HANG_SECONDS, PATIENCE

_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# What keys need that do more than send an event to the page.
_KEYS: dict[str, dict[str, Any]] = {
    "Enter": {"text": "\r", "windowsVirtualKeyCode": 13},
    "Tab": {"windowsVirtualKeyCode": 9},
}
# By the definitions of WCAG 2.2.
_CONTRAST = """(() => {
    const style = getComputedStyle(document.documentElement);
    const light = (name) => {
        const hex = style.getPropertyValue(name).trim().replace(/^#(.)(.)(.)$/, '#$1$1$2$2$3$3');
        const part = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
            .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
    };
    return Math.min(...%s.map((pair) => {
        const [low, high] = pair.map(light).sort((x, y) => x - y);
        return (high + 0.05) / (low + 0.05);
    }));
})()"""


def chromium() -> str | None:
    """Return the path of an installed Chromium, or None."""
    return next(filter(None, map(shutil.which, _NAMES)), None)


class Page:
    """One page of a browser."""

    def __init__(self, connection: websocket.WebSocket) -> None:
        self._connection = connection
        self._ids = itertools.count(1)
        self.problems: list[str] = []  # exceptions, console errors and blocked resources
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._ids)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(str(message["params"]["exceptionDetails"]))
            elif message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.problems.append(f"{message['params']['entry']['text']} {message['params']['entry'].get('url')}")

    def open(self, url: str) -> None:
        """Navigate to a URL."""
        self.send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        answer = self._evaluated(expression)
        assert "exceptionDetails" not in answer, (expression, answer)
        return answer["result"].get("value")

    def _evaluated(self, expression: str) -> dict[str, Any]:
        return self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        """Poll until an expression is true. It may fail until then: elements are missing while a page loads."""
        deadline = time.monotonic() + PATIENCE * seconds
        while not self._evaluated(expression).get("result", {}).get("value"):
            if time.monotonic() >= deadline:
                shown = self.evaluate("document.body.innerText")
                found = self._evaluated(expression)
                raise AssertionError(
                    f"not within {PATIENCE * seconds} s: {expression}: {found}\n{shown}\n{self.problems}"
                )
            time.sleep(0.02)

    def type(self, selector: str, text: str) -> None:
        """Focus an element and type into it."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key, for example Enter or ArrowLeft."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, **_KEYS.get(key, {}))

    def appearance(self, **features: str) -> None:
        """Set media features, for example `prefers_color_scheme="dark"`."""
        named = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.send("Emulation.setEmulatedMedia", features=named)

    def least_contrast(self, *pairs: tuple[str, str]) -> float:
        """Return the least contrast ratio of pairs of colours, which are custom properties of the page's root."""
        ratio: float = self.evaluate(_CONTRAST % json.dumps(pairs))
        return ratio

    def screenshot(self, path: Path, width: int = 1280, height: int = 860) -> None:
        """Write a PNG of the page."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        time.sleep(0.3)
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser_page(folder: Path) -> Iterator[Page]:
    """Start a browser with its profile in `folder`, and yield a page. The browser is killed at the end."""
    program = chromium()
    assert program is not None, "no Chromium: apt-get install chromium-headless-shell"
    arguments = (
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--remote-debugging-port=0", "--remote-allow-origins=*", f"--user-data-dir={folder}"),
        *("--window-size=1280,860", "about:blank"),
    )
    with (folder / "browser.log").open("wb") as log:
        # In its own process group: the program may be a script that starts the browser, and both must be killed.
        process = subprocess.Popen([program, *arguments], stdout=log, stderr=log, start_new_session=True)
    try:
        with _connected(process, folder) as connection:
            yield Page(connection)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _connected(process: subprocess.Popen[bytes], folder: Path) -> Iterator[websocket.WebSocket]:
    import httpx

    deadline, port_file = time.monotonic() + HANG_SECONDS, folder / "DevToolsActivePort"
    while not port_file.exists() or not port_file.read_text().strip():
        assert process.poll() is None, (folder / "browser.log").read_text()
        assert time.monotonic() < deadline, (folder / "browser.log").read_text()
        time.sleep(0.05)
    port = int(port_file.read_text().split()[0])
    targets = httpx.get(f"http://127.0.0.1:{port}/json", verify=False).json()
    address = next(target["webSocketDebuggerUrl"] for target in targets if target["type"] == "page")
    connection = websocket.create_connection(address, timeout=HANG_SECONDS)
    try:
        yield connection
    finally:
        connection.close()

"""From start to ready, and memory: `python benchmarks/startup.py MODEL [FLAG ...]`; flags go to `fastgen serve`.

Memory is the private and shared resident memory of the server's two processes (PSS, which counts shared pages once),
before and after a load that fills the KV cache's first blocks, less the weights and the KV that the engine holds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

MIB = 1 << 20


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def memory(pid: int) -> int:
    """Bytes that the processes hold, pages of files left out: those are the weights' file in the page cache."""
    total = 0
    for one in family(pid):
        rollup = Path(f"/proc/{one}/smaps_rollup").read_text()
        (anonymous,) = re.findall(r"^Pss_Anon:\s+(\d+) kB", rollup, re.MULTILINE)
        total += int(anonymous) * 1024
    return total


def get(url: str) -> bytes:
    """The body behind a URL."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body


def generate(url: str, words: int) -> None:
    """One completion."""
    body = json.dumps({"prompt": " time" * words, "max_tokens": 32, "temperature": 0, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=300).read()


def gauge(metrics: str, name: str) -> float:
    """One value of /metrics."""
    (value,) = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", metrics, re.MULTILINE)
    return float(value)


def once(model: str, flags: list[str]) -> dict[str, float]:
    """One start, one load, one stop."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "fastgen", "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags]
    started = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                get(f"{url}/ready")
                break
            assert process.poll() is None, "the server ended"
            time.sleep(0.01)
        seconds, idle = time.monotonic() - started, memory(process.pid)
        for words in (1500, 500, 1000):
            generate(url, words)
        used = memory(process.pid)
        tokens = gauge(get(f"{url}/metrics").decode(), "fastgen_kv_cache_capacity_tokens")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    return {"seconds": seconds, "idle": idle / MIB, "used": used / MIB, "kv_tokens": tokens}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--starts", type=int, default=5)
    options, flags = parser.parse_known_args()
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "")
    runs = [once(options.model, flags) for _ in range(options.starts)]
    for name, unit in (("seconds", "s"), ("idle", "MiB"), ("used", "MiB")):
        values = [run[name] for run in runs]
        print(f"{name}: median {statistics.median(values):.2f} {unit}, from {min(values):.2f} to {max(values):.2f}")


if __name__ == "__main__":
    main()

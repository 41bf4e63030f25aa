"""Start-up time and memory: `python benchmarks/startup.py MODEL [FLAG ...]`; flags are passed to `fastgen serve`.

Memory is the PSS of the server's two processes without file pages, before and after prompts that fill steps, minus the
float32 weights and the whole KV cache, which is prefaulted soon after the start if it is as small as here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
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

from fastgen.model.source import ModelSource
from fastgen.setting_fields import parse_size

MIB = 1 << 20


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def memory(pid: int) -> int:
    """Return the bytes that the processes hold, without file pages: those are the weights in the page cache."""
    total = 0
    for one in family(pid):
        rollup = Path(f"/proc/{one}/smaps_rollup").read_text()
        (anonymous,) = re.findall(r"^Pss_Anon:\s+(\d+) kB", rollup, re.MULTILINE)
        total += int(anonymous) * 1024
    return total


def get(url: str) -> bytes:
    """Return the body of a URL."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        body: bytes = answer.read()
        return body


def generate(url: str, words: int) -> None:
    """Request one completion."""
    body = json.dumps({"prompt": " time" * words, "max_tokens": 32, "temperature": 0, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=300).read()


def once(model: str, flags: list[str]) -> dict[str, float]:
    """Start a server, load it and stop it."""
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
        seconds = time.monotonic() - started
        time.sleep(3)
        idle = memory(process.pid)
        for words in (1500, 500, 1000):
            generate(url, words)
        used = memory(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    return {"seconds": seconds, "idle": idle / MIB, "used": used / MIB}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--kv-cache-memory", type=parse_size, default=parse_size("256MiB"))
    options, flags = parser.parse_known_args()
    flags += ["--kv-cache-memory", str(options.kv_cache_memory)]
    weights = ModelSource.open(options.model).architecture.num_parameters * 4 / MIB
    cache = options.kv_cache_memory / MIB
    runs = [once(options.model, flags) for _ in range(options.starts)]
    for name, unit, less in (("seconds", "s", 0.0), ("idle", "MiB", weights + cache), ("used", "MiB", weights + cache)):
        values = [run[name] - less for run in runs]
        print(f"{name}: median {statistics.median(values):.2f} {unit}, from {min(values):.2f} to {max(values):.2f}")
    print(f"memory is that beyond {weights:.0f} MiB of weights and {cache:.0f} of KV cache")


if __name__ == "__main__":
    main()

"""Streams completions in a loop, each over a new connection, and prints a line about each.

It runs in a pod of the cluster under test, passed as text, so it uses only the standard library.

    python -c TEXT HOST PORT MODEL CLIENTS SECONDS

A line is `ok SECONDS PIECES` or `failed SECONDS REASON`. The client exits when the file STOP exists, after its open
streams have ended.

A stream has 8 tokens, or as many as take SECONDS at the speed of the client's previous stream, whichever is more.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time

STOP = "/tmp/stop"
# The tests serve the model with 2048 tokens, prompt included.
FEWEST, MOST = 8, 2000
# Pause between two requests of a client. On a small machine, starting engines need the CPU too.
PAUSE_SECONDS = 0.5


def stream(host: str, port: int, model: str, tokens: int) -> str:
    """Send one request and return its line."""
    started = time.monotonic()
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    try:
        connection = http.client.HTTPConnection(host, port, timeout=60)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        events = [line[6:].strip() for line in answer if line.startswith(b"data: ")]
        connection.close()
        seconds = time.monotonic() - started
        if answer.status != 200:
            return f"failed {seconds:.2f} status {answer.status}"
        if not events or events[-1] != b"[DONE]":
            return f"failed {seconds:.2f} cut after {len(events)} events"
        reasons = [choice["finish_reason"] for event in events[:-1] for choice in json.loads(event)["choices"]]
        if reasons[-1] != "length":
            return f"failed {seconds:.2f} ended for the reason {reasons[-1]}"
    except Exception as error:
        return f"failed {time.monotonic() - started:.2f} {error!r}"
    return f"ok {seconds:.2f} {len(reasons)}"


def client(host: str, port: int, model: str, wanted: float) -> None:
    """Send one request after the other, each of about `wanted` seconds."""
    tokens = FEWEST
    while not os.path.exists(STOP):
        started = time.monotonic()
        line = stream(host, port, model, tokens)
        tokens = min(MOST, max(FEWEST, round(tokens * wanted / (time.monotonic() - started))))
        # One write per line, so that lines of other threads do not interleave.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        time.sleep(PAUSE_SECONDS)


def main() -> None:
    """Run all clients until the last one has ended."""
    host, port, model, clients, wanted = (
        sys.argv[1],
        int(sys.argv[2]),
        sys.argv[3],
        int(sys.argv[4]),
        float(sys.argv[5]),
    )
    threads = [threading.Thread(target=client, args=(host, port, model, wanted)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()

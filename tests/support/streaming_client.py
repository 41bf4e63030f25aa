"""Streams completions without an end, each over a connection of its own, and writes a line about each.

It runs in a pod of the cluster under test, from its text alone: the standard library and nothing else.

    python -c TEXT HOST PORT MODEL CLIENTS

A line is `ok SECONDS PIECES` or `failed SECONDS WHY`. It ends when the file STOP exists, after the streams under way.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time

STOP = "/tmp/stop"
TOKENS = 8
# Between two requests of a client: on a small machine the engines that start need the processor too.
PAUSE_SECONDS = 0.5


def stream(host: str, port: int, model: str) -> str:
    """One request; returns what is to be said of it."""
    started = time.monotonic()
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
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


def client(host: str, port: int, model: str) -> None:
    """One request after the other."""
    while not os.path.exists(STOP):
        # One write for each line: threads may not come between a line and its end.
        sys.stdout.write(f"{stream(host, port, model)}\n")
        sys.stdout.flush()
        time.sleep(PAUSE_SECONDS)


def main() -> None:
    """All clients, until the last one has ended."""
    host, port, model, clients = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    threads = [threading.Thread(target=client, args=(host, port, model)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()

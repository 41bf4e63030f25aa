"""Streams completions without an end, each over a connection of its own, and writes a line about each.

It runs in a pod of the cluster under test, from its text alone: the standard library and nothing else.

    python -c TEXT HOST PORT MODEL CLIENTS SECONDS

A line is `ok SECONDS PIECES` or `failed SECONDS WHY`. It ends when the file STOP exists, after the streams under way.

A stream has 8 tokens, or as many as took SECONDS at the pace of the client's last stream, whichever is more.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
import time

STOP = "/tmp/stop"
# The model of the tests takes 2048, prompt included.
FEWEST, MOST = 8, 2000
# Between two requests of a client: on a small machine the engines that start need the processor too.
PAUSE_SECONDS = 0.5


def stream(host: str, port: int, model: str, tokens: int) -> str:
    """One request; returns what is to be said of it."""
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
    """One request after the other, of about so many seconds."""
    tokens = FEWEST
    while not os.path.exists(STOP):
        started = time.monotonic()
        line = stream(host, port, model, tokens)
        tokens = min(MOST, max(FEWEST, round(tokens * wanted / (time.monotonic() - started))))
        # One write for each line: threads may not come between a line and its end.
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
        time.sleep(PAUSE_SECONDS)


def main() -> None:
    """All clients, until the last one has ended."""
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

"""Streams completions in a loop and prints a line about each. Each client keeps its connection, as connection pools do.

It runs in a pod of the cluster under test, passed as text, so it uses only the standard library.

    python -c TEXT HOST PORT MODEL CLIENTS SECONDS

A line is `ok SECONDS PIECES` or `failed SECONDS REASON`. The clients start when the Service answers. They
exit when the file STOP exists, after their open streams have ended.

A client opens a new connection if the server closed the one before, or said that it would.

A stream has 8 tokens, or as many as take SECONDS at the speed of the client's previous stream, whichever is more.
"""

from __future__ import annotations

import http.client
import json
import os
import select
import sys
import threading
import time

STOP = "/tmp/stop"
# The tests serve the model with 2048 tokens, prompt included.
FEWEST, MOST = 8, 2000
# Pause between two requests of a client. On a small machine, starting engines need the CPU too.
PAUSE_SECONDS = 0.5


def stream(connection: http.client.HTTPConnection, model: str, tokens: int) -> str:
    """Send one request and return its line. The connection is opened if it is not open."""
    started = time.monotonic()
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    try:
        if connection.sock is not None and select.select([connection.sock], [], [], 0)[0]:
            connection.close()  # the server has closed it
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        lines = list(answer)
        events = [line[6:].strip() for line in lines if line.startswith(b"data: ")]
        seconds = time.monotonic() - started
        if answer.status != 200:
            return f"failed {seconds:.2f} status {answer.status}: {b''.join(lines)[:200]!r}"
        if not events or events[-1] != b"[DONE]":
            return f"failed {seconds:.2f} cut after {len(events)} events"
        reasons = [choice["finish_reason"] for event in events[:-1] for choice in json.loads(event)["choices"]]
        if reasons[-1] != "length":
            return f"failed {seconds:.2f} ended for the reason {reasons[-1]}"
    except Exception as error:
        connection.close()
        return f"failed {time.monotonic() - started:.2f} {error!r}"
    return f"ok {seconds:.2f} {len(reasons)}"


def wait_for_service(host: str, port: int) -> None:
    """Wait up to 300 seconds until the Service routes to a ready server.

    kube-proxy adds a new endpoint a second or more after its pod is ready if it has just written its rules. Until then
    connections are refused, or go to whoever else answers for the address.
    """
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection(host, port, timeout=10)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.1)


def client(host: str, port: int, model: str, wanted: float) -> None:
    """Send one request after the other, each of about `wanted` seconds."""
    connection = http.client.HTTPConnection(host, port, timeout=600)
    tokens = FEWEST
    while not os.path.exists(STOP):
        started = time.monotonic()
        line = stream(connection, model, tokens)
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
    wait_for_service(host, port)
    threads = [threading.Thread(target=client, args=(host, port, model, wanted)) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()

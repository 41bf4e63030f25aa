"""Send random grammars to a running server, by every field and endpoint that takes them, and count what it answers.

`PYTHONPATH=tests .venv/bin/python -m engine.server.fuzzing_structures http://127.0.0.1:8000 MODEL --seconds 3600`

Statuses from 500, generations that end in `abort`, and a server that does not answer within a minute are faults. They
are printed with the seed that repeats the request.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from engine.text.random_grammars import RandomGrammars

_MOST_TOKENS = 48
_HANG_SECONDS = 60.0
_ALLOWED = {"stop", "length", "tool_calls", "completed", "incomplete"}


def request_of(seed: int, model: str) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request."""
    source, grammars = random.Random(seed), RandomGrammars(seed)
    grammar = grammars.grammar()
    completion = {"model": model, "prompt": "x", "max_tokens": _MOST_TOKENS, "seed": seed}
    message = [{"role": "user", "content": "x"}]
    if grammar.kind != "json_schema":
        field = {"regex": "guided_regex", "lark": "guided_grammar"}[grammar.kind]
        return "/v1/completions", {**completion, field: grammar.text}
    schema = json.loads(grammar.text)
    match source.randrange(4):
        case 0:
            return "/v1/completions", {**completion, "guided_json": schema}
        case 1:
            structure = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            body = {"model": model, "messages": message, "max_tokens": _MOST_TOKENS, "response_format": structure}
            return "/v1/chat/completions", body
        case 2:
            tool = {"name": "f", "parameters": schema, "strict": source.choice([True, False, None])}
            choice = source.choice(["required", "auto"])
            tools = [{"type": "function", "function": {**tool, "name": name}} for name in ("f", "g")]
            body = {"model": model, "messages": message, "max_tokens": _MOST_TOKENS, "tools": tools}
            return "/v1/chat/completions", {**body, "tool_choice": choice}
    tools = [{"type": "function", "name": name, "parameters": schema} for name in ("f", "g")]
    return "/v1/responses", {"model": model, "input": "x", "max_output_tokens": _MOST_TOKENS, "tools": tools}


class Run:
    """Requests of one server and what came of them."""

    def __init__(self, url: str, model: str) -> None:
        # Without connections that are kept, which a server may close at any time.
        self._client = httpx.Client(
            base_url=url, timeout=_HANG_SECONDS, limits=httpx.Limits(max_keepalive_connections=0)
        )
        self._model = model
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def send(self, seed: int) -> None:
        """Send the request of a seed."""
        path, body = request_of(seed, self._model)
        began = time.monotonic()
        try:
            response = self._client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
            outcome = f"{response.status_code} {_ending(response)}"
            is_fault = response.status_code >= 500 or (
                response.status_code == 200 and _ending(response) not in _ALLOWED
            )
        except httpx.HTTPError as error:
            outcome, is_fault = type(error).__name__, True
        with self._lock:
            self.counts[outcome] += 1
            if is_fault:
                self.faults.append(f"seed {seed}: {outcome} after {time.monotonic() - began:.1f} s: {body}"[:700])
                print(self.faults[-1], flush=True)


def _ending(response: httpx.Response) -> str:
    if response.status_code != 200:
        return ""
    answer = response.json()
    return str(answer["choices"][0]["finish_reason"] if "choices" in answer else answer["status"])


def main() -> None:
    """Run for a time, and print the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=4)
    arguments = parser.parse_args()
    run, began = Run(arguments.url, arguments.model), time.monotonic()
    seeds = iter(range(arguments.seed, 1 << 62))

    def send_in_turn() -> None:
        while time.monotonic() - began < arguments.seconds:
            run.send(next(seeds))

    with ThreadPoolExecutor(arguments.clients) as clients:
        for client in [clients.submit(send_in_turn) for _ in range(arguments.clients)]:
            client.result()
    print(f"{run.counts.total()} requests in {time.monotonic() - began:.0f} s, {len(run.faults)} faults")
    for outcome, count in sorted(run.counts.items()):
        print(f"{count:8} {outcome}")


if __name__ == "__main__":
    main()

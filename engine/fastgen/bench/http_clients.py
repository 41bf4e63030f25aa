"""Closed-loop clients of a server, one thread and one running request each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastgen.api_client.http import RemoteError, RemoteServer
from fastgen.bench.results import Answer, Results
from fastgen.bench.workload import Ask, Workload


def run_against(remote: RemoteServer, workload: Workload, model: str | None, on_answer: Callable[[], None]) -> Results:
    """Run the workload against a server's streaming /v1/completions, after one warm-up request.

    Args:
        remote: the server.
        workload: the requests to send.
        model: model name of the requests; None for the server's first model.
        on_answer: called after each request, successful or not, in the client's thread.

    Raises:
        RemoteError: the server cannot be reached, it lists no model, or the request for its models or the warm-up
            request fails.
    """
    names = [model] if model is not None else remote.model_names()
    if not names:
        raise RemoteError(f"{remote.url}/v1/models: the server lists no model; give a name with --served-model-name")
    name = names[0]
    for ask in workload.warm_up().asks():
        _ask(remote, name, ask)
    asks: Iterator[Ask] = iter(workload.asks())

    def client() -> list[Answer | str]:
        done: list[Answer | str] = []
        for ask in asks:  # shared by all clients: next() on a list's iterator is atomic
            try:
                done.append(_ask(remote, name, ask))
            except RemoteError as error:
                done.append(str(error))
            on_answer()
        return done

    begin = time.perf_counter()
    with ThreadPoolExecutor(workload.clients) as pool:
        futures = [pool.submit(client) for _ in range(workload.clients)]
        done = [outcome for future in futures for outcome in future.result()]
    return Results(
        time.perf_counter() - begin,
        tuple(outcome for outcome in done if isinstance(outcome, Answer)),
        tuple(outcome for outcome in done if isinstance(outcome, str)),
    )


def _ask(remote: RemoteServer, name: str, ask: Ask) -> Answer:
    body: dict[str, Any] = {
        "model": name,
        "prompt": ask.text,
        "max_tokens": ask.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    sent, arrivals = time.perf_counter(), []
    usage: dict[str, int] = {}
    for event in remote.stream("/v1/completions", body):
        if event["choices"]:
            arrivals.append(time.perf_counter())
        usage = event.get("usage") or usage
    return Answer(sent, tuple(arrivals), usage.get("prompt_tokens", 0), usage.get("completion_tokens", len(arrivals)))

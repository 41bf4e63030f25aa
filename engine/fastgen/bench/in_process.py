"""Closed-loop load on an engine in this process, without HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastgen.bench.results import Answer, Results
from fastgen.bench.workload import Workload
from fastgen.core.request import Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.engine.core import Engine

Encode = Callable[[str], list[int]]


def run_in_process(
    engine: Engine, encode: Encode, workload: Workload, max_model_length: int, on_answer: Callable[[], None]
) -> Results:
    """Run the workload on an idle engine, after one warm-up request.

    Prompts and generations that exceed the model length are shortened.
    """
    _run(engine, encode, workload.warm_up(), max_model_length, lambda: None)
    return _run(engine, encode, workload, max_model_length, on_answer)


def _run(
    engine: Engine, encode: Encode, workload: Workload, max_model_length: int, on_answer: Callable[[], None]
) -> Results:
    """Run a workload: as many requests at a time as it has clients."""
    todo = [
        (encode(ask.text)[: max(1, max_model_length - ask.max_tokens)], min(ask.max_tokens, max_model_length - 1))
        for ask in workload.asks()
    ]
    todo.reverse()
    sent: dict[str, float] = {}
    prompts: dict[str, int] = {}
    arrivals: dict[str, list[float]] = {}
    answers = []

    def send() -> None:
        if not todo:
            return
        tokens, max_tokens = todo.pop()
        name = str(len(sent))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        sent[name], prompts[name], arrivals[name] = time.perf_counter(), len(tokens), []
        engine.add(Request(id=name, prompt_token_ids=tokens, sampling=sampling))

    begin = time.perf_counter()
    for _ in range(workload.clients):
        send()
    while engine.has_work:
        outputs = engine.step().outputs
        now = time.perf_counter()
        for output in outputs:
            arrivals[output.request_id] += [now] * len(output.token_ids)
            if output.finish_reason is not None:
                got = tuple(arrivals.pop(output.request_id))
                answers.append(Answer(sent[output.request_id], got, prompts[output.request_id], len(got)))
                on_answer()
                send()
    return Results(time.perf_counter() - begin, tuple(answers), ())

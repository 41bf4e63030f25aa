"""One HTTP request's generations: runs them, records metrics and logs the outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from fastgen import logs
from fastgen.core.request import FinishReason, Request
from fastgen.link.client import EngineDeadError
from fastgen.link.messages import TokenOutput
from fastgen.server.http.api_error import APIError, FailedRequest, from_exception
from fastgen.server.http.request_context import Outcome, current
from fastgen.server.serving.metrics import Metrics
from fastgen.server.serving.request_failures import (
    engine_died,
    grammar_too_complex,
    out_of_memory,
    rejected_by_engine,
    stopped,
    timed_out,
)
from fastgen.server.serving.served_model import ServedModel
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.request_output import OutputDelta, RequestOutput, Usage

log = logging.getLogger("fastgen.server")

# Tokens beyond which a response is parsed and written in a thread. A shorter one takes a few milliseconds.
_LARGE_OUTPUT = 1 << 12
# Most tokens, of all generations, that are parsed and written at once.
_MOST_TAKEN = 1 << 10


class RequestHandler:
    """Runs the generations of one HTTP request: `num_candidates` for each prompt, in order.

    Outputs of the engine are detokenized when they arrive, and a stop string ends its generation then, however slowly
    the client reads. What the client has not read yet is merged.

    Use it as a context manager; on exit it logs the request, and if the output is long, marks the request as large, so
    that later work for it runs in a thread. It is the `fastgen.link.in_flight.Receiver` of its generations.

    Args:
        response_id: id in the response.
        model: the model to use.
        metrics: the server's metrics.
        rendered: the request that the client made.
        requests: the engine's requests, one for each generation.
        arrival: when the HTTP request arrived, in seconds of the monotonic clock.

    Attributes:
        id: id in the response.
        created: when this handler was created, in Unix seconds.
        rendered: the request that the client made.
        tokenizer: the model's.
        outputs: output of each generation so far.
    """

    def __init__(
        self,
        response_id: str,
        model: ServedModel,
        metrics: Metrics,
        rendered: RenderedRequest,
        requests: Sequence[Request],
        arrival: float,
    ) -> None:
        self.id = response_id
        self.created = int(time.time())
        self.rendered = rendered
        self.tokenizer = model.tokenizer
        self.fingerprint = model.fingerprint
        self._engine = model.engine
        self._metrics = metrics
        self._arrival = arrival
        self._prepared_seconds = time.monotonic() - arrival
        self.outputs = [RequestOutput(request, model.tokenizer, rendered) for request in requests]
        self._indices = {request.id: index for index, request in enumerate(requests)}
        self._unfinished = dict.fromkeys(range(len(requests)))  # indices of generations, in order
        self._last_token: list[float | None] = [None] * len(requests)  # when each generation's last token arrived
        self._first_token_seconds: float | None = None
        self._changed: dict[int, None] = {}  # indices of generations with a delta to take, oldest first
        self._on_change: Callable[[], object] | None = None
        self._ended = asyncio.Event()
        self._failure: APIError | None = None

    def __enter__(self) -> RequestHandler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        usage, first_token, context = self.usage(), self._first_token_seconds, current()
        context.is_large = context.is_large or usage.completion_tokens > _LARGE_OUTPUT
        context.outcome = outcome = Outcome(
            response_id=self.id,
            usage=usage,
            finish_reasons=tuple(str(output.finish_reason or "none") for output in self.outputs),
            arrival=self._arrival,
            queue_seconds=min(
                (self._prepared_seconds + o.queue_seconds for o in self.outputs if o.queue_seconds is not None),
                default=None,
            ),
            first_token_seconds=first_token,
            total_seconds=time.monotonic() - self._arrival,
        )
        logs.log_event(
            log,
            "request",
            id=self.id,
            status=_status(kind, error),
            finish=",".join(outcome.finish_reasons),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            first_token="none" if first_token is None else f"{first_token:.3f}s",
            total=f"{outcome.total_seconds:.3f}s",
        )

    def usage(self) -> Usage:
        """Return the tokens of all generations; a prompt with several candidates counts once."""
        per_prompt = [output.usage for output in self.outputs[:: self.rendered.num_candidates]]
        return Usage(
            sum(usage.prompt_tokens for usage in per_prompt),
            sum(len(output.token_ids) for output in self.outputs),
            sum(usage.cached_tokens for usage in per_prompt),
        )

    async def run(self, on_change: Callable[[], object] | None = None) -> None:
        """Start the generations and wait for their end.

        Those that are unfinished when this fails or is cancelled are cancelled.

        Args:
            on_change: called when there is something to `take` and there was nothing before.

        Raises:
            FailedRequest: if the engine dies, lacks the memory or rejects a request, if a grammar cannot be followed to
                its end, or if the deadline passes before any generation has a token.
            APIError: the error of `fail`, if that was called.
        """
        self._on_change = on_change
        try:
            for output in self.outputs:
                self._engine.start_request(output.request, self)
            await self._ended.wait()
            if self._failure is not None:
                raise self._failure
        except EngineDeadError as error:
            raise engine_died(str(error)) from error
        finally:
            for index in list(self._unfinished):
                self._close(index)

    @property
    def has_ended(self) -> bool:
        """Return whether all generations have ended, or the request has failed."""
        return self._ended.is_set()

    @property
    def has_deltas(self) -> bool:
        """Return whether there is something to `take`."""
        return bool(self._changed)

    def take(self) -> list[tuple[int, OutputDelta]]:
        """Return what is new, with the index of the generation; what changed first comes first.

        Of much, as after a pause of the client, only a part is returned, and `has_deltas` stays true.
        """
        changed, self._changed = self._changed, {}
        most = max(1, _MOST_TAKEN // max(1, len(changed)))
        deltas = []
        for index in changed:
            deltas.append((index, self.outputs[index].take(most)))
            if self.outputs[index].is_cut:
                self._changed[index] = None
        return deltas

    async def finish(self) -> list[RequestOutput]:
        """Run to the end and return the chosen outputs, one per choice, in order.

        Raises:
            FailedRequest: see `run`.
        """
        await self.run()
        wanted, candidates = self.rendered.num_choices, self.rendered.num_candidates
        if wanted == candidates:
            return self.outputs
        chosen: list[RequestOutput] = []
        for start in range(0, len(self.outputs), candidates):
            chosen += sorted(self.outputs[start : start + candidates], key=_mean_logprob, reverse=True)[:wanted]
        return chosen

    async def pooled(self) -> list[bytes]:
        """Run to the end and return the result of each request with `pooling`, as in `TokenOutput`.

        Raises:
            FailedRequest: if the engine dies or lacks the memory, or if a request ends before its result is there.
        """
        results = [output.pooled for output in await self.finish()]
        if None in results:
            is_late = any(output.finish_reason is FinishReason.DEADLINE for output in self.outputs)
            raise timed_out(self.outputs[0].request) if is_late else stopped()
        return [result for result in results if result is not None]

    def push(self, token_output: TokenOutput) -> None:
        """Add an output of the engine, and call `on_change` as described at `run`.

        A generation that a stop string has ended is cancelled in the engine.
        """
        index, num_new = self._indices[token_output.request_id], len(token_output.token_ids)
        if num_new and self.rendered.prompt_only:
            token_output = msgspec.structs.replace(
                token_output, token_ids=[], logprobs=None, finish_reason=FinishReason.LENGTH
            )
        output = self.outputs[index]
        output.push(token_output)
        if num_new or output.pooled is not None:  # the result of pooling counts as a first token
            self._count(index, num_new)
        if output.finish_reason is not None:
            self._close(index)
            self._failure = self._failure or self._error()
        if self._failure is not None or not self._unfinished:
            self._ended.set()
        if self._failure is None and self._on_change is not None and output.has_delta:
            is_first = not self._changed
            self._changed[index] = None
            if is_first:
                self._on_change()

    def fail(self, error: Exception | None = None) -> None:
        """End the request because of `error`, which the caller logs; None means that the engine has ended or hangs."""
        self._failure = engine_died(self._engine.exit_message) if error is None else from_exception(error)
        self._ended.set()

    def _count(self, index: int, num_new: int) -> None:
        now, metrics, last_token = time.monotonic(), self._metrics, self._last_token[index]
        if last_token is None:
            seconds = now - self._arrival
            self._first_token_seconds = min(seconds, self._first_token_seconds or seconds)
            metrics.first_token(seconds, len(self.outputs[index].request.prompt_token_ids))
        else:
            metrics.inter_token_latency.observe(now - last_token)
        self._last_token[index] = now
        metrics.generation_tokens.inc(num_new)

    def _close(self, index: int) -> None:
        """Cancel a generation if the engine has not ended it, and record its end."""
        del self._unfinished[index]
        output = self.outputs[index]
        self._engine.cancel(output.request.id)
        reason, prompt_tokens = output.finish_reason or FinishReason.ABORT, len(output.request.prompt_token_ids)
        self._metrics.finished(reason, time.monotonic() - self._arrival, prompt_tokens, len(output.token_ids))

    def _error(self) -> FailedRequest | None:
        """Return the error that ends the request; None unless generations have ended without a result that it needs."""
        if any(output.finish_reason is FinishReason.OUT_OF_MEMORY for output in self.outputs):
            return out_of_memory()
        if any(output.finish_reason is FinishReason.GRAMMAR for output in self.outputs):
            return grammar_too_complex()
        if any(output.finish_reason is FinishReason.REJECTED for output in self.outputs):
            return rejected_by_engine()
        if all(output.finish_reason is FinishReason.DEADLINE and not output.token_ids for output in self.outputs):
            return timed_out(self.outputs[0].request)
        return None


def _mean_logprob(output: RequestOutput) -> float:
    """Return the mean logprob of the generated tokens; the sum would favour short generations."""
    return sum(entry.logprob for entry in output.logprobs or ()) / max(1, len(output.token_ids))


def _status(kind: type[BaseException] | None, error: BaseException | None) -> int:
    if kind is None:
        return 200
    if isinstance(error, APIError):
        return error.status
    # Proxies log 499 for "client closed request".
    return 499 if issubclass(kind, asyncio.CancelledError | GeneratorExit) else 500

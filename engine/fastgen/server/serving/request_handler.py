"""One HTTP request's generations: runs them, records metrics and logs the outcome."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from fastgen import logs
from fastgen.core.request import FinishReason, Request
from fastgen.engine.client import EngineDeadError
from fastgen.engine.request_output import OutputDelta, RequestOutput, Usage
from fastgen.server.http.errors import APIError, engine_died, out_of_memory
from fastgen.server.http.request_context import Outcome, current
from fastgen.server.serving.lifecycle import ServedModel
from fastgen.server.serving.metrics import Metrics
from fastgen.text.output import TextRules

log = logging.getLogger("fastgen.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """How generations become the choices of one HTTP request.

    Attributes:
        num_choices: choices per prompt.
        num_candidates: generations per prompt; those with the highest mean logprob become the choices.
        text: how tokens become text.
        prompt_only: return only the prompt and its logprobs, no generated token.
    """

    num_choices: int = 1
    num_candidates: int = 1
    text: TextRules = field(default_factory=TextRules)
    prompt_only: bool = False


class RequestHandler:
    """Runs the generations of one HTTP request: `num_candidates` for each prompt, in order.

    Use it as a context manager; on exit it logs the request.
    """

    def __init__(
        self,
        response_id: str,
        model: ServedModel,
        metrics: Metrics,
        requests: Sequence[Request],
        options: OutputOptions,
        arrival: float,
    ) -> None:
        self.id = response_id
        self.created = int(time.time())
        self._engine = model.engine
        self._metrics = metrics
        self._options = options
        self._arrival = arrival
        self._first_token_seconds: float | None = None
        self.outputs = [RequestOutput(request, model.tokenizer, options.text) for request in requests]

    def __enter__(self) -> RequestHandler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        usage, first_token = self.usage(), self._first_token_seconds
        current().outcome = outcome = Outcome(
            response_id=self.id,
            usage=usage,
            finish_reasons=tuple(str(output.finish_reason or "none") for output in self.outputs),
            arrival=self._arrival,
            queue_seconds=min((o.queue_seconds for o in self.outputs if o.queue_seconds is not None), default=None),
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
        per_prompt = [output.usage for output in self.outputs[:: self._options.num_candidates]]
        return Usage(
            sum(usage.prompt_tokens for usage in per_prompt),
            sum(len(output.token_ids) for output in self.outputs),
            sum(usage.cached_tokens for usage in per_prompt),
        )

    async def stream(self) -> AsyncGenerator[tuple[int, OutputDelta]]:
        """Yield deltas with the index of their generation. Closing the iterator cancels the generations.

        Raises:
            APIError: if the engine dies or lacks the memory, or if the deadline passes before the first token.
        """
        try:
            if len(self.outputs) == 1:
                async with aclosing(self._run(self.outputs[0])) as deltas:
                    async for delta in deltas:
                        self._check_ends()
                        yield 0, delta
            else:
                async with aclosing(self._run_all()) as indexed_deltas:
                    async for indexed in indexed_deltas:
                        self._check_ends()
                        yield indexed
        except EngineDeadError as error:
            raise engine_died(str(error)) from error

    async def finish(self) -> list[RequestOutput]:
        """Run to the end and return the chosen outputs, one per choice, in order.

        Raises:
            APIError: if the engine dies or lacks the memory, or if the deadline passes before the first token.
        """
        async with aclosing(self.stream()) as deltas:
            async for _ in deltas:
                pass
        wanted, candidates = self._options.num_choices, self._options.num_candidates
        if wanted == candidates:
            return self.outputs
        chosen: list[RequestOutput] = []
        for start in range(0, len(self.outputs), candidates):
            chosen += sorted(self.outputs[start : start + candidates], key=_mean_logprob, reverse=True)[:wanted]
        return chosen

    def _check_ends(self) -> None:
        if any(output.finish_reason is FinishReason.OUT_OF_MEMORY for output in self.outputs):
            raise out_of_memory()
        if all(output.finish_reason is FinishReason.DEADLINE and not output.token_ids for output in self.outputs):
            seconds = self.outputs[0].request.deadline_seconds
            raise APIError(
                408,
                f"timeout: {seconds:g} s passed before the first token; raise it or try again later",
                code="deadline_exceeded",
                param="timeout",
            )

    async def _run(self, output: RequestOutput) -> AsyncGenerator[OutputDelta]:
        request, metrics = output.request, self._metrics
        prompt_tokens = len(request.prompt_token_ids)
        previous: float | None = None
        try:
            async with aclosing(self._engine.generate(request)) as token_outputs:
                async for token_output in token_outputs:
                    num_new = len(token_output.token_ids)
                    if num_new:
                        now = time.monotonic()
                        if previous is None:
                            seconds = now - self._arrival
                            self._first_token_seconds = min(seconds, self._first_token_seconds or seconds)
                            metrics.first_token(seconds, prompt_tokens)
                        else:
                            metrics.next_token(now - previous)
                        previous = now
                        metrics.generated(num_new)
                        if self._options.prompt_only:
                            token_output = msgspec.structs.replace(
                                token_output, token_ids=[], logprobs=None, finish_reason=FinishReason.LENGTH
                            )
                    delta = output.push(token_output)
                    if delta.text or delta.finish_reason is not None:
                        yield delta
                    if delta.finish_reason is not None:
                        break
        finally:
            reason = output.finish_reason or FinishReason.ABORT
            metrics.finished(reason, time.monotonic() - self._arrival, prompt_tokens, len(output.token_ids))

    async def _run_all(self) -> AsyncGenerator[tuple[int, OutputDelta]]:
        """Run several generations at once; yield their deltas in the order of arrival."""
        queue: asyncio.Queue[tuple[int, OutputDelta] | EngineDeadError] = asyncio.Queue()

        async def pump(index: int, output: RequestOutput) -> None:
            try:
                async with aclosing(self._run(output)) as deltas:
                    async for delta in deltas:
                        queue.put_nowait((index, delta))
            except EngineDeadError as error:
                queue.put_nowait(error)

        pumps = [asyncio.create_task(pump(index, output)) for index, output in enumerate(self.outputs)]
        unfinished = len(pumps)
        try:
            while unfinished:
                indexed = await queue.get()
                if isinstance(indexed, EngineDeadError):
                    raise indexed
                unfinished -= indexed[1].finish_reason is not None
                yield indexed
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)


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

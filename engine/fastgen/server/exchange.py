"""One HTTP request's generations: from prompts to text, counted and logged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from fastgen import logs
from fastgen.core.request import FinishReason, Request
from fastgen.process import EngineDeadError
from fastgen.server.context import Outcome, current
from fastgen.server.errors import engine_died
from fastgen.server.lifecycle import ServedModel
from fastgen.server.metrics import Metrics
from fastgen.server.responses import Usage
from fastgen.text.output import OutputText, TextDelta

log = logging.getLogger("fastgen.server")


@dataclass(slots=True)
class Generation:
    """What became of one prompt so far."""

    request: Request
    output: OutputText
    first_token_seconds: float | None = None
    queue_seconds: float | None = None
    finish_reason: FinishReason | None = None


class Exchange:
    """The generations that one HTTP request asked for.

    Use it as a context: leaving it logs the one line that there is for every request.
    """

    def __init__(
        self,
        request_id: str,
        model: ServedModel,
        metrics: Metrics,
        requests: Sequence[Request],
        stop: Sequence[str],
        arrival: float,
    ) -> None:
        self.id = request_id
        self.created = int(time.time())
        self._model = model
        self._metrics = metrics
        self._arrival = arrival
        self._generations = [Generation(request, OutputText(model.tokenizer, stop)) for request in requests]

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        first = min(
            (g.first_token_seconds for g in self._generations if g.first_token_seconds is not None), default=None
        )
        usage = self.usage()
        current().outcome = outcome = Outcome(
            response_id=self.id,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reasons=tuple(str(g.finish_reason or "none") for g in self._generations),
            arrival=self._arrival,
            queue_seconds=min(
                (g.queue_seconds for g in self._generations if g.queue_seconds is not None), default=None
            ),
            first_token_seconds=first,
            total_seconds=time.monotonic() - self._arrival,
        )
        logs.say(
            log,
            "request",
            id=self.id,
            # 499, "client closed request", is what proxies log for it
            status=200 if kind is None else 499 if issubclass(kind, asyncio.CancelledError | GeneratorExit) else 500,
            finish=",".join(outcome.finish_reasons),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            first_token="none" if first is None else f"{first:.3f}s",
            total=f"{outcome.total_seconds:.3f}s",
        )

    def usage(self) -> Usage:
        """Tokens of all prompts together."""
        prompt = sum(len(g.request.prompt_token_ids) for g in self._generations)
        completion = sum(g.output.num_tokens for g in self._generations)
        return Usage(prompt, completion, prompt + completion)

    async def deltas(self) -> AsyncGenerator[tuple[int, TextDelta]]:
        """Pieces of text as they come, each with its prompt's index; leaving it early frees what the engine holds.

        Raises:
            APIError: when the engine dies.
        """
        try:
            if len(self._generations) == 1:
                async with aclosing(self._run(self._generations[0])) as pieces:
                    async for delta in pieces:
                        yield 0, delta
            else:
                async with aclosing(self._run_all()) as pieces_of_all:
                    async for piece in pieces_of_all:
                        yield piece
        except EngineDeadError as error:
            raise engine_died(str(error)) from error

    async def texts(self) -> list[tuple[str, FinishReason]]:
        """The whole text of each prompt's generation, and why it ended.

        Raises:
            APIError: when the engine dies.
        """
        pieces: list[list[str]] = [[] for _ in self._generations]
        async with aclosing(self.deltas()) as deltas:
            async for index, delta in deltas:
                pieces[index].append(delta.text)
        ends = [g.finish_reason for g in self._generations]
        return [("".join(text), end) for text, end in zip(pieces, ends, strict=True) if end is not None]

    async def _run(self, generation: Generation) -> AsyncGenerator[TextDelta]:
        request, output, metrics = generation.request, generation.output, self._metrics
        prompt_tokens, previous = len(request.prompt_token_ids), self._arrival
        try:
            async with aclosing(self._model.engine.generate(request)) as tokens:
                async for got in tokens:
                    now = time.monotonic()
                    if got.queue_seconds is not None:
                        generation.queue_seconds = got.queue_seconds
                    if got.token_ids:
                        if generation.first_token_seconds is None:
                            generation.first_token_seconds = now - self._arrival
                            metrics.first_token(generation.first_token_seconds, prompt_tokens)
                        else:
                            metrics.next_token(now - previous)
                        previous = now
                        metrics.generated(len(got.token_ids))
                    delta = output.push(got.token_ids, got.finish_reason)
                    generation.finish_reason = delta.finish_reason
                    if delta.text or delta.finish_reason is not None:
                        yield delta
                    if delta.finish_reason is not None:
                        break
        finally:
            reason = generation.finish_reason or FinishReason.ABORT
            metrics.finished(reason, time.monotonic() - self._arrival, prompt_tokens, output.num_tokens)

    async def _run_all(self) -> AsyncGenerator[tuple[int, TextDelta]]:
        """Several generations at once, their pieces in the order in which they come."""
        pieces: asyncio.Queue[tuple[int, TextDelta] | EngineDeadError] = asyncio.Queue()

        async def pump(index: int, generation: Generation) -> None:
            try:
                async with aclosing(self._run(generation)) as deltas:
                    async for delta in deltas:
                        pieces.put_nowait((index, delta))
            except EngineDeadError as error:
                pieces.put_nowait(error)

        pumps = [asyncio.create_task(pump(index, generation)) for index, generation in enumerate(self._generations)]
        unfinished = len(pumps)
        try:
            while unfinished:
                piece = await pieces.get()
                if isinstance(piece, EngineDeadError):
                    raise piece
                unfinished -= piece[1].finish_reason is not None
                yield piece
        finally:
            for task in pumps:
                task.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

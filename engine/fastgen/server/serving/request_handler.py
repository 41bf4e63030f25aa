"""One HTTP request's generations: from prompts to text, counted and logged."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from fastgen import logs
from fastgen.core.request import FinishReason, Request
from fastgen.engine.client import EngineDeadError
from fastgen.server.http.errors import APIError, engine_died
from fastgen.server.http.request_context import Outcome, current
from fastgen.server.openai.responses import PromptTokensDetails, Usage
from fastgen.server.serving.lifecycle import ServedModel
from fastgen.server.serving.metrics import Metrics
from fastgen.server.serving.outputs import Answer, Generation, Piece, Shape
from fastgen.text.output import OutputText

log = logging.getLogger("fastgen.server")


class RequestHandler:
    """The generations that one HTTP request asked for: `shape.num_candidates` for each prompt, in order.

    Use it as a context: leaving it logs the one line that there is for every request.
    """

    def __init__(
        self,
        response_id: str,
        model: ServedModel,
        metrics: Metrics,
        requests: Sequence[Request],
        shape: Shape,
        arrival: float,
    ) -> None:
        self.id = response_id
        self.created = int(time.time())
        self._model = model
        self._metrics = metrics
        self._shape = shape
        self._arrival = arrival
        self._generations = [Generation(request, OutputText(model.tokenizer, shape.text)) for request in requests]

    def __enter__(self) -> RequestHandler:
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
            status=_status(kind, error),
            finish=",".join(outcome.finish_reasons),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            first_token="none" if first is None else f"{first:.3f}s",
            total=f"{outcome.total_seconds:.3f}s",
        )

    def usage(self) -> Usage:
        """Tokens of all prompts together."""
        of_prompts = self._generations[:: self._shape.num_candidates]
        prompt = sum(len(g.request.prompt_token_ids) for g in of_prompts)
        completion = sum(g.output.num_tokens for g in self._generations)
        cached = PromptTokensDetails(sum(g.cached_tokens for g in of_prompts))
        return Usage(prompt, completion, prompt + completion, cached)

    def generation(self, index: int) -> Generation:
        """The generation behind a streamed choice."""
        return self._generations[index]

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece]]:
        """Pieces of text as they come, each with its choice's index; leaving it early frees what the engine holds.

        Raises:
            APIError: when the engine dies, or the deadline passes before there is anything.
        """
        try:
            if len(self._generations) == 1:
                async with aclosing(self._run(self._generations[0])) as pieces:
                    async for piece in pieces:
                        self._check_deadline()
                        yield 0, piece
            else:
                async with aclosing(self._run_all()) as pieces_of_all:
                    async for indexed in pieces_of_all:
                        self._check_deadline()
                        yield indexed
        except EngineDeadError as error:
            raise engine_died(str(error)) from error

    async def answers(self) -> list[Answer]:
        """All choices, whole and in order.

        Raises:
            APIError: when the engine dies, or the deadline passes before there is anything.
        """
        answers = [Answer(0, generation, "", [], "", None) for generation in self._generations]
        texts: list[list[str]] = [[] for _ in answers]
        async with aclosing(self.pieces()) as pieces:
            async for place, piece in pieces:
                texts[place].append(piece.text)
                answers[place].logprobs += piece.logprobs
                if piece.finish_reason is not None:
                    answers[place].finish_reason, answers[place].stop_reason = piece.finish_reason, piece.stop_reason
        for answer, text in zip(answers, texts, strict=True):
            answer.text = "".join(text)
        return self._best(answers)

    def _best(self, answers: list[Answer]) -> list[Answer]:
        """For each prompt its best candidates, the best first; all of them in their order where all are wanted."""
        wanted, candidates = self._shape.num_choices, self._shape.num_candidates
        chosen = []
        for start in range(0, len(answers), candidates):
            of_prompt = answers[start : start + candidates]
            if wanted < candidates:
                of_prompt.sort(key=lambda answer: -answer.generation.mean_logprob)
            chosen += of_prompt[:wanted]
        for index, answer in enumerate(chosen):
            answer.index = index
        return chosen

    def _check_deadline(self) -> None:
        if all(generation.missed_deadline for generation in self._generations):
            seconds = self._generations[0].request.deadline_seconds
            raise APIError(
                408,
                f"the timeout of {seconds:g} s passed before the first token",
                code="deadline_exceeded",
                param="timeout",
            )

    async def _run(self, generation: Generation) -> AsyncGenerator[Piece]:
        request, metrics = generation.request, self._metrics
        prompt_tokens, previous = len(request.prompt_token_ids), self._arrival
        try:
            async with aclosing(self._model.engine.generate(request)) as outputs:
                async for got in outputs:
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
                    if got.cached_tokens is not None:
                        generation.cached_tokens = got.cached_tokens
                    if self._shape.scores_only and got.token_ids:
                        got = msgspec.structs.replace(
                            got, token_ids=[], logprobs=None, finish_reason=FinishReason.LENGTH
                        )
                    piece = generation.take(got)
                    if piece is not None:
                        yield piece
                    if generation.finish_reason is not None:
                        break
        finally:
            reason = generation.finish_reason or FinishReason.ABORT
            metrics.finished(reason, time.monotonic() - self._arrival, prompt_tokens, generation.output.num_tokens)

    async def _run_all(self) -> AsyncGenerator[tuple[int, Piece]]:
        """Several generations at once, their pieces in the order in which they come."""
        pieces: asyncio.Queue[tuple[int, Piece] | EngineDeadError] = asyncio.Queue()

        async def pump(index: int, generation: Generation) -> None:
            try:
                async with aclosing(self._run(generation)) as own:
                    async for piece in own:
                        pieces.put_nowait((index, piece))
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


def _status(kind: type[BaseException] | None, error: BaseException | None) -> int:
    if kind is None:
        return 200
    if isinstance(error, APIError):
        return error.status
    # 499, "client closed request", is what proxies log for it
    return 499 if issubclass(kind, asyncio.CancelledError | GeneratorExit) else 500

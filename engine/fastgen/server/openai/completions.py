"""/v1/completions: texts or tokens, continued."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec
from fastapi import APIRouter, Request, Response

from fastgen.core.step_output import TokenLogprobs
from fastgen.server.http.body_limit import JSONRoute
from fastgen.server.http.sse import EventStream, event, while_connected
from fastgen.server.openai.logprobs import CompletionLikelihoods, TokenNames, joined, prompt_logprobs
from fastgen.server.openai.protocol import CompletionRequest
from fastgen.server.openai.responses import Completion, CompletionChoice, CompletionLogprobs, PromptLogprobs
from fastgen.server.serving.lifecycle import ServedModel
from fastgen.server.serving.outputs import Answer, Generation, Piece, Shape
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.server.serving.service import Prompt, Service, bad_word_tokens, called, checked, encode, room_after
from fastgen.text.tokenizer import Tokenizer

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continues each prompt."""
    service: Service = request.app.state.service
    model, name = service.lifecycle.model(), service.check_model(body.model)
    body.check()
    with called(body.aliases):
        service.check_number(model, len(body.prompt), body.num_candidates)
        prompts = await _prompts(body, model)
        handler = service.open_handler("cmpl", model, prompts, _shape(body), body.terms())
    writer = _Writer(body, model.tokenizer)
    if body.stream:
        return EventStream(_stream(handler, name, body, writer))
    return await while_connected(request, _whole(handler, name, writer))


def _shape(body: CompletionRequest) -> Shape:
    return Shape(
        num_choices=body.num_choices,
        num_candidates=body.num_candidates,
        text=body.text_rules(),
        scores_only=body.scores_only,
    )


async def _prompts(body: CompletionRequest, model: ServedModel) -> list[Prompt]:
    structure = body.structure()
    grammar = None if structure is None else await checked(*structure, model.tokenizer)
    bad_words = await bad_word_tokens(body.bad_words, model.tokenizer)
    # The best of several is told by its likelihood, asked for or not.
    logprobs = body.logprobs if body.num_candidates == body.num_choices else (body.logprobs or 0)
    echoed = body.logprobs if body.echo else None
    of_prompt = max((count for count in (echoed, body.prompt_logprobs) if count is not None), default=None)

    def prompt(tokens: list[int]) -> Prompt:
        limit = body.token_limit(room_after(model, len(tokens)))
        sampling = body.sampling(
            limit, logprobs=logprobs, prompt_logprobs=of_prompt, grammar=grammar, bad_words=bad_words
        )
        return Prompt(tokens, sampling)

    return [prompt(tokens) for tokens in await _token_ids(body, model)]


async def _token_ids(body: CompletionRequest, model: ServedModel) -> list[list[int]]:
    """The prompts as tokens; they are all texts or all tokens."""
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    for text in texts:
        model.longest_text.check(text, "prompt")
    encoded = await encode(model.tokenizer, texts, add_special_tokens=body.add_special_tokens is not False)
    return [prompt for prompt in body.prompt if not isinstance(prompt, str)] or encoded


async def _whole(handler: RequestHandler, name: str, writer: _Writer) -> Response:
    with handler:
        choices = [writer.whole(answer) for answer in await handler.answers()]
    completion = Completion(handler.id, handler.created, name, choices, handler.usage())
    return Response(msgspec.json.encode(completion), media_type="application/json")


async def _stream(
    handler: RequestHandler, name: str, body: CompletionRequest, writer: _Writer
) -> AsyncGenerator[bytes]:
    no_usage_yet = None if body.include_usage else msgspec.UNSET
    with handler:
        async with aclosing(handler.pieces()) as pieces:
            async for index, piece in pieces:
                choice = writer.next(index, piece, handler.generation(index))
                usage = handler.usage() if body.continuous_usage else no_usage_yet
                yield event(Completion(handler.id, handler.created, name, [choice], usage))
    if body.include_usage:
        yield event(Completion(handler.id, handler.created, name, [], handler.usage()))


@dataclass(slots=True)
class _Writer:
    """Writes choices as the client wants them: after their prompt, with log-probabilities, or plainly."""

    body: CompletionRequest
    tokenizer: Tokenizer
    _begun: dict[int, CompletionLikelihoods | None] = field(default_factory=dict)

    def whole(self, answer: Answer) -> CompletionChoice:
        """A choice at once."""
        piece = Piece(answer.text, answer.logprobs, answer.finish_reason, answer.stop_reason)
        return self.next(answer.index, piece, answer.generation)

    def next(self, index: int, piece: Piece, generation: Generation) -> CompletionChoice:
        """The next piece of a choice; the first one has the prompt before it, where that is echoed."""
        text, logprobs = piece.text, None
        begins = index not in self._begun
        if begins:
            self._begun[index] = None if self.body.logprobs is None else self._likelihoods()
        likelihoods = self._begun[index]
        echoed = self._prompt_text(index) if begins and self.body.echo else None
        if echoed is not None:
            text = echoed + text
        if likelihoods is not None:
            logprobs = self._logprobs(likelihoods, piece.logprobs, generation, echoed)
        return CompletionChoice(
            index, text, piece.finish_reason, logprobs, piece.stop_reason, self._of_prompt(generation)
        )

    def _logprobs(
        self,
        likelihoods: CompletionLikelihoods,
        entries: Sequence[TokenLogprobs],
        generation: Generation,
        echoed: str | None,
    ) -> CompletionLogprobs:
        if echoed is None:
            return likelihoods.of(entries)
        prompt = likelihoods.of_prompt(echoed, generation.request.prompt_token_ids, generation.prompt_logprobs)
        return joined(prompt, likelihoods.of(entries))

    def _of_prompt(self, generation: Generation) -> PromptLogprobs | msgspec.UnsetType:
        if self.body.prompt_logprobs is None:
            return msgspec.UNSET
        return prompt_logprobs(self._names(), generation.prompt_logprobs)

    def _prompt_text(self, index: int) -> str:
        prompt = self.body.prompt[index // self.body.num_choices]
        if isinstance(prompt, str):
            return prompt
        return self.tokenizer.decode(prompt, skip_special_tokens=self.body.skip_special_tokens is not False)

    def _likelihoods(self) -> CompletionLikelihoods:
        hidden = frozenset[int]() if self.body.skip_special_tokens is False else self.tokenizer.special_token_ids
        return CompletionLikelihoods(self._names(), hidden)

    def _names(self) -> TokenNames:
        return TokenNames(self.tokenizer, bool(self.body.return_tokens_as_token_ids))

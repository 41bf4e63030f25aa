"""/v1/completions: continue strings or token lists."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType

from fastgen.core.request import Request as EngineRequest
from fastgen.engine.request_output import OutputDelta, RequestOutput
from fastgen.server.http.body_limit import JSONRoute
from fastgen.server.http.sse import DONE, EventTemplate, event, while_connected
from fastgen.server.openai.chunk_events import ChunkEvents
from fastgen.server.openai.logprobs import CompletionLogprobsWriter, TokenText, concatenate, prompt_logprobs
from fastgen.server.openai.protocol import CompletionRequest
from fastgen.server.openai.responses import (
    Completion,
    CompletionChoice,
    CompletionUsage,
    finish_reason,
    json_response,
)
from fastgen.server.serving.encoding import encode, encode_bad_words
from fastgen.server.serving.lifecycle import ServedModel
from fastgen.server.serving.request_handler import OutputOptions, RequestHandler
from fastgen.server.serving.service import Service, client_names
from fastgen.server.serving.token_stream import TokenStream
from fastgen.text.tokenizer import Tokenizer

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue each prompt."""
    service: Service = request.app.state.service
    model, name = service.model_for("generate"), service.check_model(body.model)
    body.check()
    options = OutputOptions(
        num_choices=body.num_choices,
        num_candidates=body.num_candidates,
        text=body.text_rules(),
        prompt_only=body.prompt_only,
    )
    with client_names(body.aliases):
        places = service.reserve(model, len(body.prompt), body.num_candidates)
        handler = service.handler("cmpl", places, await _engine_requests(body, model), options)
    writer = _ChoiceWriter(body, model.tokenizer)
    if body.stream:
        return TokenStream(handler, _StreamEvents(handler, name, body, writer))
    return await while_connected(request, _complete(handler, name, writer))


async def _engine_requests(body: CompletionRequest, model: ServedModel) -> list[EngineRequest]:
    grammar = await model.grammars.checked(body.structure())
    bad_words = await encode_bad_words(body.bad_words, model.tokenizer)
    # best_of compares logprobs, so the engine returns them even if the client did not request them.
    logprobs = body.logprobs if body.num_candidates == body.num_choices else (body.logprobs or 0)
    echoed = body.logprobs if body.echo else None
    prompt_logprobs = max((count for count in (echoed, body.prompt_logprobs) if count is not None), default=None)

    def engine_request(tokens: list[int]) -> EngineRequest:
        sampling = body.sampling(
            body.token_limit(model.remaining_length(len(tokens))),
            model.generation_defaults,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            bad_words=bad_words,
        )
        return body.engine_request(tokens, sampling)

    length = model.engine.info.max_model_length
    return [engine_request(body.truncated(tokens, length)) for tokens in await _token_ids(body, model)]


async def _token_ids(body: CompletionRequest, model: ServedModel) -> list[list[int]]:
    """Return the token ids of the prompts, which are all strings or all token lists."""
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    for text in texts:
        model.prompt_size_limit.check(text, "prompt")
    encoded = await encode(model.tokenizer, texts, add_special_tokens=body.add_special_tokens is not False)
    return [prompt for prompt in body.prompt if not isinstance(prompt, str)] or encoded


async def _complete(handler: RequestHandler, name: str, writer: _ChoiceWriter) -> Response:
    with handler:
        outputs = await handler.finish()
    choices = [writer.write(index, output, output.as_delta()) for index, output in enumerate(outputs)]
    completion = Completion(handler.id, handler.created, name, choices, CompletionUsage.of(handler.usage()))
    return json_response(completion)


class _StreamEvents(ChunkEvents):
    """Encodes the chunks of a stream."""

    def __init__(self, handler: RequestHandler, name: str, body: CompletionRequest, writer: _ChoiceWriter) -> None:
        super().__init__(handler, name)
        self._body = body
        self._writer = writer

    def _chunks(self, index: int, delta: OutputDelta) -> bytes:
        body = self._body
        if not (body.logprobs is not None or body.return_token_ids or body.continuous_usage):
            self._templates[index] = EventTemplate(lambda text: self._chunk(CompletionChoice(index, text, None)))
        return event(self._chunk(self._writer.write(index, self._handler.outputs[index], delta)))

    def end(self) -> bytes:
        return event(self._completion([], self._usage())) + DONE if self._body.include_usage else DONE

    def _chunk(self, choice: CompletionChoice) -> Completion:
        no_usage_yet = None if self._body.include_usage else UNSET
        return self._completion([choice], self._usage() if self._body.continuous_usage else no_usage_yet)

    def _completion(self, choices: list[CompletionChoice], usage: CompletionUsage | UnsetType | None) -> Completion:
        return Completion(self._handler.id, self._handler.created, self._name, choices, usage)

    def _usage(self) -> CompletionUsage:
        return CompletionUsage.of(self._handler.usage())


class _ChoiceWriter:
    """Converts output deltas to choices, with the echoed prompt and logprobs if requested."""

    def __init__(self, body: CompletionRequest, tokenizer: Tokenizer) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._token_text = TokenText(tokenizer, bool(body.return_tokens_as_token_ids))
        self._logprobs_writers: dict[int, CompletionLogprobsWriter] = {}
        self._num_sent_tokens: dict[int, int] = {}

    def write(self, index: int, output: RequestOutput, delta: OutputDelta) -> CompletionChoice:
        """Return the choice for a delta; the first delta of a choice carries the echoed prompt."""
        body, text = self._body, delta.text
        is_first = index not in self._logprobs_writers
        if is_first:
            hidden = frozenset[int]() if body.skip_special_tokens is False else self._tokenizer.special_token_ids
            self._logprobs_writers[index] = CompletionLogprobsWriter(self._token_text, hidden)
        writer = self._logprobs_writers[index]
        prompt = None
        if is_first and body.echo:
            echoed = self._prompt_text(index)
            text = echoed + text
            if body.logprobs is not None:
                prompt = writer.write_prompt(echoed, output.request.prompt_token_ids, output.prompt_logprobs or ())
        logprobs = None if body.logprobs is None else writer.write(delta.logprobs)
        if prompt is not None and logprobs is not None:
            logprobs = concatenate(prompt, logprobs)
        return CompletionChoice(
            index,
            text,
            finish_reason(delta.finish_reason),
            logprobs,
            delta.stop_reason,
            UNSET if body.prompt_logprobs is None else prompt_logprobs(self._token_text, output.prompt_logprobs or ()),
            output.request.prompt_token_ids if is_first and body.return_token_ids else UNSET,
            self._take_tokens(index, output) if body.return_token_ids else UNSET,
        )

    def _take_tokens(self, index: int, output: RequestOutput) -> list[int]:
        """Return the token ids of a choice since its last chunk."""
        token_ids = output.token_ids[self._num_sent_tokens.get(index, 0) :]
        self._num_sent_tokens[index] = len(output.token_ids)
        return token_ids

    def _prompt_text(self, index: int) -> str:
        prompt = self._body.prompt[index // self._body.num_choices]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=self._body.skip_special_tokens is not False)

"""/v1/completions: continue strings or token lists."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from fastgen.server.http.json_route import JSONRoute
from fastgen.server.http.off_loop import off_loop
from fastgen.server.http.sse import EventTemplate, event, while_connected
from fastgen.server.openai import echo
from fastgen.server.openai.chunk_events import ChunkEvents
from fastgen.server.openai.generation_request import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from fastgen.server.openai.logprobs import CompletionLogprobsWriter, TokenText, concatenate, prompt_logprobs
from fastgen.server.openai.receipts import ReceiptWriter
from fastgen.server.openai.response_bodies import (
    Completion,
    CompletionChoice,
    CompletionUsage,
    finish_reason,
    json_response,
)
from fastgen.server.serving.encoding import encode, encode_bad_words
from fastgen.server.serving.held_memory import check_streamed_prompts
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.server.serving.served_model import ServedModel
from fastgen.server.serving.service import Service, client_names
from fastgen.server.serving.token_stream import TokenStream
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.request_output import OutputDelta, RequestOutput
from fastgen.text.tokenizer import Tokenizer

router = APIRouter(route_class=JSONRoute)


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue each prompt."""
    service: Service = request.app.state.service
    model, name = service.model_for("generate"), service.check_model(body.model)
    body.check()
    receipts = await ReceiptWriter.of(body, model, name)
    with client_names(body.aliases):
        ids = service.reserve(model, len(body.prompt), body.num_candidates)
        rendered = await rendered_completion(body, model)
        if body.stream:
            check_streamed_prompts(rendered.requests)
        handler = service.handler("cmpl", model, ids, rendered)
    if body.stream:
        return TokenStream(handler, _CompletionEvents(handler, name, body, receipts))
    return await while_connected(request, _complete(handler, name, body, receipts))


async def rendered_completion(body: CompletionRequest, model: ServedModel) -> RenderedRequest:
    """Return what to generate; the prompts are all strings or all token lists.

    Raises:
        RequestError: if the model cannot serve the request.
        CheckerUnavailable: if grammars cannot be checked now.
    """
    grammar = await model.grammars.admitted(body.structure())
    bad_words = await encode_bad_words(body.bad_words, model.tokenizer)
    # best_of compares logprobs, so the engine returns them even if the client did not request them.
    logprobs = body.logprobs if body.num_candidates == body.num_choices else (body.logprobs or 0)
    counts = (body.logprobs if body.echo else None, body.prompt_logprobs)
    prompt_logprobs = max((count for count in counts if count is not None), default=None)
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    for text in texts:
        model.prompt_size_limit.check(text, "prompt")
    encoded = await encode(model.tokenizer, texts, add_special_tokens=body.add_special_tokens is not False)
    requests = [
        body.prompt_request(
            tokens,
            model,
            DEFAULT_COMPLETION_TOKENS,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            bad_words=bad_words,
        )
        for tokens in [prompt for prompt in body.prompt if not isinstance(prompt, str)] or encoded
    ]
    return body.rendered(requests, echo=bool(body.echo), prompt_only=body.prompt_only)


async def _complete(
    handler: RequestHandler, name: str, body: CompletionRequest, receipts: ReceiptWriter | None
) -> Response:
    with handler:
        outputs = await handler.finish()
    return await off_loop(_response, handler, name, body, receipts, outputs)


def _response(
    handler: RequestHandler,
    name: str,
    body: CompletionRequest,
    receipts: ReceiptWriter | None,
    outputs: list[RequestOutput],
) -> Response:
    choices = [
        _ChoiceWriter(index, body, handler.tokenizer).write(output, output.as_delta())
        for index, output in enumerate(outputs)
    ]
    completion = Completion(
        handler.id,
        handler.created,
        name,
        choices,
        CompletionUsage.of(handler.usage()),
        UNSET if receipts is None else receipts.write(outputs, body.num_choices),
        system_fingerprint=handler.fingerprint,
    )
    return json_response(completion)


class _CompletionEvents(ChunkEvents[CompletionRequest]):
    """Encodes the chunks of a stream."""

    chunk_type = Completion

    def __init__(
        self, handler: RequestHandler, name: str, body: CompletionRequest, receipts: ReceiptWriter | None
    ) -> None:
        super().__init__(handler, name, body, receipts)
        self._is_plain = body.logprobs is None and not (body.return_token_ids or body.continuous_usage)
        self._writers = [_ChoiceWriter(index, body, handler.tokenizer) for index in range(len(handler.outputs))]

    def _chunks(self, index: int, delta: OutputDelta) -> bytes:
        if self._is_plain:
            self._templates[index] = EventTemplate(lambda text: self._chunk(CompletionChoice(index, text, None)))
        return event(self._chunk(self._writers[index].write(self._handler.outputs[index], delta)))

    def _chunk(self, choice: CompletionChoice) -> Completion:
        fingerprint = self._handler.fingerprint
        return Completion(*self._head, [choice], self._usage_so_far(), system_fingerprint=fingerprint)


class _ChoiceWriter:
    """Converts the deltas of one generation to choices; the first has the echoed prompt, if requested."""

    def __init__(self, index: int, body: CompletionRequest, tokenizer: Tokenizer) -> None:
        self._index = index
        self._body = body
        self._prompt = body.prompt[index // body.num_choices]
        self._tokenizer = tokenizer
        self._token_text = TokenText(tokenizer, bool(body.return_tokens_as_token_ids))
        self._hidden = frozenset[int]() if body.skip_special_tokens is False else tokenizer.special_token_ids
        self._logprobs = CompletionLogprobsWriter(self._token_text, self._hidden)
        self._is_first = True
        self._num_sent_tokens = 0

    def write(self, output: RequestOutput, delta: OutputDelta) -> CompletionChoice:
        """Return the choice for a delta of `output`."""
        body, prompt_token_ids = self._body, output.request.prompt_token_ids
        is_first, self._is_first = self._is_first, False
        echoed = self._prompt_text(prompt_token_ids) if is_first and body.echo else ""
        logprobs = None
        if body.logprobs is not None and is_first and body.echo:
            hidden = frozenset[int]() if isinstance(self._prompt, str) else self._hidden
            offsets = echo.offsets(echoed, prompt_token_ids, self._tokenizer, hidden)
            prompt = self._logprobs.write_prompt(echoed, offsets, prompt_token_ids, output.prompt_logprobs or ())
            logprobs = concatenate(prompt, self._logprobs.write(delta.logprobs))
        elif body.logprobs is not None:
            logprobs = self._logprobs.write(delta.logprobs)
        token_ids = output.token_ids[self._num_sent_tokens :]
        self._num_sent_tokens += len(token_ids)
        return CompletionChoice(
            self._index,
            echoed + delta.text,
            finish_reason(delta.finish_reason),
            logprobs,
            delta.stop_reason,
            UNSET if body.prompt_logprobs is None else prompt_logprobs(self._token_text, output.prompt_logprobs or ()),
            prompt_token_ids if is_first and body.return_token_ids else UNSET,
            token_ids if body.return_token_ids else UNSET,
        )

    def _prompt_text(self, kept: list[int]) -> str:
        """Return the prompt's text: as given, or of the tokens that were given or kept."""
        if isinstance(self._prompt, str) and self._body.truncate_prompt_tokens is None:
            return self._prompt
        return echo.echoed(self._prompt, kept, self._tokenizer, self._hidden)

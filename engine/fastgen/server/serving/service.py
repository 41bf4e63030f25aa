"""State shared by the endpoints, and the path from a validated body to a `RequestHandler`."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from fastgen.core.request import Grammar, Request, RequestError, SamplingParams
from fastgen.server.http.errors import APIError
from fastgen.server.http.request_context import current
from fastgen.server.serving.admission import admit
from fastgen.server.serving.lifecycle import Lifecycle, ServedModel
from fastgen.server.serving.metrics import Metrics
from fastgen.server.serving.request_handler import OutputOptions, RequestHandler
from fastgen.text.grammar import check_grammar
from fastgen.text.tokenizer import Tokenizer

# Each generation takes a stream and a queue place.
_MAX_GENERATIONS = 1024


@dataclass(frozen=True, slots=True)
class Service:
    """State shared by the endpoints.

    Attributes:
        names: model names that requests may use; metrics carry the first one.
        root: the model as it was given to the server.
        max_queued_requests: requests beyond this many waiting ones are rejected with 429.
        trust_request_chat_template: whether requests may bring their own chat template.
        created: start time in Unix seconds, reported for the model.
    """

    names: tuple[str, ...]
    root: str
    lifecycle: Lifecycle
    metrics: Metrics
    max_queued_requests: int
    trust_request_chat_template: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> str:
        """Return the model name to put into the response; the first served name by default.

        Raises:
            APIError: 404 if the model is not served here.
        """
        if name is None:
            name = self.names[0]
        if name not in self.names:
            served = ", ".join(self.names)
            raise APIError(
                404, f"model: {name!r} is not served here; use {served}", code="model_not_found", param="model"
            )
        current().model = name
        return name

    def check_chat_template(self, source: str | None) -> None:
        """Reject a request's own chat template unless the server allows it.

        Raises:
            RequestError: names the flag.
        """
        if source is not None and not self.trust_request_chat_template:
            raise RequestError(
                "chat_template: this server uses the model's; leave it out, or start the server with "
                "--trust-request-chat-template",
                "chat_template",
            )

    def check_num_generations(self, model: ServedModel, num_prompts: int, num_candidates: int) -> None:
        """Reject a request for more generations than can ever be admitted, before doing any work for it.

        Raises:
            RequestError: names the limit.
        """
        places = model.engine.info.max_sequences + self.max_queued_requests
        limit = min(_MAX_GENERATIONS, places)
        if num_prompts * num_candidates > limit:
            why = (
                ""
                if limit == _MAX_GENERATIONS
                else f", the sum of --max-sequences and --max-queued-requests ({places})"
            )
            param = "prompt" if num_prompts > 1 else "n"
            raise RequestError(
                f"{param}: {num_prompts} prompts with {num_candidates} generations each are "
                f"{num_prompts * num_candidates} generations; one request may have at most {limit}{why}, so send "
                "several requests",
                param,
            )

    def admit(
        self, id_prefix: str, model: ServedModel, requests: Sequence[Request], options: OutputOptions
    ) -> RequestHandler:
        """Admit one HTTP request to the queue and return its handler.

        Args:
            id_prefix: start of the response id; the id of the HTTP request follows.
            model: the model to use.
            requests: one per prompt, without ids; each is copied for every candidate.
            options: how the outputs become choices.

        Raises:
            RequestError: if the model cannot serve one of them.
            APIError: 429 if the queue is full.
        """
        arrival = time.monotonic()
        # Clients may choose the id they see, so it need not be unique.
        unique = uuid.uuid4().hex
        for request in requests:
            request.check(model.engine.info.max_model_length, model.engine.info.vocabulary_size)
        candidates = [
            replace(request, id=f"{unique}-{index}-{candidate}", sampling=_for_candidate(request.sampling, candidate))
            for index, request in enumerate(requests)
            for candidate in range(options.num_candidates)
        ]
        admit(model.engine.in_flight, [request.id for request in candidates], self.max_queued_requests)
        return RequestHandler(f"{id_prefix}-{current().id}", model, self.metrics, candidates, options, arrival)


def _for_candidate(sampling: SamplingParams, candidate: int) -> SamplingParams:
    """Derive a seed for each candidate after the first, which keeps the given seed."""
    if candidate == 0 or sampling.seed is None:
        return sampling
    digest = hashlib.blake2b(f"{sampling.seed}:{candidate}".encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "big") >> 1)


@contextmanager
def client_names(aliases: Mapping[str, str]) -> Iterator[None]:
    """Rename engine parameters in RequestErrors to the field names that the client used."""
    try:
        yield
    except RequestError as error:
        alias = aliases.get(error.param)
        if alias is None:
            raise
        raise RequestError(re.sub(rf"\b{error.param}\b", alias, str(error)), alias) from None


async def validated_grammar(structure: tuple[Grammar, str] | None, tokenizer: Tokenizer) -> Grammar | None:
    """Compile the grammar in a thread and return it.

    Args:
        structure: the grammar and the field that it came from, if any.
        tokenizer: the model's tokenizer.

    Raises:
        RequestError: names the field, if the grammar is invalid or too large.
    """
    if structure is None:
        return None
    grammar, param = structure
    try:
        await asyncio.to_thread(check_grammar, grammar, tokenizer)
    except ValueError as error:
        raise RequestError(f"{param}: {error}", param) from None
    return grammar

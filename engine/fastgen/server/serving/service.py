"""What the endpoints share: from a client's prompt to an handler with the engine."""

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
from fastgen.server.serving.admission import Admission
from fastgen.server.serving.lifecycle import Lifecycle, ServedModel
from fastgen.server.serving.metrics import Metrics
from fastgen.server.serving.outputs import Shape
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.text.grammar import check_grammar
from fastgen.text.tokenizer import Tokenizer

# Encoding this many characters takes about as long as a thread hop is worth; more of them leave the loop.
_LONG_TEXT = 4096
# Each is a stream, and a place in the queue.
_MOST_GENERATIONS = 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to continue, and how."""

    token_ids: list[int]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """On what terms the engine takes a request: as in `fastgen.core.request.Request`."""

    priority: int = 0
    deadline_seconds: float | None = None
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Service:
    """The server's parts, as the endpoints need them.

    Attributes:
        names: what requests may call the model; the first one is its name in metrics.
    """

    names: tuple[str, ...]
    lifecycle: Lifecycle
    metrics: Metrics
    admission: Admission
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> str:
        """The name to answer with; a request without one gets the first.

        Raises:
            APIError: 404 for a model that is not served here.
        """
        if name is None:
            name = self.names[0]
        if name not in self.names:
            served = ", ".join(self.names)
            raise APIError(
                404, f"model {name!r} is not served here; {served} is", code="model_not_found", param="model"
            )
        current().model = name
        return name

    def check_number(self, model: ServedModel, num_prompts: int, num_candidates: int) -> None:
        """Checks, before anything is done for a request, that so many generations may come of it.

        Raises:
            RequestError: when they are more than are ever taken at once.
        """
        places = model.engine.info.max_sequences + self.admission.most_queued
        most = min(_MOST_GENERATIONS, places)
        if num_prompts * num_candidates > most:
            held = "" if most == _MOST_GENERATIONS else f", which is what --max-sequences and the queue hold ({places})"
            raise RequestError(
                f"{num_prompts} prompts with {num_candidates} generations each are {num_prompts * num_candidates}: at "
                f"most {most} go into one request{held}, so send several",
                "prompt" if num_prompts > 1 else "n",
            )

    def open_handler(
        self, kind: str, model: ServedModel, prompts: Sequence[Prompt], shape: Shape, terms: Terms
    ) -> RequestHandler:
        """An handler for these prompts; `kind` begins its id, which goes on with that of the HTTP request.

        Raises:
            RequestError: when the model cannot serve one of them.
            APIError: 429 when the queue is full.
        """
        arrival = time.monotonic()
        # The id that clients see may be their own, and theirs need not be unique.
        unique = uuid.uuid4().hex
        info = model.engine.info
        requests = [
            Request(
                id=f"{unique}-{place}-{candidate}",
                prompt_token_ids=prompt.token_ids,
                sampling=_of_candidate(prompt.sampling, candidate),
                priority=terms.priority,
                deadline_seconds=terms.deadline_seconds,
                cache_salt=terms.cache_salt,
            )
            for place, prompt in enumerate(prompts)
            for candidate in range(shape.num_candidates)
        ]
        for request in requests[:: shape.num_candidates]:
            request.check(info.max_model_length, info.vocabulary_size)
        self.admission.admit(model.engine.in_flight, [request.id for request in requests])
        return RequestHandler(f"{kind}-{current().id}", model, self.metrics, requests, shape, arrival)


def _of_candidate(sampling: SamplingParams, candidate: int) -> SamplingParams:
    """The parameters of one of several generations of a prompt: a seed of its own, the first one's as it was given."""
    if candidate == 0 or sampling.seed is None:
        return sampling
    digest = hashlib.blake2b(f"{sampling.seed}:{candidate}".encode(), digest_size=8).digest()
    return replace(sampling, seed=int.from_bytes(digest, "big") >> 1)


@contextmanager
def called(aliases: Mapping[str, str]) -> Iterator[None]:
    """Refusals raised in here speak of the engine's parameters by the names that the client uses for them."""
    try:
        yield
    except RequestError as error:
        alias = aliases.get(error.param)
        if alias is None:
            raise
        raise RequestError(re.sub(rf"\b{error.param}\b", alias, str(error)), alias) from None


async def checked(grammar: Grammar, field_name: str, tokenizer: Tokenizer) -> Grammar:
    """The grammar itself, once it is known that generations can follow it. Compiling it may take a while.

    Raises:
        RequestError: names `field_name` when it is wrong, or larger than is served.
    """
    try:
        await asyncio.to_thread(check_grammar, grammar, tokenizer)
    except ValueError as error:
        raise RequestError(f"{field_name}: {error}", field_name) from None
    return grammar


async def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token sequences that would write these words: at the beginning of a text, after a space, within a line."""
    if not words:
        return ()
    # Some kinds put a space before every text: what stands behind a line break is written without one.
    spellings = ["\n", *(text for word in words for text in (word, f" {word}", f"\n{word}"))]
    line, *encoded = await encode(tokenizer, spellings, add_special_tokens=False)
    bare = [tokens[len(line) :] if tokens[: len(line)] == line else tokens for tokens in encoded]
    return tuple(dict.fromkeys(tuple(tokens) for tokens in bare if tokens))


async def encode(tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
    """Token ids of each text, without holding up the event loop where they are long together."""
    if sum(map(len, texts)) < _LONG_TEXT:
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]
    return await asyncio.to_thread(tokenizer.encode_unlocked, texts, add_special_tokens=add_special_tokens)


def room_after(model: ServedModel, prompt_tokens: int) -> int:
    """Tokens that may follow a prompt; 0 or less where it fills the model's length, which the check then refuses."""
    return model.engine.info.max_model_length - prompt_tokens

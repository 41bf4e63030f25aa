"""State shared by the endpoints, and the path from a validated body to a `RequestHandler`."""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import SamplingParams
from fastgen.server.http.api_error import APIError
from fastgen.server.http.request_context import current
from fastgen.server.serving.held_memory import HeldMemory, held_bytes
from fastgen.server.serving.lifecycle import Lifecycle
from fastgen.server.serving.metrics import Metrics
from fastgen.server.serving.queue_limit import admit
from fastgen.server.serving.request_handler import RequestHandler
from fastgen.server.serving.served_model import ServedModel
from fastgen.server.serving.served_task import TaskName
from fastgen.settings import ServerConfig
from fastgen.text.rendered_request import RenderedRequest

# Each generation takes a queue place and has its own output.
_MAX_GENERATIONS = 1024
# Bytes; responses with more take long to write.
_LARGE_HOLDINGS = 1 << 20


@dataclass(frozen=True, slots=True)
class Service:
    """State shared by the endpoints.

    Attributes:
        names: model names that requests may use; metrics carry the first one.
        settings: the server's settings.
        memory: bounds the memory that open requests hold.
        created: start time in Unix seconds, reported for the model.
    """

    names: tuple[str, ...]
    lifecycle: Lifecycle
    metrics: Metrics
    settings: ServerConfig
    memory: HeldMemory
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

    def model_for(self, *tasks: TaskName) -> ServedModel:
        """Return the served model if it does one of these tasks.

        Raises:
            APIError: 503 if it cannot serve a request now, 404 if the server does something else.
        """
        model = self.lifecycle.model()
        if model.task.name not in tasks:
            raise APIError(
                404,
                f"this server {model.task.description}; for this route, start one with "
                f"{' or '.join(f'--task {task}' for task in tasks)}",
                code="wrong_task",
            )
        return model

    def check_chat_template(self, source: str | None) -> None:
        """Reject a request's own chat template unless the server allows it.

        Raises:
            RequestError: names the flag.
        """
        if source is not None and not self.settings.trust_request_chat_template:
            raise RequestError(
                "chat_template: this server uses the model's; leave it out, or start the server with "
                "--trust-request-chat-template",
                "chat_template",
            )

    def check_large_body(self, body: bytes | bytearray) -> None:
        """Reject a large body with too many tokens or prompts before it is parsed.

        The commas and brackets of `prompt`, `tokens` and `input` are counted.

        Raises:
            RequestError: names the field and the limit.
            APIError: 503 if no model serves requests now.
        """
        try:
            found = msgspec.json.decode(body, type=_LargeBody)
        except (msgspec.DecodeError, RecursionError):
            return  # parsing the body tells what is wrong
        model = self.lifecycle.model()
        limit = model.engine.info.max_model_length
        for param in ("prompt", "tokens", "input"):
            value = bytes(getattr(found, param))
            num_lists = value.count(b"[") - 1 if _LISTS.match(value) else 1
            if num_lists > 1:
                self._check_num_generations(model, num_lists, 1, param)
            elif not _TOKEN_IDS.match(value):
                continue
            num_tokens, most = value.count(b",") + 1, num_lists * limit
            if num_tokens > most and found.truncate_prompt_tokens is None:
                raise RequestError(f"{param}: {num_tokens} tokens; the model takes at most {most}; send fewer", param)

    def reserve(self, model: ServedModel, num_prompts: int, num_candidates: int) -> list[str]:
        """Take queue places for all generations of an HTTP request, before any other work is done for it.

        Return the ids of their engine requests.

        Raises:
            RequestError: if a request may not have that many generations; names the limit.
            APIError: 429 if the queue is full.
        """
        self._check_num_generations(model, num_prompts, num_candidates)
        # Clients may choose the id they see, so it need not be unique.
        unique = uuid.uuid4().hex
        ids = [f"{unique}-{prompt}-{candidate}" for prompt in range(num_prompts) for candidate in range(num_candidates)]
        try:
            admit(model.engine.in_flight, ids, self.settings.max_queued_requests)
        except APIError:
            self.metrics.rejected(len(ids))
            raise
        return ids

    def _check_num_generations(
        self, model: ServedModel, num_prompts: int, num_candidates: int, prompts_param: str = "prompt"
    ) -> None:
        places = model.engine.info.max_sequences + self.settings.max_queued_requests
        limit = min(_MAX_GENERATIONS, places)
        if num_prompts * num_candidates > limit:
            why = (
                ""
                if limit == _MAX_GENERATIONS
                else f", the sum of --max-sequences and --max-queued-requests ({places})"
            )
            param = prompts_param if num_prompts > 1 else "n"
            raise RequestError(
                f"{param}: {num_prompts * num_candidates} generations, {num_candidates} per prompt; one request may "
                f"have at most {limit}{why}, so send several requests",
                param,
            )

    def handler(
        self, id_prefix: str, model: ServedModel, ids: Sequence[str], rendered: RenderedRequest
    ) -> RequestHandler:
        """Return the handler of an HTTP request.

        Args:
            id_prefix: start of the response id; the id of the HTTP request follows.
            model: the model to use.
            ids: of its engine requests, see `reserve`.
            rendered: what to generate; each of its requests is copied for every candidate.

        Raises:
            RequestError: if the model cannot serve one of them, or they may hold too much memory.
            APIError: 503 if all requests together would hold too much.
        """
        for request in rendered.requests:
            request.check(model.engine.info.max_model_length, model.engine.info.vocabulary_size)
        self._hold(held_bytes(rendered.requests, rendered.num_candidates))
        places, context = iter(ids), current()
        # Digests have one length, so no salt of a client equals the salt of another key.
        tenant = context.key_digest or "" if self.settings.cache_isolation == "key" else ""
        candidates = [
            replace(
                request,
                id=next(places),
                sampling=_for_candidate(request.sampling, candidate),
                cache_salt=tenant + request.cache_salt,
            )
            for request in rendered.requests
            for candidate in range(rendered.num_candidates)
        ]
        assert next(places, None) is None, "a place in the queue is not used"
        self.metrics.admitted([len(request.prompt_token_ids) for request in candidates])
        return RequestHandler(f"{id_prefix}-{context.id}", model, self.metrics, rendered, candidates, context.arrival)

    def _hold(self, num_bytes: int) -> None:
        """Count the memory that the current request holds until it ends. If it is much, later work runs in a thread."""
        self.memory.take(num_bytes)
        context = current()
        context.on_end.callback(self.memory.release, num_bytes)
        context.is_large = context.is_large or num_bytes > _LARGE_HOLDINGS


class _LargeBody(msgspec.Struct):
    """The fields of a large body that are checked before the rest of it is parsed."""

    prompt: msgspec.Raw = msgspec.Raw(b"")
    tokens: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")
    truncate_prompt_tokens: Any = None


# Beginnings of a list of lists, and of a list of token ids, by itself or as the first of a list of lists.
_LISTS = re.compile(rb"\s*\[\s*\[")
_TOKEN_IDS = re.compile(rb"\s*\[\s*(\[\s*)?-?\d")


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

"""What the endpoints share: from a client's prompt to an exchange with the engine."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastgen.core.request import Request, SamplingParams
from fastgen.server.admission import Admission
from fastgen.server.context import current
from fastgen.server.errors import APIError
from fastgen.server.exchange import Exchange
from fastgen.server.lifecycle import Lifecycle, ServedModel
from fastgen.server.metrics import Metrics
from fastgen.text.tokenizer import Tokenizer

# Encoding a text of this many characters takes about as long as a thread hop is worth; longer ones leave the loop.
_LONG_TEXT = 4096


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

    def open_exchange(
        self, kind: str, model: ServedModel, prompts: Sequence[tuple[list[int], SamplingParams]], stop: Sequence[str]
    ) -> Exchange:
        """An exchange for these prompts; `kind` begins its id.

        Raises:
            RequestError: when the model cannot serve one of them.
            APIError: 429 when the queue is full.
        """
        arrival = time.monotonic()
        request_id = f"{kind}-{uuid.uuid4().hex}"
        info = model.engine.info
        requests = [
            Request(id=f"{request_id}-{index}", prompt_token_ids=token_ids, sampling=sampling)
            for index, (token_ids, sampling) in enumerate(prompts)
        ]
        for request in requests:
            request.check(info.max_model_length, info.vocabulary_size)
        self.admission.admit(model.engine.in_flight, [request.id for request in requests])
        return Exchange(request_id, model, self.metrics, requests, stop, arrival)


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of `text`, without holding up the event loop for a long one."""
    if len(text) < _LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


def room_after(model: ServedModel, prompt_tokens: int) -> int:
    """Tokens that may follow a prompt; 0 or less where it fills the model's length, which the check then refuses."""
    return model.engine.info.max_model_length - prompt_tokens

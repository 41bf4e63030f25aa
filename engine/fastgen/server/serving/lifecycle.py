"""Where the server is in its life: loading, serving, draining, or left without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastgen.engine.client import EngineClient
from fastgen.server.http.errors import APIError
from fastgen.server.serving.prompt_length import LongestText
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tools.format import ToolFormat

_LOADING_RETRY_SECONDS = 2
# Another replica may take the request at once.
_DRAINING_RETRY_SECONDS = 1


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What requests are served with, once it is loaded."""

    engine: EngineClient
    tokenizer: Tokenizer
    longest_text: LongestText
    tool_format: ToolFormat


class Lifecycle:
    """Decides whether requests are taken, and knows how many are under way."""

    def __init__(self) -> None:
        self._stage = "starting"
        self._fraction = 0.0
        self._model: ServedModel | None = None
        self._draining = False
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def note_loading(self, stage: str, fraction: float) -> None:
        """Tells how far the start is: a stage and the share of it that is done, 0 to 1."""
        self._stage, self._fraction = stage, fraction

    def begin_serving(self, model: ServedModel) -> None:
        """From now on requests are taken."""
        self._model = model

    def begin_draining(self) -> None:
        """From now on no new requests are taken; those under way go on."""
        self._draining = True

    def why_not_healthy(self) -> str | None:
        """What is wrong with the process and its engine; None while they are alive, loading included."""
        if self._model is not None and not self._model.engine.alive:
            return f"the engine is dead: {self._model.engine.end}"
        return None

    def why_not_ready(self) -> str | None:
        """Why requests would be refused now; None if they would be taken."""
        refusal = self._refusal()
        return None if refusal is None else refusal.message

    def model(self) -> ServedModel:
        """What to serve with.

        Raises:
            APIError: 503 when no requests are taken.
        """
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        assert self._model is not None
        return self._model

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request as under way."""
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    @property
    def num_open(self) -> int:
        """Requests under way."""
        return self._num_open

    async def wait_idle(self) -> None:
        """Returns when no request is under way."""
        await self._idle.wait()

    def _refusal(self) -> APIError | None:
        if self._draining:
            return APIError(503, "draining", code="draining", retry_after=_DRAINING_RETRY_SECONDS)
        if self._model is None:
            message = f"{self._stage} {self._fraction:.0%}".replace("%", " %")
            return APIError(503, message, code="loading", retry_after=_LOADING_RETRY_SECONDS)
        dead = self.why_not_healthy()
        return None if dead is None else APIError(503, dead, code="engine_dead")

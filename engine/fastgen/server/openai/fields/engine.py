"""Fields of every request that the engine serves, and how they become the engine's request."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from fastgen.core.request import Pooling, Request, RequestError, SamplingParams
from fastgen.server.openai.fields.types import Integer, Number, String, TruncationLimit, TruncationSide


class EngineFields(BaseModel):
    """Fields that generations and poolings share."""

    model: String | None = None
    truncate_prompt_tokens: TruncationLimit | None = None
    truncation_side: TruncationSide = None
    priority: Integer | None = Field(None, description="lower is served first")
    timeout: Number | None = Field(None, description="seconds until the request ends, finished or not")
    cache_salt: Annotated[String, Field(max_length=256)] | None = None

    def check(self) -> None:
        """Raise RequestError if fields contradict each other."""
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise RequestError("truncation_side: requires truncate_prompt_tokens; leave it out", "truncation_side")

    def engine_request(self, token_ids: list[int], sampling: SamplingParams, pooling: Pooling | None = None) -> Request:
        """Return the engine's request for one prompt, without an id.

        Raises:
            RequestError: if a value is out of range.
        """
        return Request(
            id="",
            prompt_token_ids=token_ids,
            sampling=sampling,
            priority=self.priority or 0,
            deadline_seconds=self.timeout,
            cache_salt=self.cache_salt or "",
            pooling=pooling,
        )

"""Fields of all request bodies that lead to engine requests, and the conversion to engine requests."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field

from fastgen.core.request import Pooling, Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.server.openai.fields.types import Integer, Number, String, TruncationLimit, TruncationSide, field_error
from fastgen.server.openai.fields.unsupported import ignored, refused


class BaseRequest(BaseModel):
    """Fields that generation and pooling requests share. Unknown fields are ignored."""

    default_truncation_side: ClassVar[Literal["left", "right"]] = "left"

    model: String | None = None
    truncate_prompt_tokens: TruncationLimit | None = None
    truncation_side: TruncationSide = None
    priority: Integer | None = Field(None, description="lower is served first")
    timeout: Number | None = Field(None, description="seconds until the request ends, finished or not")
    cache_salt: Annotated[String, Field(max_length=256)] | None = None
    user: Any = ignored("it names the end user for abuse reports")
    receipt: Any = refused("only /v1/completions, /v1/chat/completions and /v1/responses return receipts", False)

    def check(self) -> None:
        """Raise RequestError if fields contradict each other."""
        if self.truncation_side is not None and self.truncate_prompt_tokens is None:
            raise field_error("truncation_side", "requires truncate_prompt_tokens; leave it out")

    def truncated(self, token_ids: list[int], longest: int, num_ending: int = 0) -> list[int]:
        """Return the part of a prompt that `truncate_prompt_tokens` keeps.

        Args:
            token_ids: the prompt.
            longest: the number of tokens that -1 stands for.
            num_ending: number of tokens at the end, after the text, that truncation on the right keeps.
        """
        limit = self.truncate_prompt_tokens
        if limit is None:
            return token_ids
        limit = longest if limit < 0 else limit
        if len(token_ids) <= limit:
            return token_ids
        if (self.truncation_side or self.default_truncation_side) == "left":
            return token_ids[len(token_ids) - limit :]
        return token_ids[: max(0, limit - num_ending)] + token_ids[len(token_ids) - num_ending :]

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

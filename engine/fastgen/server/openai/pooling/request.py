"""Fields, engine requests and usage of /v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import msgspec
from pydantic import Field

from fastgen.core.request import Pooling, Request
from fastgen.core.sampling_params import SamplingParams
from fastgen.server.openai.base_request import BaseRequest
from fastgen.server.openai.fields.types import TruncationLimit, TruncationSide
from fastgen.server.serving.encoding import encode
from fastgen.server.serving.served_model import ServedModel
from fastgen.text.request_output import Usage

NO_SAMPLING = SamplingParams(temperature=0, max_tokens=1)


class PoolingRequest(BaseRequest):
    """Fields of requests without generated text."""

    default_truncation_side: ClassVar[Literal["left", "right"]] = "right"

    truncate_prompt_tokens: TruncationLimit | None = Field(None, description="-1 truncates to the model's length")
    truncation_side: TruncationSide = Field(None, description="`right`, the default here, keeps the start")

    async def embedding_requests(
        self, texts: Sequence[str | list[int]], model: ServedModel, param: str, *, add_special_tokens: bool = True
    ) -> list[Request]:
        """Return the engine's requests, without request ids, that embed texts or lists of token ids.

        Raises:
            RequestError: if a text of field `param` is too long, or a value out of range.
        """
        strings = [text for text in texts if isinstance(text, str)]
        for text in strings:
            model.prompt_size_limit.check(text, param)
        encoded = iter(await encode(model.tokenizer, strings, add_special_tokens=add_special_tokens))
        pooling, longest, num_ending = Pooling(method=model.task.pooling.method), model.engine.info.max_model_length, 0
        if add_special_tokens and strings:  # 1 if the tokenizer adds an end token
            added = model.tokenizer.encode("", add_special_tokens=True)
            num_ending = int(bool(added) and added[-1] != model.tokenizer.bos_token_id)
        tokens = [next(encoded) if isinstance(text, str) else text for text in texts]
        return [self.engine_request(self.truncated(ids, longest, num_ending), NO_SAMPLING, pooling) for ids in tokens]


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Token counts of a request without generated text."""

    prompt_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> EmbeddingUsage:
        """Return `usage` in OpenAI's format."""
        return cls(usage.prompt_tokens, usage.prompt_tokens)

"""Fields that /v1/embeddings, /v1/score and /v1/rerank share.

The module also turns their texts into engine requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ConfigDict, Field

from fastgen.core.request import Pooling, Request, SamplingParams
from fastgen.server.openai.fields.engine import EngineFields
from fastgen.server.openai.fields.types import TruncationLimit, TruncationSide
from fastgen.server.openai.fields.unsupported import ignored, refused
from fastgen.server.serving.encoding import encode
from fastgen.server.serving.lifecycle import ServedModel
from fastgen.text.tokenizer import Tokenizer

_NO_SAMPLING = SamplingParams(temperature=0, max_tokens=1)


class PoolingRequest(EngineFields):
    """Fields of vLLM's and others' that all requests without generated text share."""

    model_config = ConfigDict(extra="ignore")

    truncate_prompt_tokens: TruncationLimit | None = Field(None, description="-1 keeps what the model takes")
    truncation_side: TruncationSide = Field(None, description="`right`, the default here, keeps the start")
    user: Any = ignored("it names the end user, for abuse reports")
    request_id: Any = ignored("the header X-Request-Id names the request")
    mm_processor_kwargs: Any = refused("only text models are served", {})

    def truncated(self, token_ids: list[int], longest: int, num_ending: int) -> list[int]:
        """Return the part of a text that `truncate_prompt_tokens` keeps.

        That is its start, or its end if the client says so.

        Args:
            token_ids: the text.
            longest: most tokens that the model takes.
            num_ending: the last so many tokens are not part of the text, and kept.
        """
        limit = self.truncate_prompt_tokens
        if limit is None:
            return token_ids
        limit = longest if limit < 0 else limit
        if len(token_ids) <= limit:
            return token_ids
        if self.truncation_side == "left":
            return token_ids[len(token_ids) - limit :]
        return token_ids[: max(0, limit - num_ending)] + token_ids[len(token_ids) - num_ending :]

    def pooling_request(self, token_ids: list[int], pooling: Pooling) -> Request:
        """Return the engine's request for one text, without an id.

        Raises:
            RequestError: if a value is out of range.
        """
        return self.engine_request(token_ids, _NO_SAMPLING, pooling)

    async def embedding_requests(
        self, texts: Sequence[str | list[int]], model: ServedModel, param: str, *, add_special_tokens: bool = True
    ) -> list[Request]:
        """Return the engine's requests for the vectors of texts, or of token ids, without ids.

        Raises:
            RequestError: if a text is too long, or a value out of range; `param` names the texts.
        """
        strings = [text for text in texts if isinstance(text, str)]
        for text in strings:
            model.prompt_size_limit.check(text, param)
        encoded = iter(await encode(model.tokenizer, strings, add_special_tokens=add_special_tokens))
        pooling, longest = Pooling(method=model.task.pooling.method), model.engine.info.max_model_length
        num_ending = num_end_tokens(model.tokenizer) if add_special_tokens and strings else 0
        tokens = [next(encoded) if isinstance(text, str) else text for text in texts]
        return [self.pooling_request(self.truncated(ids, longest, num_ending), pooling) for ids in tokens]


def num_end_tokens(tokenizer: Tokenizer) -> int:
    """Return how many tokens the tokenizer adds after a text: 0 or 1."""
    added = tokenizer.encode("", add_special_tokens=True)
    return int(bool(added) and added[-1] != tokenizer.bos_token_id)

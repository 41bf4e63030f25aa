"""What the server does with its model: generate, embed or score."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from fastgen.model.pooling import Method, PoolingConfig, pooling_config
from fastgen.model.source import ModelSource
from fastgen.settings import ConfigError
from fastgen.text.reranker import ANSWERS
from fastgen.text.tokenizer import Tokenizer

TaskName = Literal["generate", "embed", "score"]

_DOES = {"generate": "generates text", "embed": "embeds texts", "score": "scores pairs of texts"}


@dataclass(frozen=True, slots=True)
class ServedTask:
    """What the server does with its model.

    Attributes:
        name: as in `--task`.
        pooling: how vectors are made, for "embed".
        answers: the tokens of a reranker's answers, no and yes, for "score".
    """

    name: TaskName = "generate"
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    answers: tuple[int, ...] = ()

    @property
    def description(self) -> str:
        """What the server does, for messages."""
        return _DOES[self.name]

    @classmethod
    def of(cls, source: ModelSource, task: str, pooling: str) -> ServedTask:
        """Return the task for the settings and the model's files, without `answers`.

        Raises:
            ConfigError: if the model cannot do the task, `pooling` is set for another task than "embed", or a file that
                names the pooling is damaged or not supported.
        """
        name = cast(Any, _named(source) if task == "auto" else task)
        if name != "generate" and source.native is None:
            raise ConfigError(f"--task {name}: models that transformers' code runs only generate; remove --task")
        if name != "embed" and source.native is not None and not source.native.has_head:
            raise ConfigError(f"--task {name}: the model has no output head, only hidden states; use --task embed")
        if pooling != "auto" and name != "embed":
            raise ConfigError(f"--pooling {pooling}: this server {_DOES[name]}; set --task embed, or remove --pooling")
        if name != "embed":
            return cls(name)
        if pooling == "auto":
            return cls(name, pooling_config(source) or PoolingConfig())
        return cls(name, PoolingConfig(cast(Method, pooling)))

    def with_answers(self, tokenizer: Tokenizer) -> ServedTask:
        """Return the task with the tokens of its answers, if it scores.

        Raises:
            ConfigError: if an answer is not a single token of the vocabulary.
        """
        if self.name != "score":
            return self
        found = map(tokenizer.backend.token_to_id, ANSWERS)
        tokens = tuple(token for token in found if token is not None)
        if len(tokens) < len(ANSWERS):
            raise ConfigError(
                f"--task score: the vocabulary lacks {' or '.join(map(repr, ANSWERS))}, the answers of a reranker; "
                "use --task embed to score by similarity"
            )
        return replace(self, answers=tokens)


def _named(source: ModelSource) -> TaskName:
    """Return the task that the model's files imply."""
    has_head = source.native is None or source.native.has_head
    return "generate" if has_head and (source.native is None or pooling_config(source) is None) else "embed"

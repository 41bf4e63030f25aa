"""`fastgen.pipeline`: a model in this process, called with prompts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fastgen.llm.llm import LLM
from fastgen.mii.arguments import GenerateArguments, Response, as_list, check_model_arguments


def pipeline(model: str | os.PathLike[str], **settings: Any) -> Pipeline:
    """Load a model into this process.

    Args:
        model: a GGUF file, a Hugging Face directory, or a hub name such as org/name@revision.
        settings: engine settings, named as in `fastgen.settings.EngineConfig`, and other arguments of `fastgen.LLM`.

    Raises:
        ConfigError: the model or a setting is not supported.
    """
    check_model_arguments(settings)
    return Pipeline(LLM(model, **settings))


class Pipeline:
    """A model that is called with prompts. Not thread-safe."""

    def __init__(self, llm: LLM) -> None:
        self._llm: LLM | None = llm

    def __call__(self, prompts: str | Sequence[str], **arguments: Any) -> list[Response]:
        """Generate for all prompts as a batch; `arguments` are those of `GenerateArguments`.

        Raises:
            RequestError: an argument is invalid, or the model cannot serve one of the prompts; then none of them runs.
            RuntimeError: the pipeline is destroyed.
        """
        if self._llm is None:
            raise RuntimeError("this pipeline is destroyed: create a new one with fastgen.pipeline")
        asked = GenerateArguments.of(arguments)
        texts = as_list(prompts)
        tokens = [self._llm.tokenizer.encode(text, add_special_tokens=True) for text in texts]
        done = self._llm.generate(tokens, [asked.sampling(len(prompt)) for prompt in tokens], stop=asked.stop)
        return [
            asked.response(
                text,
                completion.text,
                completion.usage.prompt_tokens,
                completion.usage.completion_tokens,
                str(completion.finish_reason),
            )
            for text, completion in zip(texts, done, strict=True)
        ]

    def destroy(self) -> None:
        """Free the memory of weights and KV cache. The pipeline can no longer be called."""
        self._llm = None

"""The engine in the caller's own process: `LLM`."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fastgen.config import ENGINE_SETTINGS, EngineConfig, parsed_settings
from fastgen.core.request import Request, RequestError, SamplingParams
from fastgen.engine.build import build_engine
from fastgen.llm.outputs import Completion, Generation, Usage
from fastgen.model.source import ModelSource
from fastgen.terminal import progress_bar
from fastgen.text.chat import ChatTemplateError
from fastgen.text.output import OutputText, TextDelta, TextRules
from fastgen.text.tokenizer import Tokenizer

__all__ = ["LLM", "Completion", "Usage"]

Prompt = str | list[int]
Message = Mapping[str, Any]


_Piece = tuple[Generation, TextDelta]


class LLM:
    """A model, loaded into this process. For one thread; streams may be open at once and then share their passes.

    Args:
        model: a GGUF file or a Hugging Face directory.
        on_loading: called with a stage and the share of it that is done, 0 to 1, while the model loads.
            Where not given, a bar shows it on a terminal.
        settings: the engine's settings by the names of `fastgen.config.EngineConfig`; sizes may be texts like "2GiB".

    Attributes:
        config: the settings, with a number for a token budget of `auto`.
        tokenizer: the model's.
        engine: for those who drive requests themselves.
        max_model_length: the longest prompt plus generation.

    Raises:
        ConfigError: when the model or the settings cannot be served.
    """

    def __init__(self, model: str, *, on_loading: Callable[[str, float], None] | None = None, **settings: Any) -> None:
        config = EngineConfig(model=str(model), **parsed_settings(settings, ENGINE_SETTINGS))
        started = time.monotonic()
        source = ModelSource.open(config.model)
        self.tokenizer = tokenizer = Tokenizer.load(source.tokenizer)
        with progress_bar() if on_loading is None else nullcontext(on_loading) as progress:
            loaded = build_engine(source, config, lambda: tokenizer, progress, started=started)
        self.engine, self.config, self._runner = loaded.engine, loaded.config, loaded.runner
        self.max_model_length = loaded.info.max_model_length
        self._ids = itertools.count()
        self._under_way: dict[str, Generation] = {}
        self._pieces: list[_Piece] = []

    def wait_for_prefault(self) -> None:
        """Wait until the background prefault of cache memory is done. Measurements are disturbed by it."""
        self._runner.wait_for_prefault()

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: Sequence[str] = (),
        n: int = 1,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Continues prompts, all at once.

        Args:
            prompts: texts or lists of token ids.
            sampling: for all prompts, or one for each.
            stop: texts that end a generation; they are not part of it.
            n: completions of each prompt. With a seed, each after the first takes the next number as its own.
            progress: show a bar on standard error; where not given, for several prompts on a terminal.

        Returns:
            In the prompts' order, the n completions of a prompt one after another.

        Raises:
            RequestError: when the model cannot serve one of them; none is then run.
        """
        if n < 1:
            raise RequestError(f"n is {n}: it must be at least 1", "n")
        batch: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        each = _for_each(sampling, len(batch))
        generations = [
            self._prepare(prompt, _numbered(params, index), stop)
            for prompt, params in zip(batch, each, strict=True)
            for index in range(n)
        ]
        shows = progress if progress is not None else len(generations) > 1 and sys.stderr.isatty()
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not shows, transient=True) as bar:
            task = bar.add_task("generating", total=len(generations))
            for _, delta in self._run(generations):
                if delta.finish_reason is not None:
                    bar.advance(task)
        return [generation.completion() for generation in generations]

    def chat(
        self, messages: Sequence[Message], sampling: SamplingParams | None = None, *, stop: Sequence[str] = ()
    ) -> Completion:
        """Answers a conversation, of messages with `role` and `content`, by the model's own chat template.

        Without `sampling`, the answer may take the rest of the model's length.

        Raises:
            RequestError: when the model has no template, or its template refuses the messages.
        """
        prompt = self.chat_prompt(messages)
        room = max(1, self.max_model_length - len(prompt))
        return self.generate([prompt], sampling or SamplingParams(max_tokens=room), stop=stop)[0]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, stop: Sequence[str] = ()
    ) -> Iterator[TextDelta]:
        """The continuation of one prompt, piece by piece; closing the iterator ends the generation.

        Raises:
            RequestError: when the model cannot serve it.
        """
        for _, delta in self._run([self._prepare(prompt, sampling or SamplingParams(), stop)]):
            yield delta

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids that a conversation becomes.

        Raises:
            RequestError: when the model has no template, or its template refuses the messages.
        """
        template = self.tokenizer.chat_template
        if template is None:
            raise RequestError("this model has no chat template: use generate", "messages")
        try:
            text = template.render(messages)
        except ChatTemplateError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", "messages") from error
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _prepare(self, prompt: Prompt, sampling: SamplingParams, stop: Sequence[str]) -> Generation:
        tokens = self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
        request = Request(id=str(next(self._ids)), prompt_token_ids=tokens, sampling=sampling)
        return Generation(
            request, OutputText(self.tokenizer, TextRules(stop=tuple(stop), min_tokens=sampling.min_tokens))
        )

    def _run(self, generations: Sequence[Generation]) -> Iterator[tuple[Generation, TextDelta]]:
        """Steps the engine until all of these have ended; what is unfinished when it is closed is cancelled."""
        mine: set[str] = set()
        try:
            for generation in generations:
                self.engine.add(generation.request)
                self._under_way[generation.request.id] = generation
                mine.add(generation.request.id)
            while mine:
                pieces = self._take(mine)
                if not pieces:
                    self._step()
                for generation, delta in pieces:
                    if delta.finish_reason is not None:
                        mine.discard(generation.request.id)
                    yield generation, delta
        finally:
            for request_id in mine:
                self._under_way.pop(request_id, None)
                self.engine.cancel(request_id)
            self._take(mine)

    def _take(self, mine: set[str]) -> list[_Piece]:
        """The pieces that have come for these requests; those of others stay, for whoever iterates over them."""
        taken = [piece for piece in self._pieces if piece[0].request.id in mine]
        self._pieces = [piece for piece in self._pieces if piece[0].request.id not in mine]
        return taken

    def _step(self) -> None:
        """One pass for everything under way: iterators that are open at once share their passes."""
        for got in self.engine.step().outputs:
            generation = self._under_way[got.request_id]
            delta = generation.take(got)
            if delta.finish_reason is not None:
                del self._under_way[got.request_id]
                self.engine.cancel(got.request_id)  # a stop string: the engine does not know yet
            self._pieces.append((generation, delta))


def _for_each(sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * count
    if len(sampling) != count:
        raise RequestError(f"sampling has {len(sampling)} entries for {count} prompts: give one for each", "sampling")
    return list(sampling)


def _numbered(sampling: SamplingParams, index: int) -> SamplingParams:
    return sampling if sampling.seed is None or not index else replace(sampling, seed=sampling.seed + index)

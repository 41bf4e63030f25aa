"""The engine in the caller's own process: `LLM`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress

from fastgen.calibration import prepare
from fastgen.config import KNOBS, ConfigError, EngineConfig, parse_size
from fastgen.core.request import FinishReason, Request, RequestError, SamplingParams
from fastgen.core.step_model import StepModel
from fastgen.engine import Engine
from fastgen.model.loader import load_runner
from fastgen.model.source import ModelSource
from fastgen.text.chat import ChatTemplateError
from fastgen.text.output import OutputText, TextDelta
from fastgen.text.tokenizer import Tokenizer

Prompt = str | list[int]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What the model made of one prompt.

    Attributes:
        text: the generation as text, without stop strings and special tokens.
        token_ids: the generated tokens, the one that ended the generation included.
        finish_reason: why it ended.
        prompt_token_ids: the prompt as the model saw it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_token_ids: tuple[int, ...]

    @property
    def usage(self) -> Usage:
        """Tokens read and written."""
        return Usage(len(self.prompt_token_ids), len(self.token_ids))


class _Generation:
    """One prompt under way."""

    def __init__(self, request: Request, output: OutputText) -> None:
        self.request = request
        self.output = output
        self.pieces: list[str] = []
        self.token_ids: list[int] = []

    def completion(self) -> Completion:
        reason = self.output.finish_reason
        assert reason is not None, "the generation has not ended"
        # A stop string may have ended the text before the last tokens that the engine gave.
        tokens = self.token_ids[: self.output.num_tokens]
        return Completion("".join(self.pieces), tuple(tokens), reason, tuple(self.request.prompt_token_ids))


_Piece = tuple[_Generation, TextDelta]


class LLM:
    """A model, loaded into this process. For one thread; streams may be open at once and then share their passes.

    Args:
        model: a GGUF file or a Hugging Face directory.
        on_loading: called with a stage and the share of it that is done, 0 to 1, while the model loads.
        knobs: the engine's settings by the names of `fastgen.config.EngineConfig`; sizes may be texts like "2GiB".

    Raises:
        ConfigError: when the model or the settings cannot be served.
    """

    def __init__(self, model: str, *, on_loading: Callable[[str, float], None] | None = None, **knobs: Any) -> None:
        config = EngineConfig(model=str(model), **_parsed(knobs))
        source = ModelSource.open(config.model)
        self.tokenizer = Tokenizer.load(source.tokenizer)
        progress = on_loading or (lambda _stage, _fraction: None)
        runner = load_runner(source, config, progress)
        self.config, measured = prepare(runner, config, progress)
        self._engine = Engine(runner, self.config, step_model=StepModel.of(measured))
        self.max_model_length = runner.max_model_length
        self._ids = itertools.count()
        self._under_way: dict[str, _Generation] = {}
        self._pieces: list[_Piece] = []

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[list[int]],
        sampling: SamplingParams | None = None,
        *,
        stop: Sequence[str] = (),
        progress: bool | None = None,
    ) -> list[Completion]:
        """Continues prompts, all at once; the results are in the prompts' order.

        `progress` shows a bar on standard error; where not given, for several prompts on a terminal.

        Raises:
            RequestError: when the model cannot serve one of them; none is then run.
        """
        batch: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        generations = [self._prepare(prompt, sampling or SamplingParams(), stop) for prompt in batch]
        shows = progress if progress is not None else len(batch) > 1 and sys.stderr.isatty()
        with Progress(console=Console(stderr=True), disable=not shows, transient=True) as bar:
            task = bar.add_task("generating", total=len(batch))
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

    def _prepare(self, prompt: Prompt, sampling: SamplingParams, stop: Sequence[str]) -> _Generation:
        tokens = self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
        request = Request(id=str(next(self._ids)), prompt_token_ids=tokens, sampling=sampling)
        return _Generation(request, OutputText(self.tokenizer, stop))

    def _run(self, generations: Sequence[_Generation]) -> Iterator[tuple[_Generation, TextDelta]]:
        """Steps the engine until all of these have ended; what is unfinished when it is closed is cancelled."""
        mine: set[str] = set()
        try:
            for generation in generations:
                self._engine.add(generation.request)
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
                self._engine.cancel(request_id)
            self._take(mine)

    def _take(self, mine: set[str]) -> list[_Piece]:
        """The pieces that have come for these requests; those of others stay, for whoever iterates over them."""
        taken = [piece for piece in self._pieces if piece[0].request.id in mine]
        self._pieces = [piece for piece in self._pieces if piece[0].request.id not in mine]
        return taken

    def _step(self) -> None:
        """One pass for everything under way: iterators that are open at once share their passes."""
        for got in self._engine.step().outputs:
            generation = self._under_way[got.request_id]
            generation.token_ids += got.token_ids
            delta = generation.output.push(got.token_ids, got.finish_reason)
            generation.pieces.append(delta.text)
            if delta.finish_reason is not None:
                del self._under_way[got.request_id]
                self._engine.cancel(got.request_id)  # a stop string: the engine does not know yet
            self._pieces.append((generation, delta))


def _parsed(knobs: Mapping[str, Any]) -> dict[str, Any]:
    kinds = {knob.name: knob.kind for knob in KNOBS}
    for name in knobs:
        if name not in kinds:
            raise ConfigError(f"{name}: no such setting; there are {', '.join(kinds)}")
    return {
        name: parse_size(value) if kinds[name] == "bytes" and isinstance(value, str) else value
        for name, value in knobs.items()
    }

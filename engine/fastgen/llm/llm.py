"""The engine in the caller's own process: `LLM`."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fastgen.core.request import Request
from fastgen.core.request_error import RequestError
from fastgen.core.sampling_params import SamplingParams
from fastgen.engine.build import build_engine
from fastgen.model.generation_defaults import generation_defaults
from fastgen.model.source import ModelSource
from fastgen.setting_fields import plain
from fastgen.settings import ENGINE_SETTINGS, ConfigError, EngineConfig, parsed_settings
from fastgen.terminal import progress_bar
from fastgen.text.chat_template import ChatTemplateError
from fastgen.text.grammars.checker import GrammarChecker
from fastgen.text.message_form import Message
from fastgen.text.rendered_request import RenderedRequest
from fastgen.text.request_output import OutputDelta, RequestOutput
from fastgen.text.stop_strings import given_stop_strings
from fastgen.text.tokenizer import Tokenizer

Prompt = str | list[int]


class LLM:
    """A model loaded into this process.

    Not thread-safe. Several streams may be open at once; they share engine steps.

    Args:
        model: path of a GGUF file or a Hugging Face directory, a hub name such as org/name@revision, or a
            `ModelSource`.
        generation_config: source of `default_sampling`: `auto` are the model's files, most often its
            generation_config.json, `none` the defaults of `SamplingParams`.
        on_loading: called with a stage and its completed fraction, 0 to 1, while the model loads. The default is a
            progress bar on a terminal.
        settings: fields of `fastgen.settings.EngineConfig`; sizes may be strings such as "2GiB".

    Attributes:
        config: the settings. `config.budget` is a number, even if the setting is `auto`.
        tokenizer: the model's tokenizer.
        engine: the engine, for callers that drive requests themselves.
        info: the loaded model, its formats and its limits.
        default_sampling: the parameters of calls without any.
        max_model_length: maximum number of prompt plus generated tokens.

    Raises:
        ConfigError: if the model or the settings are not supported.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | ModelSource,
        *,
        generation_config: Literal["auto", "none"] = "auto",
        on_loading: Callable[[str, float], None] | None = None,
        **settings: Any,
    ) -> None:
        name = str(model.path if isinstance(model, ModelSource) else model)
        config = EngineConfig(model=name, **parsed_settings(settings, ENGINE_SETTINGS))
        source = model if isinstance(model, ModelSource) else ModelSource.open(config.model)
        if generation_config not in ("auto", "none"):
            raise ConfigError(f"generation_config is {generation_config!r}: it must be auto or none")
        defaults = generation_defaults(generation_config, source.tokenizer)
        if source.native is not None and not source.native.has_head:
            raise ConfigError(
                f"model {name}: it has no output head and cannot generate; use fastgen serve --task embed"
            )
        self.tokenizer = tokenizer = Tokenizer.load(source.tokenizer)
        with progress_bar() if on_loading is None else nullcontext(on_loading) as progress:
            loaded = build_engine(source, config, lambda: tokenizer, progress)
        self.engine, self.config, self._runner = loaded.engine, loaded.config, loaded.runner
        self.info = loaded.info
        self.max_model_length = loaded.info.max_model_length
        self.default_sampling = SamplingParams(**defaults)
        self._reply_tokens = int(defaults.get("max_tokens", self.max_model_length))
        self._grammar_checker = GrammarChecker(tokenizer)
        self._ids = itertools.count()
        self._running: dict[str, RequestOutput] = {}
        self._pending: list[tuple[RequestOutput, OutputDelta]] = []

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        stop: str | Sequence[str] = (),
        n: int = 1,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Generate completions for all prompts in one batch.

        Args:
            prompts: one string, or a sequence of strings and lists of token ids.
            sampling: parameters for all prompts, or one entry per prompt; by default `default_sampling`. Given
                parameters are not merged with it.
            stop: a stop string, or several; they are not part of the text.
            n: completions per prompt. With a seed, completion i uses seed + i.
            progress: show a progress bar on standard error. By default, shown on a terminal for several completions.

        Returns:
            n outputs per prompt, in the order of the prompts.

        Raises:
            RequestError: if an argument is invalid, or the model cannot serve one of the requests; then none is run.
            CheckerUnavailable: if a grammar cannot be checked, for example on a busy machine; then none is run.
        """
        given: object = n
        if not isinstance(given, Integral) or n < 1:
            raise RequestError(f"n is {given!r}: it must be an integer of at least 1", "n")
        batch: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        params = _per_prompt(self.default_sampling if sampling is None else sampling, len(batch))
        outputs = [
            self._prepare(prompt, _with_seed_offset(each, index), stop)
            for prompt, each in zip(batch, params, strict=True)
            for index in range(n)
        ]
        show = progress if progress is not None else len(outputs) > 1 and sys.stderr.isatty()
        columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), disable=not show, transient=True) as bar:
            task = bar.add_task("generating", total=len(outputs))
            for delta in self._run(outputs):
                if delta.finish_reason is not None:
                    bar.advance(task)
        return outputs

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RequestOutput:
        """Generate the next message of a conversation with the model's chat template.

        Reasoning is part of its text.

        Args:
            messages: mappings with `role` and `content`.
            sampling: by default `default_sampling`, with the rest of the model's length for the reply unless
                the model's files limit it.
            stop: a stop string, or several; they are not part of the text.
            chat_template_kwargs: variables of the chat template, such as `enable_thinking`.

        Raises:
            RequestError: if the model has no chat template, the template rejects the messages, an argument is invalid,
                or the model cannot serve the request.
            CheckerUnavailable: as `generate`.
        """
        prompt = self.chat_prompt(messages, chat_template_kwargs=chat_template_kwargs)
        max_tokens = max(1, min(self._reply_tokens, self.max_model_length - len(prompt)))
        return self.generate([prompt], sampling or replace(self.default_sampling, max_tokens=max_tokens), stop=stop)[0]

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, stop: str | Sequence[str] = ()
    ) -> Iterator[OutputDelta]:
        """Stream the completion of one prompt. Closing the iterator cancels the generation.

        Raises:
            RequestError: on the first iteration, if an argument is invalid or the model cannot serve the request.
            CheckerUnavailable: on the first iteration, as `generate`.
        """
        (chosen,) = _per_prompt(sampling or self.default_sampling, 1)
        yield from self._run([self._prepare(prompt, chosen, stop)])

    def chat_prompt(
        self, messages: Sequence[Message], *, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Render a conversation with the chat template and return its token ids.

        `chat_template_kwargs` are variables of the template, such as `enable_thinking`.

        Raises:
            RequestError: if the model has no chat template, or the template rejects the messages.
        """
        template = self.tokenizer.chat_template
        if template is None:
            raise RequestError("messages: this model has no chat template; use generate", "messages")
        try:
            text = template.render(messages, variables=chat_template_kwargs)
        except ChatTemplateError as error:
            raise RequestError(f"messages: the model's chat template rejects them: {error}", "messages") from error
        return self.tokenizer.encode(text, add_special_tokens=False)

    def _prepare(self, prompt: Prompt, sampling: SamplingParams, stop: str | Sequence[str]) -> RequestOutput:
        tokens = (
            self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else _token_ids(prompt)
        )
        if sampling.grammar is not None:
            self._grammar_checker.check(sampling.grammar)
        request = Request(id=str(next(self._ids)), prompt_token_ids=tokens, sampling=sampling)
        return RequestOutput(
            request, self.tokenizer, RenderedRequest(requests=[request], stop=given_stop_strings(stop))
        )

    def _run(self, outputs: Sequence[RequestOutput]) -> Iterator[OutputDelta]:
        """Step the engine until these requests finish; cancel unfinished ones when the iterator is closed."""
        unfinished: set[str] = set()
        try:
            for output in outputs:
                self.engine.add(output.request)
                self._running[output.request.id] = output
                unfinished.add(output.request.id)
            while unfinished:
                deltas = self._take_pending(unfinished)
                if not deltas:
                    self._step()
                for output, delta in deltas:
                    if delta.finish_reason is not None:
                        unfinished.discard(output.request.id)
                    yield delta
        finally:
            for request_id in unfinished:
                self._running.pop(request_id, None)
                self.engine.cancel(request_id)
            self._take_pending(unfinished)

    def _take_pending(self, request_ids: set[str]) -> list[tuple[RequestOutput, OutputDelta]]:
        """Remove and return the pending deltas of these requests; other iterators read the rest."""
        taken = [pair for pair in self._pending if pair[0].request.id in request_ids]
        self._pending = [pair for pair in self._pending if pair[0].request.id not in request_ids]
        return taken

    def _step(self) -> None:
        """Run one engine step for all open iterators."""
        for token_output in self.engine.step().outputs:
            output = self._running[token_output.request_id]
            output.push(token_output)
            delta = output.take()
            if delta.finish_reason is not None:
                del self._running[token_output.request_id]
                self.engine.cancel(token_output.request_id)  # the engine does not know about stop strings
            self._pending.append((output, delta))


def _token_ids(prompt: Any) -> list[int]:
    """Return a prompt of token ids, which may be an array of numpy or torch, as integers."""
    if not isinstance(prompt, bytes | Mapping) and isinstance(prompt, Iterable):
        tokens = [plain(token) for token in prompt]
        if all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            return tokens
    raise RequestError("prompts: each must be a text or a list of token ids", "prompts")


def _per_prompt(sampling: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    if not isinstance(sampling, Sequence) or not all(isinstance(each, SamplingParams) for each in sampling):
        raise RequestError("sampling: give SamplingParams, or a sequence with one for each prompt", "sampling")
    if len(sampling) != count:
        raise RequestError(f"sampling has {len(sampling)} entries for {count} prompts: give one for each", "sampling")
    return list(sampling)


def _with_seed_offset(sampling: SamplingParams, index: int) -> SamplingParams:
    return sampling if sampling.seed is None or not index else replace(sampling, seed=sampling.seed + index)

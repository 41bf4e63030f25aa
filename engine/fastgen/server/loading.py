"""Loads a model: the engine process reads the weights while this process reads the tokenizer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from fastgen import exit_codes
from fastgen.link.client import EngineClient, EngineStartError
from fastgen.model.file_digests import FilesAtStart
from fastgen.model.generation_defaults import GenerationDefaults, generation_defaults
from fastgen.model.hub import hub_repository
from fastgen.model.source import ModelSource
from fastgen.server.serving.encoding import PromptSizeLimit
from fastgen.server.serving.file_digests import FileDigests
from fastgen.server.serving.served_model import ServedModel
from fastgen.server.serving.served_task import ServedTask
from fastgen.settings import ConfigError, EngineConfig, ServerConfig, default_model_name
from fastgen.text import reranker
from fastgen.text.grammars.checker import GrammarChecker
from fastgen.text.guarded_encoding import GuardedEncoder
from fastgen.text.reasoning.format import ReasoningFormat
from fastgen.text.reasoning.harmony import HarmonyReasoning
from fastgen.text.reasoning.registry import reasoning_format
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tools.harmony import Harmony
from fastgen.text.tools.registry import choose_format


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a server reads from its model's files before it loads the model.

    Attributes:
        source: the files.
        names: model names that requests may use.
        defaults: sampling parameters of requests that do not set them.
        task: what the server does with the model.
        at_start: the state of the files before the model is loaded.
    """

    source: ModelSource
    names: tuple[str, ...]
    defaults: GenerationDefaults
    task: ServedTask
    at_start: FilesAtStart

    @classmethod
    def open(cls, engine: EngineConfig, server: ServerConfig) -> ModelFiles:
        """Find the files and read their configuration.

        Raises:
            ConfigError: if the model cannot be found or read, or it or a setting is not supported.
        """
        source = ModelSource.open(engine.model)
        at_start = FilesAtStart.of(source.path)
        default_name = hub_repository(engine.model) or default_model_name(engine.model)
        return cls(
            source,
            server.served_model_names or (default_name,),
            generation_defaults(server.generation_config, source.tokenizer),
            ServedTask.of(source, server.task, server.pooling),
            at_start,
        )

    def engine_config(self, config: EngineConfig) -> EngineConfig:
        """Return the settings with the local path: the download is complete, so the engine does not contact the hub."""
        return replace(config, model=str(self.source.path))


async def load_served_model(files: ModelFiles, config: ServerConfig, engine: asyncio.Task[EngineClient]) -> ServedModel:
    """Return the model once its engine is ready.

    Args:
        files: the model's files.
        config: the server's settings.
        engine: task that starts the engine. If the load fails or is cancelled, the engine is stopped.

    Raises:
        ConfigError: if a setting or the model is not supported, or its tokenizer is damaged.
        EngineStartError: if the engine fails to start for another reason.
    """
    try:
        tokenizer = await asyncio.to_thread(Tokenizer.load, files.source.tokenizer)
        tool_format = choose_format(config.tool_parser, tokenizer)
        thinking = reasoning_format(config.reasoning_parser, tokenizer)
        if isinstance(thinking, HarmonyReasoning) and not isinstance(tool_format, Harmony):
            raise ConfigError(
                f"--tool-parser {config.tool_parser}: calls of this model are messages of Harmony (gpt-oss), like its "
                "reasoning; set it to auto or harmony"
            )
        task = files.task.with_answers(tokenizer)
        ready = await engine
        longest = ready.info.max_model_length
        return ServedModel(
            ready,
            tokenizer,
            PromptSizeLimit(tokenizer, longest),
            GrammarChecker(tokenizer),
            tool_format,
            thinking,
            files.defaults,
            task,
            _guarded(tokenizer, thinking, longest) if config.message_special_tokens != "allow" else None,
            FileDigests(files.at_start),
        )
    except EngineStartError as error:
        if error.exit_code == exit_codes.BAD_CONFIGURATION:
            raise ConfigError(str(error)) from None
        raise
    except BaseException:
        engine.cancel()
        await asyncio.wait((engine,))
        if not engine.cancelled() and engine.exception() is None:
            await engine.result().stop()
        raise


def _guarded(tokenizer: Tokenizer, thinking: ReasoningFormat | None, longest: int) -> GuardedEncoder:
    """Return the encoder of prompts in which clients cannot write special tokens."""
    template = tokenizer.chat_template
    written = reranker.LITERAL_TEXT + ("" if template is None else template.literal_text())
    control = tokenizer.control_tokens(written, thinking.marks if thinking else ())
    return GuardedEncoder(tokenizer, control, longest)

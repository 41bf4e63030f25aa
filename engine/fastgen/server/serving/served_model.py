"""The model that the server serves, with its tokenizer, parsers and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field

from fastgen.link.client import EngineClient
from fastgen.model.file_digests import FilesAtStart
from fastgen.model.generation_defaults import GenerationDefaults
from fastgen.server.serving.encoding import PromptSizeLimit
from fastgen.server.serving.file_digests import FileDigests
from fastgen.server.serving.served_task import ServedTask
from fastgen.text.control_tokens import ControlTokens
from fastgen.text.grammars.checker import GrammarChecker
from fastgen.text.guarded_encoding import GuardedEncoder
from fastgen.text.reasoning.format import ReasoningFormat
from fastgen.text.tokenizer import Tokenizer
from fastgen.text.tools.format import ToolFormat
from fastgen.version import VERSION


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model and what serves it.

    Attributes:
        grammars: checks the grammars of requests.
        reasoning_format: None if reasoning is not parsed.
        generation_defaults: sampling parameters of requests that do not set them.
        task: what the server does with the model.
        guarded: encodes prompts in which clients cannot write special tokens; None if they may.
        file_digests: digests of the model's files, for receipts.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    prompt_size_limit: PromptSizeLimit
    grammars: GrammarChecker
    tool_format: ToolFormat
    reasoning_format: ReasoningFormat | None = None
    generation_defaults: GenerationDefaults = field(default_factory=dict)
    task: ServedTask = field(default_factory=ServedTask)
    guarded: GuardedEncoder | None = None
    file_digests: FileDigests = field(default_factory=lambda: FileDigests(FilesAtStart(())))

    @property
    def control(self) -> ControlTokens | None:
        """The tokens that clients cannot write; None if they may write any."""
        return None if self.guarded is None else self.guarded.control

    @property
    def fingerprint(self) -> str:
        """OpenAI's `system_fingerprint`: the version, and how the engine computes.

        With `deterministic` in it, equal requests with a seed get equal tokens, on processors with the same
        instructions.
        """
        info = self.engine.info
        parts = ["fastgen", VERSION, info.device, info.dtype]
        parts += [info.quantization] if info.quantization != "none" else []
        parts += ["deterministic"] if info.deterministic else []
        return "-".join(parts)

    def remaining_length(self, prompt_tokens: int) -> int:
        """Return how many tokens may follow a prompt.

        0 or less if the prompt is too long: `Request.check` rejects it then.
        """
        return self.engine.info.max_model_length - prompt_tokens

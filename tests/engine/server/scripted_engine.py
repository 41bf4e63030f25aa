"""The engine's real process, step loop and scheduler over a scripted model: it repeats each prompt's tokens.

A prompt may say what to answer instead: what stands between SPEAK tokens, of several such texts the one that the
request's seed falls on, and then the end. How likely a token is follows from its number: `likelihood`.

Faults are asked for by the environment: SCRIPT is `refuse` (a configuration that cannot be served), `crash` (while
loading), `hold` (load until the file in SCRIPT_GATE exists) or empty; SCRIPT_PASS_SECONDS is what a pass takes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from fastgen.config import ConfigError, EngineConfig
from fastgen.core.scheduler import Chunk, StepPlan
from fastgen.core.sequence import Sequence
from fastgen.core.step_output import SampledToken, StepOutput, TokenLogprobs

SPEAK = 5  # <file_sep> in the demo model's vocabulary, a token that no test needs otherwise
END = 2


@dataclass
class ScriptedRunner:
    block_size: int
    max_model_length: int
    pass_seconds: float
    architecture: types.SimpleNamespace = field(default_factory=lambda: types.SimpleNamespace(name="scripted"))
    vocab_size: int = 49152
    eos_token_ids: frozenset[int] = frozenset({END})
    num_blocks: int = 64
    num_host_blocks: int = 0
    seconds_per_block: float = 0.0
    num_parameters: int = 135_000_000
    device: str = "cpu"
    dtype: str = "float32"

    def execute(self, plan: StepPlan) -> StepOutput:
        threading.Event().wait(self.pass_seconds)
        return StepOutput(
            [sampled(chunk.sequence) for chunk in plan.chunks if chunk.samples],
            {index: rows for index, chunk in enumerate(plan.chunks) if (rows := prompt_rows(chunk))},
        )

    def start_prefault(self) -> None:
        """There is no cache memory to prefault."""


def sampled(sequence: Sequence) -> SampledToken:
    token, asked = next_token(sequence), sequence.sampling.logprobs
    return SampledToken(token, None if asked is None else likelihood(token, asked))


def next_token(sequence: Sequence) -> int:
    prompt, place = sequence.tokens[: sequence.num_prompt_tokens], sequence.num_generated_tokens
    marks = [index for index, token in enumerate(prompt) if token == SPEAK]
    if not marks:
        return prompt[place % len(prompt)]
    texts = [prompt[start + 1 : end] for start, end in pairwise(marks)]
    text = texts[sequence.seed % len(texts)]
    return text[place] if place < len(text) else END


def prompt_rows(chunk: Chunk) -> list[TokenLogprobs]:
    sequence = chunk.sequence
    asked = sequence.sampling.prompt_logprobs
    if asked is None:
        return []
    last = min(chunk.start + chunk.num_tokens, sequence.num_prompt_tokens - 1)
    return [likelihood(token, asked) for token in sequence.tokens[chunk.start + 1 : last + 1]]


def likelihood(token: int, asked: int) -> TokenLogprobs:
    """Even tokens are the likeliest at their place, odd ones come second to the even one before them."""
    first = token - token % 2
    ranked = [(first, -0.1), (first + 1, -2.5), *((rival, -3.0 - rival) for rival in range(2, 20))]
    return TokenLogprobs(token, ranked[token % 2][1], token % 2 + 1, tuple(ranked[:asked]))


def load(_source: object, config: EngineConfig, progress: Callable[[str, float], None]) -> ScriptedRunner:
    script = os.environ.get("SCRIPT", "")
    progress("loading weights", 0.4)
    if script == "refuse":
        raise ConfigError("--max-model-length 99999: the KV cache holds 4096 tokens; lower it")
    if script == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    while script == "hold" and not Path(os.environ["SCRIPT_GATE"]).exists():
        threading.Event().wait(0.01)
    return ScriptedRunner(
        block_size=config.block_size,
        max_model_length=config.max_model_length or 2048,
        pass_seconds=float(os.environ.get("SCRIPT_PASS_SECONDS", "0.001")),
    )


if __name__ == "__main__":
    # In the place of the module that loads the real runner, and of torch with it.
    stub = types.ModuleType("fastgen.runner.loader")
    stub.load_runner = load  # type: ignore[attr-defined]
    sys.modules["fastgen.runner.loader"] = stub
    from fastgen.engine.process import main

    sys.exit(main(lambda: None))

"""The engine's real process, step loop and scheduler over a scripted model: it repeats each prompt's tokens.

The vector of a prompt counts its tokens by their ids modulo HIDDEN_SIZE.

A prompt may set the reply instead: the text between REPLY tokens, followed by the end-of-sequence token. Of several
such texts, the request's seed selects one. Logprobs follow from the token id: `scripted_logprobs`.

The environment injects faults: SCRIPT is `refuse` (reject the configuration), `crash` (while loading), `hold` (load
until the file in SCRIPT_GATE exists) or empty. SCRIPT_STEP_SECONDS is the duration of a step, SCRIPT_BLOCKS the number
of blocks of the KV cache. SCRIPT_ERROR is the text of the error that steps with the token FAULT raise.

Two files let a test decide when a request ends, instead of how long it takes: while the file in SCRIPT_PAUSE exists, no
step ends, and once the file in SCRIPT_END exists, every sequence ends with its next token. A step that waits creates a
file whose name ends with `.waits` after the first one's.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fastgen.core.sequence import RowParameters
from fastgen.core.step_output import StepOutput, TokenLogprobs
from fastgen.model.step_input import StepInput
from fastgen.runner.interface import CompletedTicket
from fastgen.settings import ConfigError, EngineConfig

REPLY = 5  # <file_sep> in the demo model's vocabulary; no test uses it otherwise
END = 2
FAULT = 6
HIDDEN_SIZE = 8


@dataclass
class ScriptedRunner:
    block_size: int
    max_model_length: int
    step_seconds: float
    architecture: types.SimpleNamespace = field(
        default_factory=lambda: types.SimpleNamespace(name="scripted", hidden_size=HIDDEN_SIZE)
    )
    vocab_size: int = 49152
    eos_token_ids: frozenset[int] = frozenset({END})
    num_blocks: int = field(default_factory=lambda: int(os.environ.get("SCRIPT_BLOCKS", "64")))
    num_host_blocks: int = 0
    num_state_slots: int = 0
    window_group: None = None
    seconds_per_block: float = 0.0
    num_parameters: int = 135_000_000
    device: str = "cpu"
    dtype: str = "float32"
    steps_in_flight: int = 1
    sequences: dict[int, RowParameters] = field(default_factory=dict)
    counted: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)  # tokens by row, of prompts to pool

    def launch(self, step: StepInput) -> CompletedTicket:
        threading.Event().wait(self.step_seconds)
        while exists("SCRIPT_PAUSE"):
            Path(os.environ["SCRIPT_PAUSE"] + ".waits").touch()
            threading.Event().wait(0.01)
        ends = exists("SCRIPT_END")
        for parameters in step.new_rows:
            self.sequences[parameters.row] = replace(parameters, tokens=list(parameters.tokens))
        if any(FAULT in self.sequences[row].tokens for row in step.rows[step.sampled].tolist()):
            raise RuntimeError(os.environ["SCRIPT_ERROR"])
        tokens, logprobs = [], {}
        for index, row in enumerate(step.rows[step.sampled].tolist()):
            sequence = self.sequences[row]
            token, num_top = END if ends else next_token(sequence), sequence.sampling.logprobs
            sequence.tokens.append(token)
            tokens.append(token)
            if num_top is not None:
                logprobs[index] = scripted_logprobs(token, num_top)
        return CompletedTicket(StepOutput(tokens, logprobs, prompt_logprobs(step), self.pool(step)))

    def pool(self, step: StepInput) -> dict[int, npt.NDArray[np.float32]]:
        """Return the count of ids of each prompt whose last token is in the step."""
        ends = dict(zip(step.pooled.tolist(), step.pooled_starts[1:].tolist(), strict=True))
        for index, row in enumerate(step.rows.tolist()):
            first, end = step.query_starts[index : index + 2].tolist()
            counts = np.bincount(step.token_ids[first:end] % HIDDEN_SIZE, minlength=HIDDEN_SIZE).astype(np.float32)
            is_first = step.seq_lens[index] == end - first
            # Only a sequence that is not pooled begins with cached tokens, or goes on after a step that failed.
            before = 0 if is_first else self.counted.get(row, 0)
            self.counted[row] = counts + before
        return {index: self.counted[int(step.rows[index])] for index in ends}

    def prepare_for(self, config: EngineConfig, progress: Callable[[float], None]) -> None:
        """There are no graphs to capture."""

    def start_prefault(self) -> None:
        """There is no cache memory to prefault."""

    def check(self) -> None:
        """There is no other rank."""


def exists(variable: str) -> bool:
    """Return whether the file that an environment variable names exists; False if it names none."""
    return variable in os.environ and Path(os.environ[variable]).exists()


def next_token(sequence: RowParameters) -> int:
    prompt = sequence.tokens[: sequence.num_prompt_tokens]
    position = len(sequence.tokens) - sequence.num_prompt_tokens
    marks = [index for index, token in enumerate(prompt) if token == REPLY]
    if not marks:
        return prompt[position % len(prompt)]
    texts = [prompt[start + 1 : end] for start, end in pairwise(marks)]
    text = texts[sequence.seed % len(texts)]
    return text[position] if position < len(text) else END


def prompt_logprobs(step: StepInput) -> dict[int, list[TokenLogprobs]]:
    found: dict[int, list[TokenLogprobs]] = {}
    sequences = np.searchsorted(step.query_starts, step.scored_tokens, side="right") - 1
    scored = zip(sequences.tolist(), step.scored_targets.tolist(), step.scored_top.tolist(), strict=True)
    for sequence, token, num_top in scored:
        found.setdefault(sequence, []).append(scripted_logprobs(token, num_top))
    return found


def scripted_logprobs(token: int, num_top: int) -> TokenLogprobs:
    """Rank even tokens first at their position, and odd ones second to the even token before them."""
    first = token - token % 2
    ranked = [(first, -0.1), (first + 1, -2.5), *((rival, -3.0 - rival) for rival in range(2, 20))]
    return TokenLogprobs(token, ranked[token % 2][1], token % 2 + 1, tuple(ranked[:num_top]))


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
        step_seconds=float(os.environ.get("SCRIPT_STEP_SECONDS", "0.001")),
    )


if __name__ == "__main__":
    # Replaces the module that loads the real runner, and torch with it.
    stub = types.ModuleType("fastgen.runner.loader")
    stub.load_runner = load  # type: ignore[attr-defined]
    sys.modules["fastgen.runner.loader"] = stub
    from fastgen.engine.process import main

    sys.exit(main(lambda: None))

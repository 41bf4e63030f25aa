"""The engine's real process, step loop and scheduler over a scripted model: it repeats each prompt's tokens.

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
from pathlib import Path

from fastgen.config import ConfigError, EngineConfig
from fastgen.core.output import PassResult, Sampled
from fastgen.core.scheduler import Pass


@dataclass(frozen=True)
class Architecture:
    name: str = "scripted"
    vocab_size: int = 49152
    eos_token_ids: frozenset[int] = frozenset({2})


@dataclass
class ScriptedRunner:
    block_size: int
    max_model_length: int
    pass_seconds: float
    architecture: Architecture = field(default_factory=Architecture)
    num_blocks: int = 64
    num_host_blocks: int = 0
    seconds_per_block: float = 0.0
    num_parameters: int = 135_000_000
    device: str = "cpu"
    dtype: str = "float32"

    def execute(self, pass_: Pass) -> PassResult:
        threading.Event().wait(self.pass_seconds)
        sequences = [chunk.sequence for chunk in pass_.chunks if chunk.samples]
        return PassResult([Sampled(s.tokens[s.num_generated_tokens % s.num_prompt_tokens]) for s in sequences])


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
    stub = types.ModuleType("fastgen.model.loader")
    stub.load_runner = load  # type: ignore[attr-defined]
    sys.modules["fastgen.model.loader"] = stub
    from fastgen.worker import main

    sys.exit(main())

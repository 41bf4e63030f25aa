"""The load of `sections.long_prompts` on vLLM, in this process, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import os
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.steps import random_tokens

_ARCHITECTURES: Final = {"llama": "LlamaForCausalLM"}

# Ascending inter-token latencies of all streams before, during and after the long prompts, in seconds.
Phases = tuple[list[float], list[float], list[float]]


def is_installed() -> bool:
    """Return whether vLLM can be imported."""
    return importlib.util.find_spec("vllm") is not None


def version() -> str:
    """Return vLLM's version."""
    import vllm

    return str(vllm.__version__)


def phases_around_prompts(sizes: Sizes, dtype: torch.dtype) -> Phases:
    """Run the load with random weights and the token budget that vLLM's server has by default."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # steps are run by this process
    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext

    size = sizes.longest_model
    with TemporaryDirectory() as folder:
        config = {**size.config, "architectures": [_ARCHITECTURES[size.config["model_type"]]]}
        Path(folder, "config.json").write_text(json.dumps(config))
        arguments = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=size.max_length,
            enable_prefix_caching=False,
        )
        engine = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.OPENAI_API_SERVER)
        return _Load(engine, sizes).phases()


class _Load:
    """The streams and the long prompts.

    Attributes:
        arrivals: the times of the tokens of each request.
    """

    def __init__(self, engine: Any, sizes: Sizes) -> None:
        self._engine = engine
        self._sizes = sizes
        self.arrivals: dict[str, list[float]] = {}

    def phases(self) -> Phases:
        """Run all of it."""
        s = self._sizes
        room = s.longest_model.max_length - s.decode_context
        streams = [self._add(f"stream {number}", s.decode_context, room) for number in range(s.streams)]
        while not all(streams):
            self._step()
        begin = self._run_steps(s.watched_steps)
        arrived = time.perf_counter()
        prompts = [self._add(f"prompt {number}", s.long_prompt, 1) for number in range(s.long_prompts)]
        while not all(prompts):
            self._step()
        computed = time.perf_counter()
        self._run_steps(s.watched_steps)
        end = time.perf_counter()
        gaps = [(later, later - earlier) for times in streams for earlier, later in pairwise(times)]
        before, during, after = (
            sorted(gap for at, gap in gaps if first < at <= last)
            for first, last in ((begin, arrived), (arrived, computed), (computed, end))
        )
        return before, during, after

    def _run_steps(self, count: int) -> float:
        """Run steps; return when they began."""
        begin = time.perf_counter()
        for _ in range(count):
            self._step()
        return begin

    def _add(self, name: str, length: int, most: int) -> list[float]:
        """Add a request of a random prompt; return the times of its tokens, which grow."""
        from vllm import SamplingParams

        tokens = random_tokens(length, self._sizes.longest_model.config["vocab_size"], len(self.arrivals))
        sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=most, detokenize=False)
        self._engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        return self.arrivals.setdefault(name, [])

    def _step(self) -> None:
        outputs = self._engine.step()
        now = time.perf_counter()
        for output in outputs:
            # A request can finish in a step that adds no token.
            if len(output.outputs[0].token_ids) > len(self.arrivals[output.request_id]):
                self.arrivals[output.request_id].append(now)

"""Runs passes on CPUs: owns the weights and the KV cache.

This module imports torch only when a model is loaded: OpenMP and numba read their settings once, before that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastgen.config import EngineConfig
from fastgen.core.output import PassResult, Sampled
from fastgen.core.scheduler import Pass
from fastgen.kernels import build, environment
from fastgen.model.architecture import ModelArchitecture
from fastgen.model.cache import plan_kv_blocks, resolve_max_model_length, working_memory_bytes
from fastgen.model.memory import available_memory
from fastgen.model.source import ModelSource

if TYPE_CHECKING:
    import torch

    from fastgen.model.llama import KVCache, Llama


class CPURunner:
    """Forward passes in float32 on the CPUs of one machine.

    Attributes:
        architecture: the model's shape.
        num_blocks, block_size: the KV cache.
        max_model_length: longest prompt plus generation of one request.
        num_parameters: of the model.
        device, dtype: where and in what numbers it runs.
    """

    device = "cpu"
    dtype = "float32"

    def __init__(
        self,
        architecture: ModelArchitecture,
        model: Llama,
        cache: KVCache,
        *,
        max_model_length: int,
        num_threads: int,
    ) -> None:
        self.architecture = architecture
        self.num_blocks, self.block_size = cache.keys.shape[1], cache.keys.shape[3]
        self.max_model_length = max_model_length
        self.num_parameters = architecture.num_parameters
        self._model = model
        self._cache = cache
        self._num_threads = num_threads

    @classmethod
    def load(cls, source: ModelSource, config: EngineConfig, progress: Callable[[str, float], None]) -> CPURunner:
        """Loads the model and takes the memory of its KV cache.

        Args:
            source: what to load.
            config: the limits to serve within.
            progress: hears the stage and the share of it that is done, 0 to 1.

        Raises:
            ModelError: when the weights cannot be used.
            ConfigError: when the limits do not fit the model or the memory.
        """
        progress("starting", 0.0)
        environment.prepare()
        compiling = build.start()
        num_threads = environment.usable_cpus()
        import torch

        torch.set_num_threads(num_threads)
        from fastgen.model.checkpoint import Checkpoint
        from fastgen.model.weights import LlamaWeights

        checkpoint = Checkpoint.open(source)
        weights = LlamaWeights.load(
            source.architecture, checkpoint, lambda fraction: progress("loading weights", fraction)
        )
        memory = available_memory()
        free = max(0, memory.num_bytes - working_memory_bytes(config, source.architecture))
        num_blocks = plan_kv_blocks(config, source.architecture, free, limited=memory.limited)
        max_model_length = resolve_max_model_length(config, source.architecture, num_blocks)
        progress("compiling kernels", 0.0)
        for process in compiling:
            process.wait()
        from fastgen.model.llama import KVCache, Llama

        progress("compiling kernels", 1.0)
        model = Llama(weights)
        cache = KVCache(source.architecture, num_blocks, config.block_size)
        return cls(source.architecture, model, cache, max_model_length=max_model_length, num_threads=num_threads)

    def execute(self, pass_: Pass) -> PassResult:
        """Computes the pass; samples a token for each chunk that samples, in the order of the chunks."""
        from fastgen.model.sampler import Draw, sample

        draws = [
            Draw(chunk.sequence.sampling, chunk.sequence.seed, chunk.start + chunk.num_tokens)
            for chunk in pass_.chunks
            if chunk.samples
        ]
        return PassResult([Sampled(token) for token in sample(self.logits(pass_), draws)])

    def logits(self, pass_: Pass) -> torch.Tensor:
        """Computes the pass; returns [S, vocabulary] float32, a row for each chunk that samples."""
        import torch

        from fastgen.model.batch import Batch

        batch = Batch.from_pass(
            pass_,
            block_size=self.block_size,
            num_kv_heads=self.architecture.num_kv_heads,
            num_threads=self._num_threads,
        )
        with torch.inference_mode():
            return self._model.forward(batch, self._cache)

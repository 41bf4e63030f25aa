"""What is measured: model shapes and loads, at full size and at a size that a CPU can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastgen.model.config.architecture import ModelArchitecture
from fastgen.model.config.from_huggingface import architecture_from_huggingface

# config.json of Llama-3.1-8B.
_LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
# config.json of Qwen3-0.6B.
_QWEN3_SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# config.json of Qwen3-30B-A3B with a third of its 48 layers: 11 billion parameters, a tenth of which a token uses.
_QWEN3_MIXTURE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
_TINY: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model by its config.json.

    Attributes:
        label: name in the table.
        max_length: longest sequence that the benchmark needs.
        cache_tokens: slots of the KV cache, if memory allows.
    """

    label: str
    config: dict[str, Any]
    max_length: int
    cache_tokens: int

    @property
    def architecture(self) -> ModelArchitecture:
        """The engine's description of it."""
        return architecture_from_huggingface(self.config, None)


@dataclass(frozen=True, slots=True)
class Sizes:
    """The size of everything that is measured.

    Attributes:
        large, small: the two models without experts.
        mixture: a mixture of experts.
        block_size: token slots of a KV block.
        decode_context: context of a decode alone.
        decode_steps: decode steps that are timed.
        prefill: tokens of the prompt that is timed alone.
        batch, batch_context: number and context of decodes that are timed together.
        requests, shortest, longest: a load of so many requests, with prompts and generations of these lengths.
        clients, tail_requests, prompt, generation: a closed loop of so many clients with these mean lengths.
        longest_model: the large model for long prompts.
        streams, long_prompts, long_prompt: so many decodes beside so many prompts of so many tokens.
        watched_steps: steps that are timed before and after those prompts.
        token_counts: tokens of the steps that are timed.
        groups: numbers of sequences that share those tokens.
        group_context: context of each of them.
        long_context: context of a decode whose attention is timed.
        peak_bytes, peak_matrix: buffer of the copy and width of the product that measure the peaks.
        seconds: time for each repeated measurement.
    """

    large: ModelSize
    small: ModelSize
    mixture: ModelSize
    block_size: int
    decode_context: int
    decode_steps: int
    prefill: int
    batch: int
    batch_context: int
    requests: int
    shortest: int
    longest: int
    clients: int
    tail_requests: int
    prompt: int
    generation: int
    longest_model: ModelSize
    streams: int
    long_prompts: int
    long_prompt: int
    watched_steps: int
    token_counts: tuple[int, ...]
    groups: tuple[int, ...]
    group_context: int
    long_context: int
    peak_bytes: int
    peak_matrix: int
    seconds: float


FULL = Sizes(
    large=ModelSize("8B", _LLAMA_8B, 9216, 131072),
    small=ModelSize("0.6B", _QWEN3_SMALL, 4096, 393216),
    mixture=ModelSize("30B-A3B, 16 layers", _QWEN3_MIXTURE, 4096, 131072),
    block_size=64,
    decode_context=512,
    decode_steps=256,
    prefill=2048,
    batch=64,
    batch_context=1024,
    requests=256,
    shortest=100,
    longest=1024,
    clients=32,
    tail_requests=128,
    prompt=2600,
    generation=128,
    longest_model=ModelSize("8B", _LLAMA_8B, 69632, 163840),
    streams=8,
    long_prompts=2,
    long_prompt=65536,
    watched_steps=200,
    token_counts=(16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
    groups=(1, 8, 64),
    group_context=512,
    long_context=8192,
    peak_bytes=4 << 30,
    peak_matrix=8192,
    seconds=0.5,
)
TINY = Sizes(
    large=ModelSize("tiny Llama", {"model_type": "llama", **_TINY}, 256, 2048),
    small=ModelSize("tiny Qwen3", {"model_type": "qwen3", "tie_word_embeddings": True, **_TINY}, 256, 2048),
    mixture=ModelSize("tiny mixture", {"model_type": "qwen3_moe", **_TINY, **_TINY_EXPERTS}, 256, 2048),
    block_size=16,
    decode_context=24,
    decode_steps=6,
    prefill=40,
    batch=3,
    batch_context=20,
    requests=5,
    shortest=4,
    longest=12,
    clients=2,
    tail_requests=4,
    prompt=24,
    generation=4,
    longest_model=ModelSize("tiny Llama", {"model_type": "llama", **_TINY}, 512, 2048),
    streams=2,
    long_prompts=2,
    long_prompt=300,
    watched_steps=5,
    token_counts=(4, 16),
    groups=(1, 4, 8),
    group_context=8,
    long_context=60,
    peak_bytes=1 << 20,
    peak_matrix=128,
    seconds=0.01,
)

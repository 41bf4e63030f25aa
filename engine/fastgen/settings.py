"""All settings of the engine and the server: type, default, bounds, unit and help.

The command line, the CRD's defaults and the reference page are generated from `ENGINE_SETTINGS` and `SERVER_SETTINGS`.
Of the engine, this module imports only `fastgen.setting_fields`, so the operator can import it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastgen.setting_fields import (
    ConfigError,
    Setting,
    check_settings,
    is_utf8,
    parse_ints,
    parse_size,
    parsed_settings,
    setting_field,
    settings_of,
)

__all__ = [
    "DEFAULT_TOKEN_BUDGET",
    "ENGINE_SETTINGS",
    "POOLINGS",
    "REASONING_PARSERS",
    "SERVER_SETTINGS",
    "TASKS",
    "TOOL_FORMATS",
    "ConfigError",
    "EngineConfig",
    "ServerConfig",
    "Setting",
    "default_model_name",
    "parse_size",
    "parsed_settings",
]

TASKS = ("auto", "generate", "embed", "score")
POOLINGS = ("auto", "last", "mean")
REASONING_PARSERS = ("auto", "think", "harmony", "none")
# Tool-call formats: the class of each in `fastgen.text.tools`, which only the HTTP process imports.
TOOL_FORMATS = {
    "hermes": "hermes.Hermes",
    "qwen3_coder": "qwen3_coder.Qwen3Coder",
    "llama3_json": "plain_json.Llama3Json",
    "mistral": "mistral.Mistral",
    "harmony": "harmony.Harmony",
    "json": "plain_json.PlainJson",
}
# By device. Calibration is fast on a GPU, and its result differs between GPUs: see docs/decisions/007.
DEFAULT_TOKEN_BUDGET: dict[str, int | str] = {"cpu": 256, "cuda": "auto"}
# Tokens of the largest step that `--token-budget auto` measures, unless `--max-sequences` is larger.
_MOST_TOKENS_MEASURED = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: a GGUF file, a Hugging Face directory, or a hub name such as org/name@revision.

    Raises:
        ConfigError: if a value is not allowed or contradicts another.
    """

    model: str
    device: str = setting_field(
        "cpu", "Device to run on. There is no fallback to another device.", kind="choice", choices=("cpu", "cuda")
    )
    dtype: str = setting_field(
        "auto",
        "Data type of the computation, of weights that are not quantized and, unless --kv-cache-dtype is fp8, of the "
        "KV cache. auto: bfloat16 on cuda, and on a cpu with AMX-BF16 or AVX512-BF16; float32 on any other cpu.",
        kind="choice",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    tensor_parallel: int = setting_field(
        1,
        "Processes among which the model is divided, each with a part of every layer (tensor parallelism). "
        "--kv-cache-memory and --swap-space are for all of them together. The model's attention heads must be "
        "divisible by the number. With --device cuda each has a GPU of its own.",
        minimum=1,
        maximum=8,
        unit="processes",
    )
    quantization: str = setting_field(
        "auto",
        "Quantization of the linear layers. int8 takes a quarter of the memory of float32 and decodes faster, with a "
        "small loss of accuracy; on processors with AVX512-VNNI products quantise activations too. stored keeps the "
        "blocks of a GGUF file, and 4-bit integers and MXFP4 of other files; products quantise activations. auto is "
        "int8 for GGUF files with mostly quantised matrices, on a cpu with AVX2 and unless --dtype is set; otherwise "
        "none, which keeps the weights in --dtype. int8 and stored: cpu only.",
        kind="choice",
        choices=("auto", "none", "int8", "stored"),
    )
    kv_cache_dtype: str = setting_field(
        "auto",
        "Type of the keys and values in the KV cache. auto is the type of the computation; fp8 (float8_e4m3fn) holds "
        "twice as many tokens as bfloat16, with a small loss of accuracy. fp8: cuda only, compute capability 8.9 or "
        "higher.",
        kind="choice",
        choices=("auto", "fp8"),
    )
    token_budget: int | str | None = setting_field(
        None,
        "Maximum tokens per step: one for each decoding sequence, the rest for prompt chunks. auto measures step times "
        "at start and picks the fewest tokens that reach 95% of peak throughput, or fewer if an inter-token target in "
        "milliseconds requires it, but at least --max-sequences if that is set. Default: 256 on cpu, auto on cuda.",
        minimum=1,
        maximum=65536,
        words=("auto",),
        unit="tokens",
    )
    inter_token_target: int | str = setting_field(
        "auto",
        "Target inter-token latency in milliseconds. While sequences decode, a step takes only as many prompt tokens "
        "as fit into this time, but at least 16, or as many as double the time of the step if these are fewer. auto "
        "allows five times the time of a step without tokens, up to twelve times over long contexts, and more to keep "
        "up with demand; off fills every step to the token budget.",
        minimum=1,
        maximum=60000,
        words=("auto", "off"),
        unit="milliseconds",
    )
    chunking: str = setting_field(
        "even",
        "How prompts are split into chunks. even spreads the pending prompt tokens evenly over the steps they need; "
        "greedy fills each step.",
        kind="choice",
        choices=("even", "greedy"),
    )
    prefix_caching: bool = setting_field(
        True,
        "Keep the KV of prompts and generated tokens while there is room; reuse it for prompts with the same prefix.",
        kind="switch",
    )
    preemption: str = setting_field(
        "auto",
        "How a sequence is preempted when KV blocks run out. recompute drops its KV and computes it again later; swap "
        "copies it to host memory and back; auto picks the cheaper one for each sequence.",
        kind="choice",
        choices=("auto", "recompute", "swap"),
    )
    swap_space: int = setting_field(
        0,
        "Host memory for the KV of swapped sequences, for example 4Gi. 0 disables swapping.",
        kind="bytes",
        minimum=0,
        unit="bytes",
    )
    max_sequences: int | None = setting_field(
        None,
        "Maximum running sequences. At most the token budget, because each decoding sequence takes one token per "
        "step. Default: 256, or the token budget if that is smaller.",
        minimum=1,
        maximum=4096,
        unit="sequences",
    )
    max_model_length: int | None = setting_field(
        None,
        "Maximum prompt plus generated tokens of one request. Default: the model's limit (with LongRoPE, the original "
        "context length), or the capacity of the KV cache if that is smaller.",
        minimum=1,
        maximum=1 << 24,
        unit="tokens",
    )
    deterministic: bool = setting_field(
        False,
        "Compute the same logits for a request, bit for bit, whatever else the engine computes: beside any other "
        "requests, with any token budget, after a preemption and behind a cached prefix. So a seed gives the same "
        "tokens under any load. Long prompts are computed more slowly. cpu only; not with linear attention, "
        "--dtype float16, --tensor-parallel or models run by transformers, nor with int8 weights on processors without "
        "AVX512-VNNI.",
        kind="switch",
    )
    block_size: int = setting_field(
        64,
        "Tokens per block of the paged KV cache. A power of two.",
        minimum=16,
        maximum=256,
        unit="tokens",
    )
    kv_cache_memory: int | None = setting_field(
        None,
        "Memory for the KV cache, for example 2GiB. Default: derived from the memory percentage.",
        kind="bytes",
        minimum=1,
        unit="bytes",
    )
    memory_percent: int = setting_field(
        90,
        "Percentage of memory for the KV cache. On cpu: of what weights, working memory and swap space leave of the "
        "container's memory limit or, without a limit, of the machine's available memory, and then at most 4 GiB. On "
        "cuda: of the GPU's memory, weights and working memory included.",
        minimum=1,
        maximum=100,
        unit="percent",
    )
    cuda_graphs: str = setting_field(
        "auto",
        "Token counts of steps that are captured as CUDA graphs, for example 1,2,4,8. A step is padded to the next "
        "count; larger steps run without a graph. Counts above the token budget are lowered to it. auto captures up to "
        "60 counts, to the token budget but at most to 4096; off captures none. cuda only.",
        kind="ints",
        minimum=1,
        maximum=65536,
        words=("auto", "off"),
        unit="tokens",
    )

    def __post_init__(self) -> None:
        check_settings(self, ENGINE_SETTINGS)
        if not isinstance(self.model, str) or not is_utf8(self.model):
            raise ConfigError(f"model {self.model!r}: must be a path or name in UTF-8: rename it")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size {self.block_size}: must be a power of two, for example 64")
        if self.preemption == "swap" and not self.swap_space:
            raise ConfigError("--preemption swap: no host memory to swap to: set --swap-space, for example 4GiB")
        if self.quantization not in ("auto", "none") and self.device != "cpu":
            raise ConfigError(f"--quantization {self.quantization}: supported on --device cpu only: remove it")
        if self.deterministic and self.device != "cpu":
            raise ConfigError("--deterministic: supported on --device cpu only: remove it")
        if self.deterministic and self.tensor_parallel > 1:
            raise ConfigError(
                f"--deterministic: not available with --tensor-parallel {self.tensor_parallel}: remove one"
            )
        if self.kv_cache_dtype != "auto" and self.device != "cuda":
            raise ConfigError(f"--kv-cache-dtype {self.kv_cache_dtype}: supported on --device cuda only: remove it")
        if self.graph_token_counts and self.device != "cuda":
            raise ConfigError(f"--cuda-graphs {self.cuda_graphs}: supported on --device cuda only: remove it")
        if isinstance(self.budget, int) and self.max_sequences is not None and self.max_sequences > self.budget:
            raise ConfigError(
                f"--max-sequences {self.max_sequences}: must be at most --token-budget {self.budget}, "
                "because each decoding sequence takes one token of every step"
            )

    @property
    def budget(self) -> int | str:
        """`token_budget` or the device's default: a number, or "auto" if calibration is to find it."""
        return DEFAULT_TOKEN_BUDGET[self.device] if self.token_budget is None else self.token_budget

    @property
    def sequence_limit(self) -> int:
        """`max_sequences` or its default."""
        return min(256, self.most_tokens) if self.max_sequences is None else self.max_sequences

    @property
    def graph_token_counts(self) -> tuple[int, ...]:
        """The numbers in `cuda_graphs`, ascending; empty for `auto` and `off`."""
        return () if self.cuda_graphs in ("auto", "off") else parse_ints(self.cuda_graphs)

    @property
    def most_tokens(self) -> int:
        """The token budget, or the largest that calibration may choose."""
        if isinstance(self.budget, int):
            return self.budget
        return max(_MOST_TOKENS_MEASURED[self.device], self.max_sequences or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server in front of one engine.

    Attributes:
        host, port: address to listen on; port 0 chooses a free one.
        served_model_names: names that requests may use; metrics have the first. Empty: the model's default name.

    Raises:
        ConfigError: if a value is not allowed.
    """

    host: str = "::"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    max_queued_requests: int = setting_field(
        1024,
        "Maximum queued requests. Further requests are rejected with 429 and Retry-After.",
        minimum=0,
        maximum=1 << 20,
        unit="requests",
    )
    api_processes: int = setting_field(
        1,
        "Processes that serve HTTP in front of the engine process. One sends some 20,000 tokens per second; each "
        "further one needs a processor core and the memory of a tokenizer.",
        minimum=1,
        maximum=64,
        unit="processes",
    )
    api_key_file: str | None = setting_field(
        None,
        "File with the accepted API keys, one per line; reloaded when it changes. The environment variable "
        "FASTGEN_API_KEY adds keys, separated by commas. Without any key, requests are not authenticated.",
        kind="path",
    )
    cache_isolation: str = setting_field(
        "key",
        "Which requests share cached prefixes. key: only requests with the same API key, so that cached_tokens and the "
        "time to the first token tell a client nothing about the prompts of other keys; none: all requests, as far as "
        "their cache_salt is equal. Both are the same with one API key, or without any.",
        kind="choice",
        choices=("key", "none"),
    )
    allowed_origins: str | None = setting_field(
        None,
        "Origins allowed to call the API from a browser (CORS), separated by commas, or *. Default: none.",
        kind="text",
    )
    allowed_hosts: str = setting_field(
        "auto",
        "Names under which clients may reach the server, as in the Host header, separated by commas: *.example.com for "
        "all below one, * for any. Addresses, localhost and names without a dot are always allowed. auto allows any, "
        "except that without an API key, a browser may not use another name for the loopback address, because any web "
        "page could then use the server (DNS rebinding).",
        kind="text",
    )
    max_body_size: int = setting_field(
        16 << 20,
        "Maximum size of a request body, for example 16MiB. Larger bodies are rejected with 413.",
        kind="bytes",
        minimum=1,
        maximum=1 << 30,
        unit="bytes",
    )
    max_bodies_size: int = setting_field(
        256 << 20,
        "Maximum size of all request bodies that an API process receives or serves at a time. Beyond it, those that "
        "have not arrived in full are rejected with 503 and Retry-After, the largest first. At least one body of "
        "--max-body-size is accepted.",
        kind="bytes",
        minimum=1,
        maximum=1 << 40,
        unit="bytes",
    )
    request_read_seconds: int = setting_field(
        60,
        "Maximum time to receive a whole request, from its first byte. Slower requests are rejected with 408.",
        minimum=1,
        maximum=3600,
        unit="seconds",
    )
    log_format: str = setting_field(
        "text",
        "Format of log lines: plain text, or one JSON object per line.",
        kind="choice",
        choices=("text", "json"),
    )
    metrics_compat: str = setting_field(
        "none",
        "Names under which /metrics also shows the server's metrics: vllm for dashboards and gateways that read "
        "vLLM's, such as vllm:num_requests_waiting.",
        kind="choice",
        choices=("none", "vllm"),
    )
    otlp_endpoint: str | None = setting_field(
        None,
        "Endpoint to export traces to, as OTLP over HTTP, for example http://collector:4318. Falls back to the "
        "environment variables OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT. Default: tracing "
        "is off.",
        kind="text",
    )
    tool_parser: str = setting_field(
        "auto",
        "Format of the model's tool calls: hermes (also Qwen), qwen3_coder, llama3_json, mistral, or json for bare "
        "JSON. auto detects it from the chat template and vocabulary.",
        kind="choice",
        choices=("auto", *TOOL_FORMATS),
    )
    task: str = setting_field(
        "auto",
        "What the server does with the model. generate: text. embed: vectors of texts (/v1/embeddings, and their "
        "similarity at /v1/score and /v1/rerank). score: pairs of texts at /v1/score and /v1/rerank, with a reranker "
        "that answers yes or no, such as Qwen3-Reranker. auto embeds with models without an output head and with "
        "those whose files name a pooling, such as sentence-transformers', and generates with others.",
        kind="choice",
        choices=TASKS,
    )
    pooling: str = setting_field(
        "auto",
        "How --task embed makes a vector of a text: from the hidden state of its last token, or from the mean of all "
        "tokens' hidden states. auto follows the model's files, or takes the last.",
        kind="choice",
        choices=POOLINGS,
    )
    generation_config: str = setting_field(
        "auto",
        "Sampling parameters of requests that do not set them. auto reads the model's generation_config.json "
        "(temperature, top_k, top_p, min_p, typical_p, repetition_penalty, bad_words_ids, suppress_tokens, and "
        "max_new_tokens as the default length of a chat's answer); none keeps OpenAI's defaults.",
        kind="choice",
        choices=("auto", "none"),
    )
    reasoning_parser: str = setting_field(
        "auto",
        "How reasoning is separated from the answer: think for models that think between <think> and </think> (Qwen3, "
        "DeepSeek-R1), harmony for the channels of gpt-oss, or none. auto looks for these marks in the chat template "
        "and the vocabulary.",
        kind="choice",
        choices=REASONING_PARSERS,
    )
    message_special_tokens: str = setting_field(
        "allow",
        "What a special token becomes that the text of a message spells, such as the end mark of messages. allow: the "
        "token, as in transformers and vLLM, so the author of a text can forge the end of a message and the next "
        "role. escape: plain text. Applies to all that a chat template renders, tools and their results included, and "
        "to rerankers, but not to the prompts of /v1/completions.",
        kind="choice",
        choices=("allow", "escape"),
    )
    trust_request_chat_template: bool = setting_field(
        False,
        "Let requests bring their own chat template in the field chat_template. Templates run in a sandbox, but a "
        "hostile one can take much time and memory.",
        kind="switch",
    )
    step_timeout_seconds: int = setting_field(
        60,
        "Maximum time in which the engine has work and finishes no step. After half of it /ready is 503; after all of "
        "it the engine counts as hung and the server exits with code 4. It is 10 times this setting for the first 16 "
        "steps, and then 20 times what the largest step is expected to take, but at least this setting and at most 10 "
        "times it. At most nine tenths of it do not count, in which the engine waits for a processor.",
        minimum=1,
        maximum=86400,
        unit="seconds",
    )
    ui: bool = setting_field(
        False,
        "Serve a page at /ui: a chat playground and a live picture of the steps. Its requests need the API key.",
        kind="switch",
    )
    drain_seconds: int = setting_field(
        60,
        "How long running requests may continue after SIGTERM. Then they end with finish_reason abort.",
        minimum=0,
        maximum=86400,
        unit="seconds",
    )

    def __post_init__(self) -> None:
        check_settings(self, SERVER_SETTINGS)
        for name in self.served_model_names:
            if not is_utf8(name):
                raise ConfigError(f"--served-model-name {name}: must be in UTF-8: choose another name")


ENGINE_SETTINGS: tuple[Setting, ...] = settings_of(EngineConfig)
SERVER_SETTINGS: tuple[Setting, ...] = settings_of(ServerConfig)


def default_model_name(model: str) -> str:
    """Return the default served name of a model: its file or folder name without `.gguf`."""
    path = Path(model)
    return path.name.removesuffix(".gguf") or model

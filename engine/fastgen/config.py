"""Every setting of the engine, once: type, default, bounds, unit and help.

The command line, the CRD's defaults and the reference docs derive from `ENGINE_SETTINGS`. This module imports nothing
else of the engine, so that the operator can read it without torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastgen.settings import ConfigError, Setting, parse_size, parsed_settings, setting_field, settings_of

__all__ = [
    "DEFAULT_TOKEN_BUDGET",
    "ENGINE_SETTINGS",
    "SERVER_SETTINGS",
    "TOOL_PARSERS",
    "ConfigError",
    "EngineConfig",
    "ServerConfig",
    "Setting",
    "default_model_name",
    "parse_size",
    "parsed_settings",
]

TOOL_PARSERS = ("auto", "hermes", "qwen3_coder", "llama3_json", "mistral", "json")
# By device: see docs/decisions/007. Measuring takes a blink on a GPU, and what it finds differs from one to the next.
DEFAULT_TOKEN_BUDGET: dict[str, int | str] = {"cpu": 256, "cuda": "auto"}
# How far `--token-budget auto` looks for the knee.
_MOST_TOKENS_MEASURED = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What one engine serves and within which limits.

    Raises:
        ConfigError: when built with values outside their bounds or values that contradict each other.
    """

    model: str
    device: str = setting_field(
        "cpu", "Where the model runs; never anywhere else instead.", kind="choice", choices=("cpu", "cuda")
    )
    dtype: str = setting_field(
        "auto",
        "Number format of weights and KV cache; auto is float32 on cpu and bfloat16 on cuda.",
        kind="choice",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = setting_field(
        "none",
        "Number format that the layers' matrices are kept in: int8 takes a quarter of float32's memory and decodes "
        "faster, at a small loss; cpu only.",
        kind="choice",
        choices=("none", "int8"),
    )
    token_budget: int | str | None = setting_field(
        None,
        "Forward tokens per pass: every running sequence's next token first, then prompt chunks. auto measures passes "
        "at start and takes the fewest tokens that reach 95 % of the peak throughput. Where not given: 256 on cpu, "
        "auto on cuda.",
        minimum=1,
        maximum=65536,
        words=("auto",),
        unit="tokens",
    )
    inter_token_target: int | str = setting_field(
        "auto",
        "Milliseconds between two tokens of a generation that passes are shaped for: while sequences decode, a pass "
        "takes no more prompt tokens than fit into this time. auto works it out from the passes' measured times; off "
        "fills every pass to the budget.",
        minimum=1,
        maximum=60000,
        words=("auto", "off"),
        unit="milliseconds",
    )
    chunking: str = setting_field(
        "even",
        "How prompts are cut into passes: even spreads the pending prompt tokens evenly over the passes they need, "
        "greedy fills each pass.",
        kind="choice",
        choices=("even", "greedy"),
    )
    prefix_caching: bool = setting_field(
        True,
        "Keep the KV of finished prompts while there is room, and use it for prompts that begin the same.",
        kind="switch",
    )
    preemption: str = setting_field(
        "auto",
        "What happens to a sequence that must make room: its KV is dropped and computed again, or swapped to the host "
        "buffer; auto takes the cheaper way for each one.",
        kind="choice",
        choices=("auto", "recompute", "swap"),
    )
    swap_space: int = setting_field(
        0,
        "Host memory for the KV of swapped sequences, for example 4GiB; 0 means that preemption recomputes.",
        kind="bytes",
        minimum=0,
        unit="bytes",
    )
    max_sequences: int | None = setting_field(
        None,
        "Sequences that may hold KV cache at once; at most the token budget, as each takes a token per pass. "
        "Where not given: 256, or the token budget if that is smaller.",
        minimum=1,
        maximum=4096,
        unit="sequences",
    )
    max_model_length: int | None = setting_field(
        None,
        "Longest prompt plus generation of one request; the model's own limit where not given.",
        minimum=1,
        maximum=1 << 24,
        unit="tokens",
    )
    block_size: int = setting_field(
        64,
        "Token slots in one block of the paged KV cache; a power of two.",
        minimum=16,
        maximum=256,
        unit="tokens",
    )
    kv_cache_memory: int | None = setting_field(
        None,
        "Memory of the KV cache, for example 2GiB; where not given, worked out from the memory percent.",
        kind="bytes",
        minimum=1,
        unit="bytes",
    )
    memory_percent: int = setting_field(
        90,
        "Share of the memory left after loading the weights (of the container's limit where there is one) that the KV "
        "cache may take. On a machine without a container limit the cpu backend takes 4 GiB at most.",
        minimum=1,
        maximum=100,
        unit="percent",
    )

    def __post_init__(self) -> None:
        for setting in ENGINE_SETTINGS:
            setting.check(getattr(self, setting.name))
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size {self.block_size}: must be a power of two, for example 64")
        if self.preemption == "swap" and not self.swap_space:
            raise ConfigError("--preemption swap: needs room to swap to: give --swap-space, for example 4GiB")
        if self.quantization != "none" and self.device != "cpu":
            raise ConfigError(f"--quantization {self.quantization}: is for --device cpu only: leave it out")
        if isinstance(self.budget, int) and self.max_sequences is not None and self.max_sequences > self.budget:
            raise ConfigError(
                f"--max-sequences {self.max_sequences}: must be at most --token-budget {self.budget}, "
                "because each running sequence takes one token of every pass"
            )

    @property
    def budget(self) -> int | str:
        """`token_budget`, or the device's default where it is not given: a number, or "auto" where it is measured."""
        return DEFAULT_TOKEN_BUDGET[self.device] if self.token_budget is None else self.token_budget

    @property
    def sequence_limit(self) -> int:
        """`max_sequences`, or what it is worked out to where it is not given."""
        return min(256, self.most_tokens) if self.max_sequences is None else self.max_sequences

    @property
    def most_tokens(self) -> int:
        """The token budget, or the most that measuring may set it to."""
        if isinstance(self.budget, int):
            return self.budget
        return max(_MOST_TOKENS_MEASURED[self.device], self.max_sequences or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP face of one engine: where it listens and how it ends.

    `served_model_names`: the names that requests may use; the first is the one reported. Empty: the model's file name.
    """

    host: str = "0.0.0.0"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    max_queued_requests: int = setting_field(
        1024,
        "Requests that may wait for a place among the running ones; beyond it they are answered 429 with Retry-After.",
        minimum=0,
        maximum=1 << 20,
        unit="requests",
    )
    api_key_file: str | None = setting_field(
        None,
        "File with the API keys that requests may use, one a line; read again when it changes. Keys may also be given, "
        "separated by commas, in the environment variable FASTGEN_API_KEY. Where there are none, none is asked for.",
        kind="text",
    )
    allowed_origins: str | None = setting_field(
        None,
        "Origins whose web pages may call the API from a browser (CORS), separated by commas, or *; none by default.",
        kind="text",
    )
    max_body_size: int = setting_field(
        16 << 20,
        "Largest body of a request, for example 16MiB; beyond it it is answered 413.",
        kind="bytes",
        minimum=1,
        maximum=1 << 30,
        unit="bytes",
    )
    request_read_seconds: int = setting_field(
        60,
        "How long a request may take to come whole, from its first byte; beyond it it is answered 408.",
        minimum=1,
        maximum=3600,
        unit="seconds",
    )
    log_format: str = setting_field(
        "text",
        "How log lines are written: for people, or one JSON object a line.",
        kind="choice",
        choices=("text", "json"),
    )
    otlp_endpoint: str | None = setting_field(
        None,
        "Where traces go, as OTLP over HTTP, for example http://collector:4318; the environment variables "
        "OTEL_EXPORTER_OTLP_ENDPOINT and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT say it too. No traces where nothing does.",
        kind="text",
    )
    tool_parser: str = setting_field(
        "auto",
        "How the model writes tool calls: hermes (also Qwen), qwen3_coder, llama3_json, mistral, or json for bare "
        "JSON; auto goes by the model's chat template and vocabulary.",
        kind="choice",
        choices=TOOL_PARSERS,
    )
    drain_seconds: int = setting_field(
        60,
        "After SIGTERM, how long running requests may go on before they end with finish_reason abort.",
        minimum=0,
        maximum=86400,
        unit="seconds",
    )

    def __post_init__(self) -> None:
        for setting in SERVER_SETTINGS:
            setting.check(getattr(self, setting.name))


ENGINE_SETTINGS: tuple[Setting, ...] = settings_of(EngineConfig)
SERVER_SETTINGS: tuple[Setting, ...] = settings_of(ServerConfig)


def default_model_name(model: str) -> str:
    """The name a model is served under where the user gives none: its file or folder name without `.gguf`."""
    path = Path(model)
    return path.name.removesuffix(".gguf") or model

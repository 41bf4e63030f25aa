"""Every knob of the engine, once: type, default, bounds, unit and help.

The command line, the CRD's defaults and the reference docs derive from `KNOBS`. Nothing here imports anything of the
engine, so that the operator may read it without torch.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

Kind = Literal["int", "bytes", "choice", "switch", "text"]


class ConfigError(ValueError):
    """A setting that cannot be served. The message is one line: it names the field and the remedy.

    Programs print it and exit with code 2.
    """


@dataclass(frozen=True, slots=True)
class Knob:
    """One setting as the outside sees it.

    Attributes:
        name: the attribute of `EngineConfig`; the flag is `--` + name with dashes.
        kind: "int", "bytes", "choice", "switch" (on or off) or "text".
        default: the value where the user says nothing; None means "worked out at start", as `help` says.
        minimum, maximum: inclusive bounds of an int, or None.
        choices: the allowed values of a choice.
        words: what an int may be said to be instead of a number, for example "auto".
        unit: of an int or a size, or "".
        help: one sentence for people.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    minimum: int | None = None
    maximum: int | None = None
    choices: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    unit: str = ""

    @property
    def flag(self) -> str:
        """The command-line spelling, for example `--token-budget`."""
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """Raises ConfigError if `value` is outside the knob's bounds."""
        if (value is None and self.default is None) or value in self.words:
            return
        if self.kind == "choice" and value not in self.choices:
            raise ConfigError(f"{self.flag} {value}: choose one of {', '.join(self.choices)}")
        if self.kind in ("int", "bytes"):
            if isinstance(value, str):
                words = "".join(f"{word} or " for word in self.words)
                raise ConfigError(f"{self.flag} {value}: must be {words}a whole number")
            if self.minimum is not None and value < self.minimum:
                raise ConfigError(f"{self.flag} {value}: must be at least {self.minimum}")
            if self.maximum is not None and value > self.maximum:
                raise ConfigError(f"{self.flag} {value}: must be at most {self.maximum}")


def _knob(
    default: Any,
    help: str,
    *,
    kind: Kind = "int",
    minimum: int | None = None,
    maximum: int | None = None,
    choices: tuple[str, ...] = (),
    words: tuple[str, ...] = (),
    unit: str = "",
) -> Any:
    metadata = {
        "kind": kind,
        "help": help,
        "minimum": minimum,
        "maximum": maximum,
        "choices": choices,
        "words": words,
        "unit": unit,
    }
    return field(default=default, metadata=metadata)


# How far `--token-budget auto` looks for the knee.
_MOST_TOKENS_MEASURED = {"cpu": 1024, "cuda": 8192}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What one engine serves and within which limits.

    Raises:
        ConfigError: when built with values outside their bounds or values that contradict each other.
    """

    model: str
    device: str = _knob(
        "cpu", "Where the model runs; never anywhere else instead.", kind="choice", choices=("cpu", "cuda")
    )
    dtype: str = _knob(
        "auto",
        "Number format of weights and KV cache; auto is float32 on cpu and bfloat16 on cuda.",
        kind="choice",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = _knob(
        "none",
        "Number format that the layers' matrices are kept in: int8 takes a quarter of float32's memory and decodes "
        "faster, at a small loss; cpu only.",
        kind="choice",
        choices=("none", "int8"),
    )
    token_budget: int | str = _knob(
        256,
        "Forward tokens per pass: every running sequence's next token first, then prompt chunks. auto measures passes "
        "at start and takes the fewest tokens that reach 95 % of the peak throughput.",
        minimum=1,
        maximum=65536,
        words=("auto",),
        unit="tokens",
    )
    inter_token_target: int | str = _knob(
        "auto",
        "Milliseconds between two tokens of a generation that passes are shaped for: while sequences decode, a pass "
        "takes no more prompt tokens than fit into this time. auto works it out from the passes' measured times; off "
        "fills every pass to the budget.",
        minimum=1,
        maximum=60000,
        words=("auto", "off"),
        unit="milliseconds",
    )
    chunking: str = _knob(
        "even",
        "How prompts are cut into passes: even spreads the pending prompt tokens evenly over the passes they need, "
        "greedy fills each pass.",
        kind="choice",
        choices=("even", "greedy"),
    )
    prefix_caching: bool = _knob(
        True,
        "Keep the KV of finished prompts while there is room, and use it for prompts that begin the same.",
        kind="switch",
    )
    preemption: str = _knob(
        "auto",
        "What happens to a sequence that must make room: its KV is dropped and computed again, or swapped to the host "
        "buffer; auto takes the cheaper way for each one.",
        kind="choice",
        choices=("auto", "recompute", "swap"),
    )
    swap_space: int = _knob(
        0,
        "Host memory for the KV of swapped sequences, for example 4GiB; 0 means that preemption recomputes.",
        kind="bytes",
        minimum=0,
        unit="bytes",
    )
    max_sequences: int | None = _knob(
        None,
        "Sequences that may hold KV cache at once; at most the token budget, as each takes a token per pass. "
        "Where not given: 256, or the token budget if that is smaller.",
        minimum=1,
        maximum=4096,
        unit="sequences",
    )
    max_model_length: int | None = _knob(
        None,
        "Longest prompt plus generation of one request; the model's own limit where not given.",
        minimum=1,
        maximum=1 << 24,
        unit="tokens",
    )
    block_size: int = _knob(
        64,
        "Token slots in one block of the paged KV cache; a power of two.",
        minimum=16,
        maximum=256,
        unit="tokens",
    )
    kv_cache_memory: int | None = _knob(
        None,
        "Memory of the KV cache, for example 2GiB; where not given, worked out from the memory percent.",
        kind="bytes",
        minimum=1,
        unit="bytes",
    )
    memory_percent: int = _knob(
        90,
        "Share of the memory left after loading the weights (of the container's limit where there is one) that the KV "
        "cache may take. On a machine without a container limit the cpu backend takes 4 GiB at most.",
        minimum=1,
        maximum=100,
        unit="percent",
    )

    def __post_init__(self) -> None:
        for knob in KNOBS:
            knob.check(getattr(self, knob.name))
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size {self.block_size}: must be a power of two, for example 64")
        if self.preemption == "swap" and not self.swap_space:
            raise ConfigError("--preemption swap: needs room to swap to: give --swap-space, for example 4GiB")
        if self.quantization != "none" and self.device != "cpu":
            raise ConfigError(f"--quantization {self.quantization}: is for --device cpu only: leave it out")
        if (
            isinstance(self.token_budget, int)
            and self.max_sequences is not None
            and (self.max_sequences > self.token_budget)
        ):
            raise ConfigError(
                f"--max-sequences {self.max_sequences}: must be at most --token-budget {self.token_budget}, "
                "because each running sequence takes one token of every pass"
            )

    @property
    def sequence_limit(self) -> int:
        """`max_sequences`, or what it is worked out to where it is not given."""
        return min(256, self.most_tokens) if self.max_sequences is None else self.max_sequences

    @property
    def most_tokens(self) -> int:
        """The token budget, or the most that measuring may set it to."""
        if isinstance(self.token_budget, int):
            return self.token_budget
        return max(_MOST_TOKENS_MEASURED[self.device], self.max_sequences or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP face of one engine: where it listens and how it ends.

    `served_model_names`: the names that requests may use; the first is the one reported. Empty: the model's file name.
    """

    host: str = "0.0.0.0"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    max_queued_requests: int = _knob(
        1024,
        "Requests that may wait for a place among the running ones; beyond it they are answered 429 with Retry-After.",
        minimum=0,
        maximum=1 << 20,
        unit="requests",
    )
    drain_seconds: int = _knob(
        60,
        "After SIGTERM, how long running requests may go on before they end with finish_reason abort.",
        minimum=0,
        maximum=86400,
        unit="seconds",
    )

    def __post_init__(self) -> None:
        for knob in SERVER_KNOBS:
            knob.check(getattr(self, knob.name))


def _knobs_of(cls: type) -> tuple[Knob, ...]:
    return tuple(
        Knob(name=f.name, default=None if f.default is MISSING else f.default, **f.metadata)
        for f in fields(cls)
        if f.metadata
    )


KNOBS: tuple[Knob, ...] = _knobs_of(EngineConfig)
SERVER_KNOBS: tuple[Knob, ...] = _knobs_of(ServerConfig)


_SIZE = re.compile(r"(\d+)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size such as `2GiB`, `512Mi`, `2G` (powers of 1000) or `1073741824`.

    Raises:
        ConfigError: when it is not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise ConfigError(f"size {text!r}: write a whole number with a unit, for example 2GiB or 512MiB")
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    power = " kmgt".index(unit.lower()) if unit else 0
    return int(number) * int(base**power)


def default_model_name(model: str) -> str:
    """The name a model is served under where the user gives none: its file or folder name without `.gguf`."""
    path = Path(model)
    return path.name.removesuffix(".gguf") or model

"""Messages between the API processes and the engine process.

They are msgspec structs over one ZeroMQ PAIR socket for each API process.

server  -> engine   Add, Cancel, Watch; from the first API process also Gone, Shutdown
engine  -> server   Loading*, then Ready or Failed; after Ready a StepReport per step; Failed before an exit on error
"""

from __future__ import annotations

import msgspec

from fastgen.core.request import FinishReason, Request
from fastgen.core.stats import SchedulerStats, StepStats, StepTrace
from fastgen.core.step_output import TokenLogprobs
from fastgen.core.step_times import StepCoefficients


class Add(msgspec.Struct, tag="add", frozen=True):
    """Start a request, which the server has checked with `Request.check`."""

    request: Request


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Cancel a request. Unknown ids are ignored, because the request may have ended meanwhile."""

    request_id: str


class Watch(msgspec.Struct, tag="watch", frozen=True):
    """Start or stop adding a trace to every report. A report follows, even without work."""

    on: bool


class Gone(msgspec.Struct, tag="gone", frozen=True):
    """The API process with this client number has exited.

    The engine cancels its requests and sends it no more messages.
    """

    client: int


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """Exit now and drop unfinished requests."""


Command = Add | Cancel | Watch | Gone | Shutdown


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model that an engine serves, and its limits.

    Attributes:
        deterministic: whether a request's logits are the same, bit for bit, whatever else the engine computes.
        weight_format, weight_bytes: of the model's files, as in `StoredWeights`.
        arithmetic: what else decides the last bits: instruction sets, width of vectors and product, or the GPU.
        num_blocks: KV blocks, of all layers or of those that keep all tokens.
        num_window_blocks: blocks of layers with a sliding window; 0 if they have none of their own.
    """

    architecture: str
    device: str
    dtype: str
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    tensor_parallel: int = 1
    deterministic: bool = False
    arithmetic: str = ""
    weight_format: str = ""
    weight_bytes: int = 0
    vocabulary_size: int
    hidden_size: int
    num_parameters: int
    max_model_length: int
    token_budget: int
    max_sequences: int
    block_size: int
    num_blocks: int
    num_window_blocks: int = 0


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """Progress of the start: a human-readable stage and its completed fraction, 0 to 1."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine accepts requests."""

    info: EngineInfo


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine exits because of an error. `message` is one line; `fastgen.exit_codes` has the codes."""

    message: str
    exit_code: int


class TokenOutput(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The output of one request in one step.

    A step creates hundreds, so they are not tracked by the garbage collector, and encoded as arrays without names.

    Attributes:
        token_ids: newly sampled tokens, including the token that ended the request.
        logprobs: one for each of `token_ids`, if requested.
        prompt_logprobs: of the next prompt tokens in order, if requested. Over all outputs there is one for each
            prompt token but the first, and all of them come before or with the first sampled token.
        cached_tokens: prompt tokens found in the prefix cache; set only on the first output after the request has been
            scheduled.
        queue_seconds: from the request's arrival in the engine to its first step; set likewise.
        finish_reason: set on the request's last output.
        pooled: the result of a request with `pooling`, little-endian float32; set on its only output, unless it ends
            early.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int | None = None
    queue_seconds: float | None = None
    pooled: bytes | None = None


class StepReport(msgspec.Struct, tag="step", frozen=True):
    """Sent to every client after every turn of the step loop, and after other changes while it is idle.

    Attributes:
        outputs: of the client's requests.
        num_finished: requests of all clients that this report ends. Cancelled ones are not reported.
        step: counters of the step; those of `StepStats()` if the report comes without one.
        scheduler: the state after it.
        step_model: the fit of the step times; zeros until there is one.
        trace: the step by request, while the client watches.
    """

    outputs: list[TokenOutput]
    step: StepStats
    scheduler: SchedulerStats
    step_model: StepCoefficients
    trace: StepTrace | None = None
    num_finished: int = 0


Event = Loading | Ready | Failed | StepReport

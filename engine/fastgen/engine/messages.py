"""What the server and the engine process say to each other, as msgspec structs over a ZeroMQ PAIR socket.

server  -> engine   Add, Cancel, Shutdown
engine  -> server   Loading*, then Ready or Failed; then a StepReport after every pass; Failed if it dies talking
"""

from __future__ import annotations

import msgspec

from fastgen.core.request import FinishReason, Request
from fastgen.core.stats import SchedulerStats, StepStats
from fastgen.core.step_output import TokenLogprobs


class Add(msgspec.Struct, tag="add", frozen=True):
    """Generate for this request. The server has checked it with `Request.check`."""

    request: Request


class Cancel(msgspec.Struct, tag="cancel", frozen=True):
    """Nobody wants the rest of this request. Unknown ids are ignored: it may have ended meanwhile."""

    request_id: str


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """End now; requests under way are dropped."""


Command = Add | Cancel | Shutdown


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a ready engine serves, and within which limits."""

    architecture: str
    device: str
    dtype: str
    vocabulary_size: int
    num_parameters: int
    max_model_length: int
    token_budget: int
    max_sequences: int
    block_size: int
    num_blocks: int
    load_seconds: float


class Loading(msgspec.Struct, tag="loading", frozen=True):
    """How far the start is: a stage for people and the share of it that is done, 0 to 1."""

    stage: str
    fraction: float


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The engine takes requests from now on."""

    info: EngineInfo


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """The engine cannot go on: one line for people. `exit_code` 2 means that its configuration is at fault."""

    message: str
    exit_code: int


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one request got from a pass.

    Attributes:
        token_ids: newly sampled tokens; the token that ended the request is among them.
        logprobs: one for each of `token_ids`, where the request asked for them.
        prompt_logprobs: of the next prompt tokens in order, where the request asked for them: over all outputs one for
            each prompt token but the first, all of them before the first sampled token or with it.
        cached_tokens: prompt tokens that came from the prefix cache; set once, on the request's first output.
        queue_seconds: from the request's arrival in the engine to its first pass; set on the same output.
        finish_reason: set on the request's last output.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    cached_tokens: int | None = None
    queue_seconds: float | None = None


class StepReport(msgspec.Struct, tag="step", frozen=True):
    """Sent after every step, and after cancellations between steps.

    Attributes:
        step: counters of the step; all 0 if the report comes without one.
        scheduler: the state after it.
        step_model: (a, b, c) of the fit step = a + b * tokens + c * kv_tokens, in seconds; zeros until there is one.
    """

    outputs: list[TokenOutput]
    step: StepStats
    scheduler: SchedulerStats
    step_model: tuple[float, float, float]


Event = Loading | Ready | Failed | StepReport

"""Why a request that was admitted fails: the error that its client gets."""

from __future__ import annotations

from fastgen.core.request import Request
from fastgen.server.http.api_error import DRAINING, FailedRequest


def engine_died(reason: str) -> FailedRequest:
    """Return the error for a request that was running when the engine died of `reason`."""
    return FailedRequest(500, f"the engine died during this request: {reason}; try again", code="engine_dead")


def out_of_memory() -> FailedRequest:
    """Return the error for a request that the device lacked the memory to compute, even alone."""
    return FailedRequest(
        503,
        "the device ran out of memory for this request, even with nothing else in the step: send a shorter one, try "
        "again later, or lower --memory-percent (spec.engine.kvCache.memoryPercent) to leave more for steps",
        code="out_of_memory",
    )


def rejected_by_engine() -> FailedRequest:
    """Return the error for a request that the engine rejected although the server had accepted it."""
    return FailedRequest(
        500, "internal error: the engine rejected this request; the server's log has the reason", code="internal_error"
    )


def grammar_too_complex() -> FailedRequest:
    """Return the error for a generation whose grammar could not be followed to its end."""
    return FailedRequest(
        400,
        "the grammar or schema of this request cannot be followed any further: it takes too much work or memory, or no "
        "match continues what was generated; simplify it, or lower max_tokens",
        code="grammar_too_complex",
    )


def timed_out(request: Request) -> FailedRequest:
    """Return the error for a request whose deadline passed before it had a result."""
    awaited = "the first token" if request.pooling is None else "the result"
    return FailedRequest(
        408,
        f"timeout: {request.deadline_seconds:g} s passed before {awaited}; raise it or try again later",
        code="deadline_exceeded",
        param="timeout",
    )


def stopped() -> FailedRequest:
    """Return the error for a request that the server's stop ended before it had a result."""
    message = "the server stopped before the result was there; try again"
    return FailedRequest(503, message, code=DRAINING, retry_after=1)

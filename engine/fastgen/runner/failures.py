"""Describes errors that end an engine."""

from __future__ import annotations

from fastgen import exit_codes
from fastgen.link.messages import Failed
from fastgen.model import first_line
from fastgen.model.device_errors import is_device_failure, is_out_of_memory
from fastgen.settings import ConfigError


class GroupBroken(Exception):
    """Ranks cannot go on together, because another one has ended."""


class RankFailed(Exception):
    """A rank of a divided model has failed, and the others have been ended.

    Attributes:
        failed: the rank and its error in one line, and the exit code.
    """

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed

    @classmethod
    def of(cls, rank: int, failed: Failed) -> RankFailed:
        """Return the error of a rank."""
        return cls(Failed(f"rank {rank}: {failed.message}", failed.exit_code))


def describe(error: Exception) -> Failed:
    """Return the message for an error that ends the engine: one line with the cause and any remedy."""
    text = first_line(error)
    if isinstance(error, RankFailed):
        return error.failed
    if isinstance(error, ConfigError):
        return Failed(str(error), exit_codes.BAD_CONFIGURATION)
    if is_out_of_memory(error):  # while it loads, or on a rank: otherwise the engine makes its steps smaller
        remedy = "lower --memory-percent or --token-budget, or use more memory"
        return Failed(f"out of memory: {text}; {remedy}", exit_codes.FAILED)
    if is_device_failure(error):
        advice = "look for Xid messages in the node's dmesg, and replace the GPU if they return"
        return Failed(f"the GPU failed: {text}; {advice}", exit_codes.DEVICE_FAILED)
    return Failed(f"{type(error).__name__}: {text}", exit_codes.FAILED)

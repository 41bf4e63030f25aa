"""How fetching a model can fail. The exit codes are read by the operator, which has to tell the causes apart."""

from __future__ import annotations

from typing import ClassVar, Final

FAILED: Final = 1
SOURCE_NOT_FOUND: Final = 3
ACCESS_DENIED: Final = 4
VOLUME_FULL: Final = 5


class FetchError(Exception):
    """The model could not be fetched. The message is one line: what is wrong, and the remedy where there is one."""

    exit_code: ClassVar[int] = FAILED


class SourceNotFound(FetchError):
    """There is no such repository, revision, bucket or file, or nothing in it that can be served."""

    exit_code = SOURCE_NOT_FOUND


class AccessDenied(FetchError):
    """The source wants other credentials, or any."""

    exit_code = ACCESS_DENIED


class VolumeFull(FetchError):
    """What is still to be fetched does not fit."""

    exit_code = VOLUME_FULL


class Interrupted(FetchError):
    """The source did not answer, or not to the end: the same may work in a moment."""

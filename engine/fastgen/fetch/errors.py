"""Errors of a model download. The operator reads the exit codes to tell the causes apart."""

from __future__ import annotations

import os
import re
from typing import ClassVar, Final

from fastgen.setting_fields import one_line

FAILED: Final = 1
SOURCE_NOT_FOUND: Final = 3
ACCESS_DENIED: Final = 4
VOLUME_FULL: Final = 5


class FetchError(Exception):
    """The download failed. The message is one line with the cause and, if there is one, the remedy."""

    exit_code: ClassVar[int] = FAILED

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class SourceNotFound(FetchError):
    """No such repository, revision, bucket or file, or nothing in it that can be served."""

    exit_code = SOURCE_NOT_FOUND


class AccessDenied(FetchError):
    """The source requires credentials, rejected those given, or does not give this account access."""

    exit_code = ACCESS_DENIED


class VolumeFull(FetchError):
    """The missing files do not fit on the volume."""

    exit_code = VOLUME_FULL


class Interrupted(FetchError):
    """The source did not respond, or not completely; a retry may work."""


def connection_error(message: str) -> FetchError:
    """Return the error of a failed connection: a retry may work, unless the certificate is not trusted."""
    if "CERTIFICATE_VERIFY_FAILED" in message:
        remedy = "set SSL_CERT_FILE and AWS_CA_BUNDLE to a file with the certificate authorities to trust"
        return FetchError(f"{message}: {remedy} (egress.caBundle in the operator's chart)")
    return Interrupted(message)


def settings_error(what: str, error: Exception, *prefixes: str, otherwise: str = "") -> FetchError:
    """Return the error of a library that cannot use a value of its environment variables, which have these prefixes.

    Libraries seldom say which variable: it is one whose value their error quotes. `otherwise` is the remedy if there is
    none.
    """
    text = str(error).rstrip(".")
    names = [name for name, value in sorted(os.environ.items()) if name.startswith(prefixes) and value]
    if any(name in text for name in names):
        return FetchError(f"{what}: {text}")
    quoted = [name for name in names if _quotes(text, os.environ[name])]
    remedy = f"correct {' or '.join(quoted)}" if quoted else otherwise
    return FetchError(f"{what}: {text}: {remedy}" if remedy else f"{what}: {text}")


def _quotes(text: str, value: str) -> bool:
    """Return whether a text has a value other than as a part of a longer word or address."""
    return re.search(rf"(?<![\w.-]){re.escape(value)}(?![\w-]|\.\w)", text) is not None

"""Models in an object store: `s3://bucket/prefix`, or `s3://bucket/path/file.gguf` for one file.

Environment variables of boto3 apply: AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and others. Without credentials,
requests are anonymous.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any, Final

import boto3
import botocore
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    HTTPClientError,
    IncompleteReadError,
    PartialCredentialsError,
    ResponseStreamingError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError

from fastgen.fetch.errors import (
    AccessDenied,
    FetchError,
    Interrupted,
    SourceNotFound,
    connection_error,
    settings_error,
)
from fastgen.fetch.remote import Listing, RemoteFile, select_model

# Bytes per chunk. A broken connection loses those of an incomplete chunk.
_CHUNK = 1 << 16
_CUTS: Final = (
    BotoConnectionError,
    ConnectionClosedError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
)
_MISSING: Final = ("NoSuchBucket", "NoSuchKey")
_REFUSED: Final = ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken")
_CHANGED: Final = "PreconditionFailed"
_CREDENTIALS: Final = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class S3Remote:
    """A prefix of a bucket, or one object in it.

    Args:
        key: key of one object if it ends with .gguf, otherwise a prefix.
        timeout: seconds without a byte after which a connection counts as broken.

    Raises:
        FetchError: if a variable or file of boto3's configuration has a value that cannot be used.
    """

    def __init__(self, bucket: str, key: str, timeout: float) -> None:
        self._bucket, self._key = bucket, key.strip("/")
        self._source = f"s3://{self._bucket}/{self._key}"
        for name in _CREDENTIALS:  # boto3 would show it in its error
            value = os.environ.get(name, "")
            if not (value.isascii() and value.isprintable()):
                words = "contains a line break or another character that is not printable ASCII: correct it"
                raise AccessDenied(f"{self._source}: {name} {words}")
        with _plain_errors(self._source, "correct the variables AWS_* and the files that they name"):
            self._s3 = _client(timeout)

    def list(self) -> Listing:
        """See `RemoteFiles.list`."""
        source = self._source
        with _plain_errors(source):
            if self._key.endswith(".gguf"):
                return Listing("", (self._look_at(self._key),))
            pages = self._s3.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=f"{self._key}/", Delimiter="/"
            )
            objects = [entry for page in pages for entry in page.get("Contents", ()) if not entry["Key"].endswith("/")]
        if not objects:
            raise SourceNotFound(f"{source}: no objects directly below it: give the folder of the model's files")
        files = (RemoteFile(entry["Key"], entry["Size"], entry["ETag"]) for entry in objects)
        return Listing("", select_model(source, files))

    def _look_at(self, key: str) -> RemoteFile:
        # Not HEAD, whose response has no body to explain an error; not a list, which needs another permission.
        found = self._s3.get_object(Bucket=self._bucket, Key=key, Range="bytes=0-0")
        found["Body"].close()
        return RemoteFile(key, int(found["ContentRange"].rpartition("/")[2]), found["ETag"])

    @contextmanager
    def read(self, file: RemoteFile, start: int) -> Iterator[Iterator[bytes]]:
        """See `RemoteFiles.read`."""
        with _plain_errors(f"s3://{self._bucket}/{file.path}"):
            answer = self._s3.get_object(Bucket=self._bucket, Key=file.path, Range=f"bytes={start}-", IfMatch=file.tag)
            # Its own context manager exposes the wrapped stream, which raises less specific errors.
            with closing(answer["Body"]) as body:
                yield body.iter_chunks(_CHUNK)


def _client(timeout: float) -> Any:
    session = boto3.Session()
    custom = any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"))
    settings: dict[str, Any] = {
        "connect_timeout": min(timeout, 10.0),
        "read_timeout": timeout,
        # Retries are counted in one place, which knows about progress.
        "retries": {"total_max_attempts": 1},
        # Some other stores support neither virtual-hosted buckets nor Amazon's newest checksums.
        "s3": {"addressing_style": "path" if custom else "auto"},
        "response_checksum_validation": "when_required",
    }
    if session.get_credentials() is None:
        settings["signature_version"] = botocore.UNSIGNED
    region = session.region_name or os.environ.get("AWS_REGION") or "us-east-1"
    return session.client("s3", region_name=region, config=Config(**settings))


@contextmanager
def _plain_errors(what: str, remedy: str = "") -> Iterator[None]:
    """Raise the library's errors as FetchErrors; `remedy` is for those of settings that name no variable."""
    try:
        yield
    except ClientError as error:
        raise _of_answer(what, error) from None
    except _CUTS as error:
        raise connection_error(f"{what}: {error}") from None
    except PartialCredentialsError as error:
        raise AccessDenied(f"{what}: {error}: set both keys, or neither") from None
    except (BotoCoreError, ValueError) as error:
        raise settings_error(what, error, "AWS_", otherwise=remedy) from None


def _of_answer(what: str, error: ClientError) -> FetchError:
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    message = f"{what}: {code}: {error.response.get('Error', {}).get('Message', 'no message')}"
    if code in _MISSING:
        return SourceNotFound(f"{what}: {'no such bucket' if code == 'NoSuchBucket' else 'no such object'}")
    # Some stores report an unknown key as not found, others as denied.
    if code in _REFUSED or status in (401, 403, 404):
        return AccessDenied(f"{message}: check the name, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if code == _CHANGED:
        return FetchError(f"{what}: changed during the download: start it again")
    return Interrupted(message) if status >= 500 or status in (408, 429) else FetchError(message)

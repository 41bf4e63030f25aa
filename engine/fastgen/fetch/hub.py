"""Models on a hub: `hf://owner/name`, or `hf://owner/name/path/file.gguf` for one file.

Environment variables of huggingface_hub apply: HF_ENDPOINT, HF_TOKEN. After a restart of the process, its download
function starts an interrupted file from the beginning, so only its listing and its sessions are used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,  # the transport's error, under a name that is independent of the transport
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from fastgen.fetch.errors import (
    AccessDenied,
    FetchError,
    Interrupted,
    SourceNotFound,
    connection_error,
    settings_error,
)
from fastgen.fetch.remote import Listing, RemoteFile, select_model

_TRANSIENT = (408, 429, 500, 502, 503, 504)


class HubRemote:
    """A repository at one revision; the listing pins the commit for all reads.

    Args:
        file: path of the only file to download; None for the model in the repository's root folder.
        timeout: seconds without a byte after which a connection counts as broken.
    """

    def __init__(self, repository: str, file: str | None, revision: str, timeout: float) -> None:
        self._repository, self._file, self._revision, self._timeout = repository, file, revision, timeout
        self._commit = revision

    def list(self) -> Listing:
        """See `RemoteFiles.list`."""
        if not constants.ENDPOINT.startswith(("http://", "https://")):
            raise FetchError(f"{self._named()}: HF_ENDPOINT must begin with https:// or http://: correct it")
        with _settings_errors(self._named()), _plain_errors(self._named()):
            info = huggingface_hub.HfApi().model_info(
                self._repository, revision=self._revision, files_metadata=True, timeout=self._timeout
            )
        self._commit = info.sha or self._revision
        files = tuple(
            RemoteFile(
                path=sibling.rfilename,
                size=sibling.size or 0,
                tag=(sibling.lfs.sha256 if sibling.lfs else sibling.blob_id) or "",
                sha256=sibling.lfs.sha256 if sibling.lfs else None,
            )
            for sibling in info.siblings or ()
        )
        return Listing(self._commit, self._wanted(files))

    def _wanted(self, files: tuple[RemoteFile, ...]) -> tuple[RemoteFile, ...]:
        source = f"hf://{self._repository}"
        if self._file is None:
            return select_model(source, (file for file in files if len(PurePosixPath(file.path).parts) == 1))
        chosen = tuple(file for file in files if file.path == self._file)
        if not chosen:
            raise SourceNotFound(f"{source}: has no file {self._file} at revision {self._revision}")
        return chosen

    @contextmanager
    def read(self, file: RemoteFile, start: int) -> Iterator[Iterator[bytes]]:
        """See `RemoteFiles.read`."""
        url = huggingface_hub.hf_hub_url(
            self._repository, file.path, revision=self._commit, endpoint=constants.ENDPOINT
        )
        # Compressed responses do not support ranges.
        headers = {**build_hf_headers(), "Accept-Encoding": "identity", "Range": f"bytes={start}-"}
        with (
            _plain_errors(f"{self._named()}: {file.path}"),
            huggingface_hub.get_session().stream("GET", url, headers=headers, timeout=self._timeout) as response,
        ):
            if not response.is_success:
                response.read()
            hf_raise_for_status(response)
            # Yield at once: collected bytes would be lost with the connection.
            chunks = response.iter_bytes()
            yield chunks if response.status_code == 206 else _without_first(start, chunks)

    def _named(self) -> str:
        return f"hf://{self._repository} at {constants.ENDPOINT}, revision {self._revision}"


def _without_first(count: int, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Drop the first bytes of a response from a server that ignores ranges."""
    for chunk in chunks:
        yield chunk[count:]
        count = max(0, count - len(chunk))


@contextmanager
def _plain_errors(what: str) -> Iterator[None]:
    try:
        yield
    except GatedRepoError:
        raise AccessDenied(
            f"{what}: gated: accept its terms on the hub, and set HF_TOKEN to a token of the account that did"
        ) from None
    except RevisionNotFoundError:
        raise SourceNotFound(f"{what}: no such revision") from None
    except RepositoryNotFoundError as error:
        # A hub returns the same error for both, so as not to reveal which repositories exist.
        hint = "that HF_TOKEN may read" if huggingface_hub.get_token() else "that may be read without HF_TOKEN"
        raise SourceNotFound(f"{what}: no such repository {hint} (HTTP {error.response.status_code})") from None
    except EntryNotFoundError:
        raise SourceNotFound(f"{what}: no such file") from None
    except DisabledRepoError:
        raise AccessDenied(f"{what}: the hub has disabled it") from None
    except HFValidationError as error:
        raise SourceNotFound(f"{what}: {error}") from None
    except HfHubHTTPError as error:
        raise _from_status(what, error) from None
    except HTTPError as error:
        raise connection_error(f"{what}: {str(error).strip() or type(error).__name__}") from None


@contextmanager
def _settings_errors(what: str) -> Iterator[None]:
    """Convert exceptions that are not FetchErrors yet; an invalid environment variable is their usual cause."""
    try:
        yield
    except FetchError:
        raise
    except Exception as error:
        prefixes = ("HF_", "SSL_", "HTTP", "http", "ALL_PROXY", "all_proxy")
        remedy = "correct HF_TOKEN, SSL_CERT_FILE, HTTPS_PROXY or another variable that is set"
        raise settings_error(what, error, *prefixes, otherwise=remedy) from None


def _from_status(what: str, error: HfHubHTTPError) -> FetchError:
    status = error.response.status_code
    if status in (401, 403):
        words = error.response.headers.get("X-Error-Message") or "refused"
        remedy = "check HF_TOKEN" if huggingface_hub.get_token() else "set HF_TOKEN"
        return AccessDenied(f"{what}: HTTP {status}: {words}: {remedy}")
    message = f"{what}: HTTP {status}"
    return Interrupted(message) if status in _TRANSIENT else FetchError(message)

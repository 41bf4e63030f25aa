"""Parse SOURCE as users write it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from fastgen.fetch.errors import FetchError, settings_error
from fastgen.fetch.remote import RemoteFiles

_HUB: Final = re.compile(r"hf://(?P<repository>[\w.-]+/[\w.-]+)(/(?P<file>\S+\.gguf))?", re.ASCII)
_S3: Final = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]+)/(?P<key>\S+)")
FORMS: Final = "hf://owner/name, hf://owner/name/file.gguf, s3://bucket/prefix or s3://bucket/file.gguf"
DEFAULT_REVISION: Final = "main"


class NotASource(FetchError):
    """The text is not a source that can be downloaded."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Source:
    """A model to download.

    Attributes:
        text: one of `FORMS`.
        revision: branch, tag or commit of a hub repository; other sources ignore it.
    """

    text: str
    revision: str = DEFAULT_REVISION

    def open(self, timeout: float) -> RemoteFiles:
        """Return the remote. After `timeout` seconds without a byte, a connection counts as broken.

        Raises:
            NotASource: the text has none of `FORMS`.
            FetchError: an environment variable of the source's library has a value that it cannot use.
        """
        # Each imports its own slow library.
        if (match := _HUB.fullmatch(self.text)) is not None:
            try:
                from fastgen.fetch.hub import HubRemote
            except ValueError as error:
                remedy = "correct HF_ENDPOINT or another variable HF_*"
                raise settings_error(self.text, error, "HF_", otherwise=remedy) from None

            return HubRemote(match["repository"], match["file"], self.revision, timeout)
        if (match := _S3.fullmatch(self.text)) is not None:
            from fastgen.fetch.s3 import S3Remote

            return S3Remote(match["bucket"], match["key"], timeout)
        raise NotASource(f"{self.text}: not a source of a model: give {FORMS}")

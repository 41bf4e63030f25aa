"""MODEL as a name on a hub: `organisation/name`, or `organisation/name@revision`.

Files go to huggingface_hub's own cache, and its own environment decides: HF_ENDPOINT, HF_TOKEN, HF_HOME,
HF_HUB_OFFLINE. What is in the cache is used where the hub cannot be reached.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fastgen.fetch.remote import WANTED
from fastgen.model import ModelError

_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_IN_FOLDERS = ["*/*"]


def hub_repository(model: str) -> str | None:
    """`organisation/name` of a MODEL that names nothing on disk and may be on a hub; else None."""
    match = _NAME.fullmatch(model)
    return None if match is None or Path(model).exists() else match["repository"]


def download(model: str) -> Path:
    """The directory of a hub's model, downloaded where it is not in the cache yet; progress goes to a terminal.

    Raises:
        ModelError: in one line, what is wrong and what to do.
    """
    # Imported here: a model on disk needs no hub.
    import huggingface_hub
    from huggingface_hub import constants, errors
    from huggingface_hub.utils.tqdm import disable_progress_bars

    match = _NAME.fullmatch(model)
    assert match is not None
    repository, revision = match["repository"], match["revision"]
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=list(WANTED), ignore_patterns=_IN_FOLDERS
        )
    except errors.GatedRepoError:
        raise ModelError(
            f"model {model}: gated: accept its terms at {constants.ENDPOINT}/{repository} and set HF_TOKEN to a token "
            "of that account"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"model {model}: {constants.ENDPOINT} has no such revision of {repository}") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"model {model}: neither a file or directory here nor a model at {constants.ENDPOINT} that "
            f"{'this HF_TOKEN' if huggingface_hub.get_token() else 'everybody'} may read: check the name, or set "
            "HF_TOKEN to a token that may"
        ) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise ModelError(f"model {model}: not here, and {reason}: give a path, or download it first") from None
    except OSError as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"model {model}: cannot be downloaded from {constants.ENDPOINT}: {reason}") from None
    return Path(folder)

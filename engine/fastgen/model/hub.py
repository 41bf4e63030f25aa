"""Download a model from a hub by name: `organisation/name` or `organisation/name@revision`.

Files are stored in huggingface_hub's cache, which is configured by HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE.
If the hub cannot be reached, a cached model is used.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fastgen.fetch.remote import WANTED
from fastgen.model import ModelError, first_line

_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_IN_FOLDERS = ["*/*"]


def hub_repository(model: str) -> str | None:
    """Return the `organisation/name` that `model` names on a hub; None for an existing path or other text.

    The hub is not asked whether it has the model.
    """
    match = _NAME.fullmatch(model)
    return None if match is None or Path(model).exists() else match["repository"]


def download_model(model: str) -> Path:
    """Return the directory of a model on the hub.

    Files that are not cached are downloaded, with progress bars on a terminal.

    Args:
        model: a name of which `hub_repository` returns the repository.

    Raises:
        ModelError: if the hub has no such model or revision, denies access, or cannot be reached and the model is not
            cached; if the download fails for another reason, or a variable HF_* is invalid.
    """
    # Imported here, because models on disk do not need it.
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ValueError as error:
        raise ModelError(f"model {model}: {first_line(error)}: correct HF_ENDPOINT or another variable HF_*") from None

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
            "of the account that accepted them"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"model {model}: {constants.ENDPOINT} has no such revision of {repository}") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"model {model}: no such file or directory, and no model at {constants.ENDPOINT} that "
            f"{'this HF_TOKEN can read' if huggingface_hub.get_token() else 'is public'}: check the name, or set "
            "HF_TOKEN to a token with access"
        ) from None
    except errors.HFValidationError as error:
        raise ModelError(f"model {model}: not a valid name of a model on a hub: {first_line(error)}") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise ModelError(f"model {model}: not cached, and {reason}: give a path, or download it first") from None
    except Exception as error:  # of the disk, the connection, or a variable that neither library checks
        raise ModelError(
            f"model {model}: cannot be downloaded from {constants.ENDPOINT}: {first_line(error)}"
        ) from None
    return Path(folder)

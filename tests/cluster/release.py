"""The previous release: its chart, and the tree from which the image of its operator is built.

Both come from this checkout's history, so a clone without it, or an archive of the source, has no previous release.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from cluster.images import CONTEXT, RECIPE, REPOSITORY, Tree

# The tag of the last release. There is none yet, so this is a commit: the last one before schedules, rate limits and
# dry runs of autoscaling, so its CRD and its operator differ from the present ones.
PREVIOUS = "36dbf973c7993c2d735b368c28dfbe0ac61015a5"
CHART = Path("charts", "fastgen")
# What the tags of its images begin with, so that they and those of the present tree do not replace each other.
PREFIX = "previous-"


class NotInHistoryError(RuntimeError):
    """The checkout does not contain the commit of the release."""


def extract(folder: Path, commit: str = PREVIOUS) -> Tree:
    """Write the release's chart and everything that its images are built from below `folder`.

    Paths of today's images that the release did not have yet are left out.

    Raises NotInHistoryError with git's reason.
    """
    try:
        listed = _git("ls-tree", "--name-only", commit, "--", *CONTEXT, *RECIPE, str(CHART)).decode().splitlines()
    except FileNotFoundError as error:
        raise NotInHistoryError("git is not installed") from error
    except subprocess.CalledProcessError as error:
        raise NotInHistoryError(f"no commit {commit} in this checkout: {error.stderr.decode().strip()}") from error
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", commit, *listed))) as tar:
        tar.extractall(folder, filter="data")
    return Tree(folder, PREFIX)


def _git(*arguments: str) -> bytes:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout

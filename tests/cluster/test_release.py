"""The previous release, out of the history of this checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster import images, release


def test_the_previous_release_is_taken_from_the_history(tmp_path: Path) -> None:
    try:
        tree = release.extract(tmp_path)
    except release.NotInHistoryError as error:
        pytest.skip(str(error))
    previous, present = images.image_name("operator", {}, tree), images.image_name("operator", {})
    assert previous.startswith("docker.io/library/fastgen-operator:previous-")
    assert not images.is_older_build(previous, present)
    assert not images.is_older_build(present, previous)
    crd = Path("templates", "crd.yaml")
    old, new = ((root / release.CHART / crd).read_text() for root in (tree.root, images.REPOSITORY))
    # A tag is the last release even while the CRD has not changed since.
    assert old != new or release.PREVIOUS.startswith("v"), (
        "the CRDs are equal, so an upgrade would not show that the CRD is upgraded"
    )


def test_a_checkout_without_the_commit_says_so(tmp_path: Path) -> None:
    with pytest.raises(release.NotInHistoryError, match=r"no commit 0{40} in this checkout: .+"):
        release.extract(tmp_path, "0" * 40)


def test_what_the_previous_release_did_not_have_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a new folder would make the test of an upgrade skip itself."""
    monkeypatch.setattr(release, "CONTEXT", ("README.md", "of-tomorrow"))
    try:
        release.extract(tmp_path, "HEAD")
    except release.NotInHistoryError as error:
        pytest.skip(str(error))
    assert (tmp_path / "README.md").is_file()

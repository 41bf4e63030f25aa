"""After any failure a folder is complete or has no marker, and no byte is downloaded twice."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.fetch.running import names
from fastgen.fetch import download
from fastgen.fetch.download import fetch
from fastgen.fetch.errors import FetchError, Interrupted, SourceNotFound, VolumeFull
from fastgen.fetch.folder import ModelFolder
from fastgen.fetch.progress import Progress
from fastgen.fetch.remote import Listing, RemoteFile, RemoteFiles, select_model
from fastgen.fetch.source import Source
from fastgen.fetch.transfer import Retries

QUICK = Retries(sleep=lambda _: None)
CONTENTS = {"config.json": b"{}", "model.safetensors": b"weights" * 50, "empty.json": b""}


class Killed(BaseException):
    """Simulate the end of the process."""


@dataclass
class FakeRemote:
    """A source in memory that ends, or raises the result of `end`, after `cuts[0]` more bytes."""

    contents: dict[str, bytes] = field(default_factory=lambda: dict(CONTENTS))
    cuts: list[int] = field(default_factory=list)
    end: Callable[[], None] = lambda: None
    served: int = 0
    lists: int = 0

    def list(self) -> Listing:
        self.lists += 1
        return Listing("v1", tuple(file_of(name, content) for name, content in self.contents.items()))

    @contextmanager
    def read(self, file: RemoteFile, start: int) -> Iterator[Iterator[bytes]]:
        yield self._pieces(self.contents[file.path][start:])

    def _pieces(self, content: bytes) -> Iterator[bytes]:
        for at in range(0, len(content), 10):
            piece = content[at : at + 10]
            if self.cuts:
                self.cuts[0] -= len(piece)
                if self.cuts[0] < 0:
                    self.cuts.pop(0)
                    self.end()
                    return
            self.served += len(piece)
            yield piece


def file_of(name: str, content: bytes) -> RemoteFile:
    digest = hashlib.sha256(content).hexdigest()
    return RemoteFile(name, len(content), digest, digest)


@dataclass(frozen=True)
class FakeSource(Source):
    remote: RemoteFiles = field(default_factory=FakeRemote)

    def open(self, timeout: float) -> RemoteFiles:
        assert timeout > 0
        return self.remote


def run(remote: RemoteFiles, to: Path, *, retries: Retries = QUICK, keep: Sequence[str] | None = None) -> list[str]:
    said: list[str] = []
    fetch(FakeSource("hf://a/b", remote=remote), to, keep=keep, retries=retries, tell=said.append)
    return said


def whole(folder: Path, contents: dict[str, bytes]) -> bool:
    return {name: (folder / name).read_bytes() for name in names(folder)} == contents


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=6))
def test_a_download_killed_after_any_bytes_can_be_resumed(
    tmp_path_factory: pytest.TempPathFactory, kills: list[int]
) -> None:
    to, served = tmp_path_factory.mktemp("models") / "one", 0

    def die() -> None:
        raise Killed

    for after in [*kills, 10_000]:
        remote = FakeRemote(cuts=[after], end=die)
        try:
            run(remote, to)
        except Killed:
            assert not ModelFolder(to).is_complete()
        served += remote.served
        if ModelFolder(to).is_complete():
            break
    assert ModelFolder(to).is_complete()
    assert whole(to, CONTENTS)
    assert served == sum(map(len, CONTENTS.values())), "bytes were fetched twice"


@pytest.mark.parametrize("step", range(20))
def test_a_download_killed_at_any_write_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    count = 0
    real = Path.replace

    def dying(self: Path, target: Path) -> Path:
        nonlocal count
        count += 1
        if count == step // 2 + 1:
            if step % 2:
                real(self, target)
            raise Killed
        return real(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", dying)
        try:
            run(FakeRemote(), tmp_path / "one")
        except Killed:
            assert not ModelFolder(tmp_path / "one").is_complete() or step == 2 * count - 1
        else:
            assert step >= 2 * count
    run(FakeRemote(), tmp_path / "one")
    assert whole(tmp_path / "one", CONTENTS)


def test_a_source_without_progress_is_abandoned_after_a_bounded_number_of_attempts(tmp_path: Path) -> None:
    waits: list[float] = []
    remote = FakeRemote(cuts=[0] * 50)
    with pytest.raises(Interrupted, match="ended after 0 of"):
        run(remote, tmp_path / "one", retries=Retries(limit=5, sleep=waits.append))
    assert waits == [1, 2, 4, 8]


def test_a_source_with_some_progress_per_attempt_is_retried(tmp_path: Path) -> None:
    waits: list[float] = []
    run(FakeRemote(cuts=[15] * 30), tmp_path / "one", retries=Retries(limit=2, sleep=waits.append))
    assert whole(tmp_path / "one", CONTENTS)
    assert set(waits) == {1}


def test_a_file_with_a_wrong_checksum_or_size_is_deleted(tmp_path: Path) -> None:
    remote = FakeRemote(cuts=[100], end=lambda: (_ for _ in ()).throw(Killed))
    with pytest.raises(Killed):
        run(remote, tmp_path / "one")
    (part,) = (tmp_path / "one" / ".fastgen").glob("model*.part")
    part.write_bytes(b"?" * part.stat().st_size)
    with pytest.raises(FetchError, match="checksum"):
        run(FakeRemote(), tmp_path / "one")
    assert not part.exists()
    run(FakeRemote(), tmp_path / "one")
    assert whole(tmp_path / "one", CONTENTS)


def test_a_complete_folder_that_lost_a_file_is_completed(tmp_path: Path) -> None:
    run(FakeRemote(), tmp_path / "one")
    (tmp_path / "one" / "config.json").unlink()
    remote = FakeRemote()
    run(remote, tmp_path / "one")
    assert whole(tmp_path / "one", CONTENTS)
    assert remote.served == len(CONTENTS["config.json"])


def test_free_space_is_checked_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage)  # type: ignore[attr-defined]
    remote = FakeRemote()
    with pytest.raises(VolumeFull, match="needs 352 bytes more, but the volume has only 100 bytes free"):
        run(remote, tmp_path / "one")
    assert remote.served == 0


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_during_the_download_is_reported(tmp_path: Path, code: int) -> None:
    def full() -> None:
        raise OSError(code, "no room")

    with pytest.raises(VolumeFull, match=r"the volume of .*/one is full"):
        run(FakeRemote(cuts=[100], end=full), tmp_path / "one")
    assert not ModelFolder(tmp_path / "one").is_complete()


def test_a_write_error_gives_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FetchError, match=r"file.*: Not a directory"):
        run(FakeRemote(), tmp_path / "file" / "one")


def test_unused_models_are_evicted_and_other_folders_are_kept(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        run(FakeRemote(), tmp_path / name)
    (tmp_path / "mine").mkdir()
    said = run(FakeRemote(), tmp_path / "d", keep=["b"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "d", "mine"]
    assert [line for line in said if "removed" in line] == [
        f"removed the unused model folder {name}" for name in ("a", "c")
    ]
    assert run(FakeRemote(), tmp_path / "b") == [f"{tmp_path / 'b'} is complete"]


OFFERED = tuple(replace(file_of(name, b"x"), path=f"folder/{name}") for name in (*CONTENTS, "tokenizer.model", "a.py"))


def test_a_folder_without_weights_or_configuration_is_not_a_model() -> None:
    assert [file.name for file in select_model("s", OFFERED)] == [*CONTENTS, "tokenizer.model"]
    for missing in ("config.json", "model.safetensors"):
        rest = [file for file in OFFERED if file.name != missing]
        with pytest.raises(SourceNotFound, match="holds no"):
            select_model("s", rest)


ABSOLUTE = ("/config.json", "/", "")
UPWARDS = ("..", "a/..", "../config.json", "a/../config.json")
NAMELESS = ("a/", ".", "a/.", "a\0.json", "\ud800.json")


@pytest.mark.parametrize("path", [*ABSOLUTE, *UPWARDS, *NAMELESS])
def test_a_path_that_names_no_file_of_the_source_is_rejected_by_name(path: str) -> None:
    with pytest.raises(FetchError, match="whose path cannot be used") as caught:
        file_of(path, b"x")
    assert str(caught.value).startswith(repr(path))
    assert str(caught.value).isprintable()


@given(st.text(alphabet=st.sampled_from(["a", ".", "/", "\\", "~", "\0", "\n", "é", "\ud800"]), max_size=8))
def test_no_file_is_written_outside_its_folder(path: str) -> None:
    try:
        file = file_of(path, b"x")
    except FetchError:
        return
    folder = Path("/models/one")
    assert Path(os.path.abspath(folder / file.name)).parent == folder
    assert Path(os.path.abspath(ModelFolder(folder).part(file))).parent == folder / ".fastgen"
    os.fsencode(file.name)


@pytest.mark.parametrize("name", ["..", "a\0.json"])
def test_a_source_with_such_a_path_ends_with_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(FetchError, match="whose path cannot be used"):
        run(FakeRemote({**CONTENTS, f"models/{name}": b""}), tmp_path / "one")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_an_error_is_one_line_whatever_the_source_says() -> None:
    assert str(FetchError("s3://a: <\n\x1b[31m>")) == "s3://a: <\\n\\x1b[31m>"


def test_progress_is_logged_periodically() -> None:
    now, said = [0.0], list[str]()
    progress = Progress(4_000_000, 1_000_000, clock=lambda: now[0], tell=said.append)
    for second in range(11):
        now[0] = second
        progress.count(100_000)
    assert said == ["1.6 MB of 4.0 MB (40 %), 120.0 kB/s", "2.1 MB of 4.0 MB (52 %), 100.0 kB/s"]

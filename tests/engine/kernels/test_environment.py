"""Environment settings made before importing torch and numba, observed in separate processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fastgen.kernels.cpu import build, environment
from support.waiting import PATIENCE

PROBE = """
import json, os, sys
from fastgen.kernels.cpu import environment
environment.prepare()
print(json.dumps({name: os.environ.get(name) for name in
    ("NUMBA_CACHE_DIR", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "GOMP_SPINCOUNT")}))
assert "torch" not in sys.modules and "numba" not in sys.modules
"""

KERNEL = """
from fastgen.kernels.cpu.matmul.float32 import multiply
from fastgen.kernels.cpu.vector_width import TILE_COLUMNS
import numpy as np
out = np.empty((1, TILE_COLUMNS), np.float32)
multiply(np.array([[2, 3]], np.float32), np.ones((1, 2, TILE_COLUMNS), np.float32), out)
print(set(out[0].tolist()))
"""

INLINED = """
import numpy as np
from fastgen.kernels.cpu.jit import serial

@serial
def following(number):
    return number + np.float32(1)
"""

CALLER = """
import numpy as np
from fastgen.kernels.cpu.inlined import following
from fastgen.kernels.cpu.jit import kernel, prange

@kernel("void(f4[::1])")
def advance(numbers):
    for place in prange(len(numbers)):
        numbers[place] = following(numbers[place])

numbers = np.zeros(3, np.float32)
advance(numbers)
print(numbers.tolist())
"""

PRODUCTS = """
from fastgen.kernels.cpu import environment
environment.prepare()
import torch
from fastgen.model.layers.linear import OneDNNLinear

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

torch.set_grad_enabled(False)
products = [OneDNNLinear(torch.randn(64, width)) for width in (32, 64, 96, 128)]
for rows in range(1, 170):
    for product, width in zip(products, (32, 64, 96, 128)):
        product(torch.randn(rows, width))
    if rows == 33:
        settled = resident()
print(resident() - settled)
"""


def run(program: str, **settings: str) -> str:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "OMP", "GOMP", "XDG"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=kept | settings,
        capture_output=True,
        text=True,
        check=True,
        timeout=200 * PATIENCE,
    )
    return done.stdout


def test_user_settings_are_not_overridden(tmp_path: Path) -> None:
    out = run(PROBE, OMP_NUM_THREADS="7", GOMP_SPINCOUNT="5", NUMBA_CACHE_DIR=str(tmp_path / "mine"))
    assert '"OMP_NUM_THREADS": "7"' in out
    assert '"GOMP_SPINCOUNT": "5"' in out
    assert f'"NUMBA_CACHE_DIR": "{tmp_path}/mine"' in out


def test_threads_are_the_usable_cpus(tmp_path: Path) -> None:
    out = run(PROBE, XDG_CACHE_HOME=str(tmp_path))
    assert f'"NUMBA_NUM_THREADS": "{environment.usable_cpus()}"' in out
    assert f'"NUMBA_CACHE_DIR": "{tmp_path}/fastgen/kernels/' in out


def test_the_kernel_cache_is_keyed_by_the_code_of_all_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, settings = Path(environment.__file__).parent, {"XDG_CACHE_HOME": str(tmp_path)}
    changed = tmp_path / "code" / "fastgen" / "kernels" / "cpu"
    shutil.copytree(kernels.parents[1], changed.parents[1])
    folders = [json.loads(run(PROBE, **settings))["NUMBA_CACHE_DIR"]]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "code"))
    folders.append(json.loads(run(PROBE, **settings))["NUMBA_CACHE_DIR"])
    imported = changed / "matmul" / "tile.py"
    imported.write_text(imported.read_text() + "\n")
    folders.append(json.loads(run(PROBE, **settings))["NUMBA_CACHE_DIR"])
    assert folders[0] == folders[1] != folders[2]


@pytest.mark.slow
def test_copies_of_the_code_share_kernels_until_any_module_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(name: str, modified: float) -> Path:
        package = tmp_path / name / "fastgen"
        shutil.copytree(Path(environment.__file__).parents[2], package)
        (package / "kernels" / "cpu" / "inlined.py").write_text(INLINED)
        (package / "kernels" / "cpu" / "caller.py").write_text(CALLER)
        for path in package.rglob("*.py"):
            os.utime(path, (modified, modified))
        return package.parent

    def advanced(code: Path) -> str:
        monkeypatch.setenv("PYTHONPATH", str(code))
        return run("import fastgen.kernels.cpu.caller", NUMBA_CACHE_DIR=str(cache))

    def files() -> dict[Path, int]:
        return {path: path.stat().st_ino for path in cache.rglob("*.nb?")}

    cache, first, second = tmp_path / "cache", copied("first", 1e9), copied("second", 1.1e9)
    assert advanced(first) == "[1.0, 1.0, 1.0]\n"
    compiled = files()
    assert compiled
    assert advanced(second) == "[1.0, 1.0, 1.0]\n"
    assert advanced(first) == "[1.0, 1.0, 1.0]\n"
    assert files() == compiled, "a copy compiled again"
    inlined = second / "fastgen" / "kernels" / "cpu" / "inlined.py"
    inlined.write_text(inlined.read_text().replace("(1)", "(2)"))
    assert advanced(second) == "[2.0, 2.0, 2.0]\n", "the kernel has the old code of a function that it inlines"


def test_read_only_folders_are_skipped() -> None:
    nowhere = "/proc/nowhere"
    out = run(PROBE, NUMBA_CACHE_DIR=nowhere, XDG_CACHE_HOME=nowhere, TMPDIR=nowhere)
    # The system's temporary folder is the last resort.
    assert nowhere not in out


@pytest.mark.parametrize("given", ["", "mine", "/proc/nowhere"])
def test_a_folder_that_the_user_set_is_used_or_named_in_a_warning(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / given) if given else "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(environment.PREBUILT, raising=False)
    environment._choose_cache_folder()
    assert (os.environ["NUMBA_CACHE_DIR"] == str(tmp_path / "mine")) == (given == "mine")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"NUMBA_CACHE_DIR is {given}" for _ in range(given == "/proc/nowhere")
    ]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give folders away and become another user")
@pytest.mark.parametrize(
    ("owner", "mode", "user", "is_usable"),
    [
        (0, 0o755, 0, True),
        (1001, 0o755, 1001, True),
        (1001, 0o755, 0, False),  # root may write anywhere
        (1002, 0o775, 1001, False),
        (0, 0o775, 1001, True),  # a volume of a pod with a group
        (0, 0o777, 1001, False),
        (0, 0o755, 1001, False),
    ],
)
def test_code_is_cached_only_where_no_other_user_can_put_any(
    owner: int, mode: int, user: int, *, is_usable: bool
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # pytest's folders are closed to other users
        os.chown(name, owner, 2000)
        Path(name).chmod(mode)
        pid = os.fork()
        if not pid:
            try:
                os.setgroups([2000])
                os.setuid(user)
                os._exit(environment._is_usable(Path(name)))
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == is_usable


def test_a_folder_that_does_not_exist_is_created(tmp_path: Path) -> None:
    assert environment._is_usable(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.slow
def test_prebuilt_kernels_are_copied_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a copy of the code too: another environment or clone, or the same folder mounted into a pod."""
    prebuilt, cache, code = tmp_path / "prebuilt", tmp_path / "cache", tmp_path / "code"
    modules = ["matmul.float32"]  # all that KERNEL needs; the others take a minute
    command = [sys.executable, "-m", "fastgen.kernels.cpu.build", str(prebuilt), *modules]
    subprocess.run(command, check=True, timeout=250 * PATIENCE, capture_output=True)
    assert build.is_built(prebuilt, modules)
    assert not build.is_built(prebuilt), "modules that were not compiled count as built"
    assert not build.is_built(cache, modules)
    before = {path.relative_to(prebuilt) for path in prebuilt.rglob("*.nb?")}
    shutil.copytree(Path(environment.__file__).parents[2], code / "fastgen")
    out = run(KERNEL, NUMBA_CACHE_DIR=str(cache), FASTGEN_KERNEL_CACHE=str(prebuilt), PYTHONPATH=str(code))
    assert out == "{5.0}\n"
    assert build.is_built(cache, modules)
    # Nothing was compiled: numba would have added files.
    assert {path.relative_to(cache) for path in cache.rglob("*.nb?")} == before
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(cache))
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.delitem(sys.modules, "numba")
    assert build.start(modules) == []


def test_copying_prebuilt_kernels_never_replaces_a_file(tmp_path: Path) -> None:
    prebuilt, cache = tmp_path / "prebuilt", tmp_path / "cache"
    for folder, text in ((prebuilt, "theirs"), (cache, "ours")):
        (folder / "kernels").mkdir(parents=True)
        (folder / "kernels" / "a.nbi").write_text(text)
    (prebuilt / "kernels" / "b.nbc").write_text("theirs")
    assert environment.seed(prebuilt, cache) == 1
    assert (cache / "kernels" / "a.nbi").read_text() == "ours"
    assert (cache / "kernels" / "b.nbc").read_text() == "theirs"


def test_a_missing_prebuilt_folder_is_ignored(tmp_path: Path) -> None:
    assert environment.seed(tmp_path / "missing", tmp_path) == 0


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_step_sizes() -> None:
    """Runs 544 more products: 300 MiB if each were cached."""
    assert int(run(PRODUCTS)) < 60 << 20

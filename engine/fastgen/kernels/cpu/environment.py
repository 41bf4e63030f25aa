"""Process-wide settings that numba, OpenMP, torch and oneDNN read once.

Call `prepare` before importing torch and numba. It keeps variables that the user has set, except a NUMBA_CACHE_DIR that
cannot be written to or that another user could fill.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREBUILT = "FASTGEN_KERNEL_CACHE"  # folder of kernels compiled ahead of time, for example in an image
_SPINS = "5000"
_PRODUCTS_KEPT = "128"
_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu")

log = logging.getLogger("fastgen.kernels")


def usable_cpus() -> int:
    """Return the number of CPUs this process may use: its affinity, limited to the CPU quota rounded up."""
    allowed = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _cpu_quota() -> float | None:
    """Return the container's CPU quota in CPUs (cgroup v2 or v1), or None without a quota."""
    try:
        if _CGROUP_V2.exists():
            limit, period = _CGROUP_V2.read_text().split()[:2]
            return None if limit == "max" else int(limit) / int(period)
        limit = (_CGROUP_V1 / "cpu.cfs_quota_us").read_text()
        period = (_CGROUP_V1 / "cpu.cfs_period_us").read_text()
        return None if int(limit) <= 0 else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def prepare() -> None:
    """Set threads, vector width and the folder of compiled kernels in the environment.

    * Threads: torch and numba (threading layer `omp`) share one OpenMP pool, so both get the same count. numba gets it
      explicitly, because it would count one CPU if threads are bound to cores.
    * Spinning: a forward pass has hundreds of parallel regions. libgomp's threads spin for milliseconds at the end of
      each. On a busy machine, a spinning thread keeps the thread it waits for off the core, and steps take ten times as
      long. A short spin bridges the Python code between two regions. Measured (two cores, 64 rows): 0.20 s at 5000
      spins, 0.27 s at 1000; with another busy process 0.50, 0.43 and, at 20000, 0.79 s.
    * Products: oneDNN generates code for each number of rows, and torch and oneDNN each cache the last 1024 of them at
      0.65 MiB apiece by default: two thirds of a GiB that fill up slowly. Both get 128. Generating one takes 0.8 ms.
    * Vector width: LLVM prefers 256-bit vectors even where 512-bit vectors are faster for these kernels.
    """
    threads = str(usable_cpus())
    os.environ.setdefault("OMP_NUM_THREADS", threads)
    os.environ.setdefault("NUMBA_NUM_THREADS", threads)
    for cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(cache, _PRODUCTS_KEPT)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)
    if "numba" not in sys.modules:
        _prefer_wide_vectors()
        _choose_cache_folder()


def _prefer_wide_vectors() -> None:
    if os.environ.keys() & {"NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"}:
        return
    from llvmlite import binding  # type: ignore[import-untyped]

    features = binding.get_host_cpu_features()
    if features.get("avx512f"):
        os.environ["NUMBA_CPU_NAME"] = binding.get_host_cpu_name()
        os.environ["NUMBA_CPU_FEATURES"] = features.flatten() + ",-prefer-256-bit"


def _choose_cache_folder() -> None:
    """Point numba at a usable cache folder and fill it from the prebuilt one.

    Without a usable folder nothing is cached: each process compiles its kernels.
    """
    folder = next((path for path in _cache_candidates() if _is_usable(path)), None)
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given and folder != Path(given):
        log.warning("NUMBA_CACHE_DIR is %s: not used, because it is not writable, or another user could fill it", given)
    if folder is None:
        os.environ.pop("NUMBA_CACHE_DIR", None)
        return
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    prebuilt = os.environ.get(PREBUILT)
    if prebuilt:
        seed(Path(prebuilt), folder)


def _cache_candidates() -> Iterator[Path]:
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        yield Path(given)
    home, version = os.environ.get("XDG_CACHE_HOME"), source_digest()
    if home:
        yield Path(home) / "fastgen" / "kernels" / version
    elif os.environ.get("HOME"):
        yield Path(os.environ["HOME"]) / ".cache" / "fastgen" / "kernels" / version
    yield Path(tempfile.gettempdir()) / f"fastgen-kernels-{os.getuid()}-{version}"


def source_digest() -> str:
    """Return a digest of the source of all CPU kernels."""
    sources = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def _is_usable(folder: Path) -> bool:
    """Return whether a folder may hold compiled code. Create it if it does not exist.

    It must be writable, and this user's, or root's and not world-writable, because numba executes what it finds there.
    Another user may have made a folder in the temporary folder first, and root could write to that, too.
    """
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() or (status.st_uid == 0 and not status.st_mode & 0o002)


def seed(prebuilt: Path, folder: Path) -> int:
    """Copy compiled kernels that `folder` lacks from `prebuilt`, except unreadable files; return the number copied.

    numba's keys contain the source's hash, the CPU's name and its features, so foreign or stale files are never used.
    """
    copied = 0
    files = [*prebuilt.glob("*/*.nb[ic]"), *prebuilt.glob("built-*")] if prebuilt.is_dir() else []
    for file in sorted(files, key=lambda file: file.name.startswith("built-")):  # markers of complete modules last
        target = folder / file.relative_to(prebuilt)
        if target.exists():
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            partial = target.with_name(f"{target.name}.{os.getpid()}")
            shutil.copyfile(file, partial)
            partial.replace(target)
            copied += 1
        except OSError:
            continue
    return copied

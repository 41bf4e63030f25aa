"""Finds the Kubernetes programs on this machine, or builds them once from the Go module in kubernetes/.

All programs come from one folder, because programs of different versions do not work together. The first of these that
contains all of PROGRAMS is used:

1. `$KUBEBUILDER_ASSETS`, whatever its version, because it is explicit;
2. a folder of `$PATH` whose API server has the tested minor version;
3. the user's cache, by version and by a hash of the module's files;
4. otherwise they are built into that cache with Go, which takes minutes the first time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from cluster.caches import cache_folder
from cluster.commands import CommandError, print_to_stderr, run

KUBERNETES = "1.34.2"
HELM = "4.0.5"
LINKED = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
    "helm",
)
PROGRAMS = (*LINKED, "pause", "coredns")
MODULE = Path(__file__).parent / "kubernetes"
_PACKAGES = (".", "./pause", "./coredns")
# Go names the program of "." after the module.
_MAIN = "testbed"

Say = Callable[[str], None]


def ensure_programs(say: Say = print_to_stderr) -> Path:
    """Return a folder that contains all of PROGRAMS. Build them if there is none.

    Raises RuntimeError, naming what is missing, if the build is necessary and fails.
    """
    for folder in candidates(os.environ):
        if is_complete(folder):
            return folder
        say(f"{folder} ($KUBEBUILDER_ASSETS) is ignored: it lacks {', '.join(missing(folder))}")
    cached = programs_folder(os.environ)
    if is_complete(cached):
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    with _only_builder(cached.with_name(f"{cached.name}.lock"), say):
        if not is_complete(cached):
            _build(cached, say)
    return cached


def candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield folders outside the cache, in order of preference."""
    if assets := environment.get("KUBEBUILDER_ASSETS"):
        yield Path(assets)
    for entry in environment.get("PATH", "").split(os.pathsep):
        folder = Path(entry)
        if entry and is_complete(folder) and _is_tested_version(folder):
            yield folder


def missing(folder: Path) -> list[str]:
    """Return those of PROGRAMS that are not in the folder or not executable."""
    return [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]


def is_complete(folder: Path) -> bool:
    """Return whether the folder contains all of PROGRAMS."""
    return not missing(folder)


def programs_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder in the user's cache for this module. Its name changes with the module's files."""
    digest = hashlib.sha256(linker_flags().encode())
    for path in sorted(p for p in MODULE.rglob("*") if p.suffix in {".go", ".mod", ".sum"}):
        digest.update(f"\0{path.relative_to(MODULE)}\0".encode() + path.read_bytes())
    return cache_folder("kubernetes", environment) / f"{KUBERNETES}-{digest.hexdigest()[:12]}"


def linker_flags() -> str:
    """Return the linker flags that set the programs' versions.

    helm checks a chart's `kubeVersion` against its version, and kubectl warns about version skew.
    """
    major, minor, _ = KUBERNETES.split(".")
    settings = {"helm.sh/helm/v4/internal/version.version": f"v{HELM}"}
    for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
        settings |= {f"{package}.gitVersion": f"v{KUBERNETES}", f"{package}.gitMajor": major}
        settings |= {f"{package}.gitMinor": minor, f"{package}.gitCommit": "modules"}
    for prefix in ("pkg/chart/common.k8s", "pkg/chart/v2/lint/rules.k8s", "internal/version.kubeClient"):
        name = f"helm.sh/helm/v4/{prefix}Version"
        settings |= {f"{name}Major": major, f"{name}Minor": minor}
    return " ".join(["-s", "-w", *(f"-X {name}={value}" for name, value in settings.items())])


def _is_tested_version(folder: Path) -> bool:
    minor = KUBERNETES.rsplit(".", 1)[0]
    try:
        return f"v{minor}." in run([folder / "kube-apiserver", "--version"], timeout=20)
    except (CommandError, OSError, subprocess.TimeoutExpired):
        return False


@contextmanager
def _only_builder(lock: Path, say: Say) -> Iterator[None]:
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building the Kubernetes programs; waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _build(target: Path, say: Say) -> None:
    go = shutil.which("go")
    if go is None:
        raise RuntimeError(
            "go: not found; install Go 1.24 or later, or name a folder with all of " + ", ".join(PROGRAMS)
        )
    started = time.monotonic()
    say(f"building Kubernetes {KUBERNETES} from its Go modules (minutes the first time; cached in {target.parent})")
    folder = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        log = folder / "build.log"
        say("  fetching modules and listing packages")
        total = len(_go([go, "list", "-deps", *_PACKAGES], log).split())
        # Debug information is left out already by the compiler: the linker would only drop it. One command for all
        # programs, because nothing else could be compiled while the largest one is linked.
        flags = ["-v", "-trimpath", "-buildvcs=false", "-gcflags=all=-dwarf=false", f"-ldflags={linker_flags()}"]
        _go_with_progress(
            [go, "build", *flags, "-o", f"{folder}/", *_PACKAGES],
            log,
            lambda count: say(f"  {_seconds_since(started)} {progress_bar(count, total)}"),
        )
        (folder / _MAIN).rename(folder / "kubernetes")
        for name in LINKED:
            (folder / name).symlink_to("kubernetes")
        folder.chmod(0o755)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"  {_seconds_since(started)}: built")


def progress_bar(compiled: int, total: int, width: int = 30) -> str:
    """Return a bar of the packages compiled so far. Go compiles fewer than `total` if some are in its cache.

    The number is the one of packages, not a share of the time, which nobody knows: the largest program is linked at the
    end.
    """
    filled = min(width, width * compiled // max(1, total))
    return f"[{'#' * filled}{'.' * (width - filled)}] {compiled} of at most {total} packages compiled, then linked"


def _seconds_since(started: float) -> str:
    return f"{time.monotonic() - started:.0f} s"


def _go(command: list[str], log: Path) -> str:
    with log.open("ab") as errors:
        done = subprocess.run(
            command, cwd=MODULE, env=_go_environment(), stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
    _check(done.returncode, log)
    return done.stdout


def _go_with_progress(command: list[str], log: Path, say_count: Callable[[int], None]) -> None:
    """Run `go build -v`, which prints each compiled package, and report their number now and then."""
    with log.open("ab") as errors:
        process = subprocess.Popen(command, cwd=MODULE, env=_go_environment(), stderr=errors)
        try:
            while process.poll() is None:
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    say_count(_compiled(log))
        except BaseException:
            process.terminate()
            process.wait()
            raise
    _check(process.returncode, log)


def _compiled(log: Path) -> int:
    return sum(not line.startswith(("go: ", "#")) for line in log.read_text(errors="replace").splitlines())


def _check(status: int, log: Path) -> None:
    if status != 0:
        end = log.read_text(errors="replace")[-3000:]
        raise RuntimeError(f"the Kubernetes programs could not be built (Go 1.24 or later is required):\n{end}")


def _go_environment() -> dict[str, str]:
    # Static programs: the images of pause and coredns contain nothing else, and no C compiler is needed.
    return {**os.environ, "CGO_ENABLED": "0"}


if __name__ == "__main__":
    # It needs only the standard library, so it can run while the environment is installed.
    try:
        ensure_programs()
    except RuntimeError as failure:
        sys.exit(f"error: {failure}")

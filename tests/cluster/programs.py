"""Where the programs of Kubernetes come from: found on this machine, or built once from the Go module beside this file.

A set of programs is taken from one folder, because programs of unrelated versions do not make a cluster. The first of
these that holds all of PROGRAMS wins:

1. `$KUBEBUILDER_ASSETS`: named on purpose, so its version is not questioned;
2. a folder of `$PATH`, where its API server is of the minor version tested here (a lone kubectl is passed over);
3. the user's cache, by version and by a hash of the module's files;
4. else they are built into that cache with Go, which takes minutes the first time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

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

Say = Callable[[str], None]


def ensure_programs(say: Say = print_to_stderr) -> Path:
    """Returns a folder that holds all of PROGRAMS, building them where no such folder is found.

    Raises RuntimeError where they have to be built and cannot be; its text says what is missing.
    """
    for folder in candidates(os.environ):
        if is_complete(folder):
            return folder
        say(f"{folder} ($KUBEBUILDER_ASSETS) is passed over: it lacks {', '.join(missing(folder))}")
    cached = cache_folder(os.environ)
    if is_complete(cached):
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    with _only_builder(cached.with_name(f"{cached.name}.lock"), say):
        if not is_complete(cached):
            _build(cached, say)
    return cached


def candidates(environment: Mapping[str, str]) -> Iterator[Path]:
    """Folders that somebody else filled, in order of preference."""
    if assets := environment.get("KUBEBUILDER_ASSETS"):
        yield Path(assets)
    for entry in environment.get("PATH", "").split(os.pathsep):
        folder = Path(entry)
        if entry and is_complete(folder) and _is_tested_version(folder):
            yield folder


def missing(folder: Path) -> list[str]:
    """Those of PROGRAMS that are not in the folder, or cannot be run there."""
    return [name for name in PROGRAMS if not os.access(folder / name, os.X_OK)]


def is_complete(folder: Path) -> bool:
    """Whether every one of PROGRAMS is in the folder."""
    return not missing(folder)


def cache_folder(environment: Mapping[str, str]) -> Path:
    """The folder in the user's cache for exactly this module: its name changes with any of the module's files."""
    root = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(linker_flags().encode())
    for path in sorted(p for p in MODULE.rglob("*") if p.suffix in {".go", ".mod", ".sum"}):
        digest.update(f"\0{path.relative_to(MODULE)}\0".encode() + path.read_bytes())
    return root / "fastgen" / "kubernetes" / f"{KUBERNETES}-{digest.hexdigest()[:12]}"


def linker_flags() -> str:
    """The linker's settings: without these the programs do not know their own version.

    Charts judge their `kubeVersion` by what helm believes, and clients are warned by what kubectl says.
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
            say("another process is building the programs of Kubernetes; waiting for it")
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
        total = len(_go([go, "list", "-deps", ".", "./pause", "./coredns"], log).split())
        for name, package in (("kubernetes", "."), ("pause", "./pause"), ("coredns", "./coredns")):
            flags = ["-v", "-trimpath", "-buildvcs=false", "-ldflags", linker_flags(), "-o", str(folder / name)]
            _go_with_progress(
                [go, "build", *flags, package],
                log,
                lambda count: say(f"  {_seconds_since(started)}: {count} of at most {total} packages compiled"),
            )
        for name in LINKED:
            (folder / name).symlink_to("kubernetes")
        folder.chmod(0o755)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    say(f"  {_seconds_since(started)}: built")


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
    """Runs `go build -v`, which writes a line for each package it has compiled, and says their count now and then."""
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
        raise RuntimeError(f"the programs of Kubernetes could not be built (Go 1.24 or later is needed):\n{end}")


def _go_environment() -> dict[str, str]:
    # Static programs: pause and coredns are alone in their images, and a C compiler is not needed.
    return {**os.environ, "CGO_ENABLED": "0"}

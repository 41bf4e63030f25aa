"""The cluster that the tests and the demo use, whichever it is.

Chosen in this order: the one that $FASTGEN_KUBECONFIG names; one made by kind, where docker answers; else a node on
this machine, without docker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cluster import images, kind, standin
from cluster.archive import write
from cluster.commands import print_to_stderr, run
from cluster.node import Node, state_folder
from cluster.packages import ensure_packages
from cluster.programs import ensure_programs

Kind = Literal["external", "kind", "native"]
Say = Callable[[str], None]
DEMO = {"DEMO": "1"}
NOT_OURS = "push it to a registry that the cluster of FASTGEN_KUBECONFIG pulls from"
# Ending the programs does not need them, so that `down` works without a build.
UNUSED = Path("unused")


@dataclass(frozen=True)
class Bed:
    """A running cluster with the project's two images in it."""

    kind: Kind
    kubeconfig: Path
    programs: Path  # where kubectl and helm are
    engine_image: str
    operator_image: str

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        """Runs kubectl against this cluster and returns its stdout. Raises CommandError, whose text has its stderr."""
        return run([self.programs / "kubectl", f"--kubeconfig={self.kubeconfig}", *args], stdin=stdin)

    def helm(self, *args: str) -> str:
        """Runs helm against this cluster and returns its stdout. Raises CommandError, whose text has its stderr."""
        return run([self.programs / "helm", f"--kubeconfig={self.kubeconfig}", *args])

    def load_image(self, name: str, archive: Path) -> None:
        """Makes an image usable by pods under its name, out of a docker-archive that was saved under that name.

        Raises RuntimeError for a cluster that is not ours to load images into.
        """
        if self.kind == "external":
            raise RuntimeError(f"{name}: {NOT_OURS}")
        if self.kind == "kind":
            kind.load_archive(kind.ensure_kind(lambda _: None), archive)
        else:
            _node(self.programs).load(archive)

    def build_image(
        self, target: images.Target, build_args: Mapping[str, str] | None = None, say: Say = print_to_stderr
    ) -> str:
        """Builds a target of the Dockerfile, makes it usable by pods, and returns its name. Quick if that was done.

        Raises CommandError where it does not build, RuntimeError for a cluster that is not ours to load images into.
        """
        return _provide(self.kind, self.programs, target, build_args or {}, say)


def choose(environment: Mapping[str, str], docker: Callable[[], bool]) -> Kind:
    """Which kind of cluster it is to be."""
    if environment.get("FASTGEN_KUBECONFIG"):
        return "external"
    return "kind" if docker() else "native"


def open_bed(say: Say) -> Bed:
    """Starts what does not run, sees to it that both images are there, and returns the cluster.

    Raises RuntimeError, PermissionError or CommandError with the remedy, or the failing program's words.
    """
    which = choose(os.environ, kind.docker_answers)
    if which == "external":
        return _external(ensure_programs(say))
    if which == "kind":
        return _kind(ensure_programs(say), say)
    ensure_packages(say)
    return _native(ensure_programs(say), say)


def prepare_bed(say: Say) -> None:
    """Does what open_bed() would have to do first on a new machine, which takes minutes, and starts nothing.

    Raises what open_bed() raises.
    """
    ensure_programs(say)
    if choose(os.environ, kind.docker_answers) == "native":
        ensure_packages(say)
        standin.ensure_kernels(say)
        images.build("operator", {}, say)


def close_bed(say: Say) -> None:
    """Removes the cluster with everything in it; one that was not made here is left alone."""
    which = choose(os.environ, kind.docker_answers)
    if which == "kind":
        kind.down(kind.ensure_kind(say))
    elif which == "native" and state_folder().exists():
        Node(UNUSED, state_folder()).down()


def is_open() -> bool:
    """Whether the cluster runs already, so that opening it starts nothing."""
    which = choose(os.environ, kind.docker_answers)
    if which == "kind":
        return kind.CLUSTER in run([kind.ensure_kind(print_to_stderr), "get", "clusters"]).split()
    return which == "external" or Node(UNUSED, state_folder()).is_up()


def existing_bed(say: Say) -> Bed:
    """The cluster as it is, with nothing started or loaded. Raises RuntimeError where there is none."""
    which = choose(os.environ, kind.docker_answers)
    if which == "external":
        return _external(ensure_programs(say))
    kubeconfig = state_folder() / ("kind.kubeconfig" if which == "kind" else "admin.kubeconfig")
    if not is_open():
        raise RuntimeError("no cluster runs here; start it with `make up`")
    engine = standin.NAME if which == "native" else images.image_name("engine", DEMO)
    return Bed(which, kubeconfig, ensure_programs(say), engine, images.image_name("operator", {}))


def _external(programs: Path) -> Bed:
    kubeconfig = Path(os.environ["FASTGEN_KUBECONFIG"])
    if not kubeconfig.is_file():
        raise RuntimeError(f"FASTGEN_KUBECONFIG names {kubeconfig}, which is not a file")
    named = {name: os.environ.get(name, "") for name in ("FASTGEN_ENGINE_IMAGE", "FASTGEN_OPERATOR_IMAGE")}
    if missing := [name for name, value in named.items() if not value]:
        raise RuntimeError(f"set {' and '.join(missing)} to images that the cluster of FASTGEN_KUBECONFIG can pull")
    return Bed("external", kubeconfig, programs, *named.values())


def _kind(programs: Path, say: Say) -> Bed:
    kubeconfig = state_folder() / "kind.kubeconfig"
    kind.up(kind.ensure_kind(say), programs / "kubectl", kubeconfig, say)
    engine = _provide("kind", programs, "engine", DEMO, say)
    return Bed("kind", kubeconfig, programs, engine, _provide("kind", programs, "operator", {}, say))


def _native(programs: Path, say: Say) -> Bed:
    node = _node(programs)
    standin.ensure_kernels(say)
    node.up(say)
    # A few kilobytes, and its name does not say what is in it: loaded each time.
    archive = node.folder / "engine.tar"
    write(standin.image(), archive)
    node.load(archive)
    archive.unlink()
    return Bed("native", node.kubeconfig, programs, standin.NAME, _provide("native", programs, "operator", {}, say))


def _provide(which: Kind, programs: Path, target: images.Target, args: Mapping[str, str], say: Say) -> str:
    """Builds an image and makes it usable by pods; see Bed.build_image."""
    if which == "external":
        raise RuntimeError(f"the image of {target}: {NOT_OURS}")
    if which == "kind":
        name = images.build_with_docker(target, args, say)
        kind.load_image(kind.ensure_kind(say), name)
        return name
    node = _node(programs)
    if (name := images.image_name(target, args)) not in (present := node.containers.images()):
        name = images.build(target, args, say)
        say(f"loading {name}")
        with images.saved(name) as archive:
            node.load(archive)
        node.containers.remove_images(other for other in present if images.is_forerunner(other, target, name))
    return name


def _node(programs: Path) -> Node:
    return Node(programs, state_folder(), standin.mounts())

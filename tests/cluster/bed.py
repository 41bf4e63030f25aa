"""The cluster that the tests and the demo use.

In order of precedence: the cluster of $FASTGEN_KUBECONFIG; a kind cluster, if the docker daemon is reachable; otherwise
a node on this machine, without docker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from cluster import families, gpus, images, kind, standin
from cluster.archive import write
from cluster.caches import cache_folder
from cluster.commands import print_to_stderr, run
from cluster.node import Node, state_folder
from cluster.packages import ensure_packages
from cluster.programs import ensure_programs

Kind = Literal["external", "kind", "native"]
Say = Callable[[str], None]
DEMO = {"DEMO": "1"}
IN_DEMO: tuple[images.Target, ...] = ("operator", "gateway")  # the stand-in image has the engine of this tree
NOT_OURS = "push it to a registry that the cluster of FASTGEN_KUBECONFIG pulls from"
# Stopping processes does not need the programs, so `down` works without building them.
UNUSED = Path("unused")


@dataclass(frozen=True)
class Bed:
    """A running cluster with the project's two images loaded."""

    kind: Kind
    kubeconfig: Path
    programs: Path  # contains kubectl and helm
    engine_image: str
    operator_image: str

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        """Run kubectl against this cluster and return its stdout. Raises CommandError, which includes its stderr."""
        return run([self.programs / "kubectl", f"--kubeconfig={self.kubeconfig}", *args], stdin=stdin)

    def helm(self, *args: str) -> str:
        """Run helm against this cluster and return its stdout. Raises CommandError, which includes its stderr."""
        return run([self.programs / "helm", f"--kubeconfig={self.kubeconfig}", *args])

    def load_image(self, name: str, archive: Path) -> None:
        """Load a docker-archive into the cluster. It must have been saved under `name`.

        Raises RuntimeError for an external cluster.
        """
        if self.kind == "external":
            raise RuntimeError(f"{name}: {NOT_OURS}")
        if self.kind == "kind":
            kind.load_archive(kind.ensure_kind(lambda _: None), archive)
        else:
            _node(self.programs).load(archive)

    def build_image(
        self,
        target: images.Target,
        build_args: Mapping[str, str] | None = None,
        say: Say = print_to_stderr,
        tree: images.Tree = images.PRESENT,
    ) -> str:
        """Build a target of the Dockerfile if it is out of date, load it into the cluster and return its name.

        Raises CommandError if the build fails, RuntimeError for an external cluster.
        """
        return _provide(self.kind, self.programs, target, build_args or {}, say, tree)

    def rename_engine(self, tag: str) -> str:
        """Load the engine's image under another tag as well, as that of another release, and return its name.

        Raises RuntimeError unless this is the native cluster.
        """
        if self.kind != "native":
            raise RuntimeError("only the native cluster has an engine's image that can be loaded under another tag")
        name = f"{self.engine_image.rpartition(':')[0]}:{tag}"
        _load_standin(_node(self.programs), name)
        return name


def choose(environment: Mapping[str, str], docker: Callable[[], bool]) -> Kind:
    """Return the kind of cluster to use."""
    if environment.get("FASTGEN_KUBECONFIG"):
        return "external"
    return "kind" if docker() else "native"


def open_bed(say: Say) -> Bed:
    """Start the cluster if it does not run, load both images and return it.

    Raises RuntimeError, PermissionError or CommandError with the remedy or the failing program's output.
    """
    which = choose(os.environ, kind.docker_answers)
    if which == "external":
        return _external(ensure_programs(say))
    if which == "kind":
        return _kind(ensure_programs(say), say)
    ensure_packages(say)
    return _native(ensure_programs(say), say)


def prepare_bed(say: Say) -> None:
    """Do the work that open_bed() needs once per machine, without starting anything, except for the programs.

    Raises the errors of open_bed().
    """
    if choose(os.environ, kind.docker_answers) == "native":
        ensure_packages(say)
        standin.ensure_kernels(say)
        for target in IN_DEMO:
            images.build(target, {}, say)


def close_bed(say: Say) -> None:
    """Remove the cluster with everything in it. An external cluster is kept."""
    which = choose(os.environ, kind.docker_answers)
    if which == "kind":
        kind.down(kind.ensure_kind(say))
    elif which == "native" and state_folder().exists():
        Node(UNUSED, state_folder()).down()


def is_open() -> bool:
    """Return whether the cluster already runs."""
    which = choose(os.environ, kind.docker_answers)
    if which == "kind":
        return kind.CLUSTER in run([kind.ensure_kind(print_to_stderr), "get", "clusters"]).split()
    return which == "external" or Node(UNUSED, state_folder()).is_up()


def existing_bed(say: Say) -> Bed:
    """Return the running cluster without starting or loading anything. Raises RuntimeError if there is none."""
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
    gpus.switch_off()
    node.up(say)
    # Loaded each time: it has a few kilobytes, and its name does not depend on its content.
    _load_standin(node, standin.NAME)
    return Bed("native", node.kubeconfig, programs, standin.NAME, _provide("native", programs, "operator", {}, say))


def _load_standin(node: Node, name: str) -> None:
    archive = node.folder / "engine.tar"
    write(replace(standin.image(), name=name), archive)
    node.load(archive)
    archive.unlink()


def _provide(
    which: Kind,
    programs: Path,
    target: images.Target,
    args: Mapping[str, str],
    say: Say,
    tree: images.Tree = images.PRESENT,
) -> str:
    """Build an image and load it into the cluster; see Bed.build_image."""
    if which == "external":
        raise RuntimeError(f"the image of {target}: {NOT_OURS}")
    if which == "kind":
        name = images.build_with_docker(target, args, say, tree)
        kind.load_image(kind.ensure_kind(say), name)
        return name
    node = _node(programs)
    if (name := images.image_name(target, args, tree)) not in (present := node.containers.images()):
        name = images.build(target, args, say, tree)
        say(f"loading {name}")
        with images.saved(name) as archive:
            node.load(archive)
        node.containers.remove_images(other for other in present if images.is_older_build(other, name))
    return name


def _node(programs: Path) -> Node:
    # The engine's image has gigabytes, so loading it again for each cluster would take minutes.
    return Node(programs, state_folder(), standin.mounts(), cache_folder("containerd"), families.chosen())

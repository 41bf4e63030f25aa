"""Installs the chart into a control plane, and returns the operator's credentials."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cluster.commands import run
from cluster.controlplane import ControlPlane
from harness.probes import wait_policies
from support.manifests import dump_all, load_all
from support.namespace import Object

CHART = Path(__file__).parents[2] / "charts" / "fastgen"
CRD_CHART = CHART.with_name("fastgen-crds")
SYSTEM = "fastgen-system"
SERVICE_ACCOUNT = "fastgen-operator"
# Objects without a namespace, and those in namespaces that several releases share.
CLUSTER_NAME = f"{SYSTEM}.{SERVICE_ACCOUNT}"
EDIT_ROLE = f"{CLUSTER_NAME}-edit"


def install(plane: ControlPlane, *args: str, release: str = "fastgen") -> Object:
    """Apply the rendered chart without the operator's Deployment: the tests run the operator themselves.

    The API server has seen the admission policies when this returns.

    Returns:
        The Deployment.
    """
    rendered = Helm(plane.programs / "helm").render(*args, release=release)
    applied = [obj for obj in rendered if obj["kind"] != "Deployment"]
    (deployment,) = [obj for obj in rendered if obj["kind"] == "Deployment"]
    plane.kubectl("apply", "--server-side", "--filename", "-", stdin=dump_all(applied))
    wait_policies(plane)
    return deployment


def uninstall(plane: ControlPlane, *args: str, release: str) -> None:
    """Delete what `install` has applied. Its admission policies would judge the objects of later tests."""
    rendered = dump_all(Helm(plane.programs / "helm").render(*args, release=release))
    plane.kubectl("delete", "--ignore-not-found", "--wait=false", "--filename", "-", stdin=rendered)
    wait_policies(plane)


def operator_kubeconfig(plane: ControlPlane, name: str = SERVICE_ACCOUNT) -> Path:
    """Return a kubeconfig with credentials of the chart's service account."""
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{SYSTEM}"]
    return plane.kubeconfig_for(name, f"system:serviceaccount:{SYSTEM}:{name}", groups)


@dataclass(frozen=True)
class Helm:
    """Runs helm on this repository's chart."""

    program: Path

    def run(self, *args: str) -> str:
        """Run helm and return its stdout. Raises CommandError with its stderr."""
        return run([self.program, *args])

    def render(self, *args: str, release: str = "fastgen") -> list[Object]:
        """Return the rendered objects of the chart without its tests; `args` set values."""
        return self.render_with_tests("--skip-tests", *args, release=release)

    def tests(self, *args: str, release: str = "fastgen") -> list[Object]:
        """Return what `helm test` creates."""
        return [obj for obj in self.render_with_tests(*args, release=release) if _is_test(obj)]

    def render_with_tests(self, *args: str, release: str = "fastgen") -> list[Object]:
        """Return the rendered objects of the chart and of its tests."""
        return load_all(_rendered(self, release, args))

    def one(self, kind: str, *args: str) -> Object:
        """Return the only object of a kind."""
        (found,) = [obj for obj in self.render(*args) if obj["kind"] == kind]
        return found


@cache
def _rendered(helm: Helm, release: str, args: tuple[str, ...]) -> str:
    return helm.run("template", release, str(CHART), "--namespace", SYSTEM, *args)


def _is_test(obj: Object) -> bool:
    return bool(obj["metadata"].get("annotations", {}).get("helm.sh/hook") == "test")

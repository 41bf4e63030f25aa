"""What the chart puts into a control plane, and the credentials that it gives the operator."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from cluster.controlplane import ControlPlane

CHART = Path(__file__).parents[2] / "charts" / "fastgen"
SYSTEM = "fastgen-system"
SERVICE_ACCOUNT = "fastgen-operator"


def install(plane: ControlPlane, *args: str) -> None:
    """Applies what the chart renders, but for the operator's pod: the tests run the operator themselves."""
    rendered = subprocess.run(
        [plane.programs / "helm", "template", "fastgen", CHART, "--namespace", SYSTEM, *args],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    documents = re.split(r"^---$", rendered, flags=re.MULTILINE)
    wanted = [text for text in documents if "\nkind: Deployment\n" not in text]
    assert len(wanted) == len(documents) - 1
    plane.kubectl("apply", "--server-side", "--filename", "-", stdin="---\n".join(wanted))


def operator_kubeconfig(plane: ControlPlane, name: str = SERVICE_ACCOUNT) -> Path:
    """Credentials of the chart's service account."""
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{SYSTEM}"]
    return plane.kubeconfig_for(name, f"system:serviceaccount:{SYSTEM}:{name}", groups)

"""The operator's program for `support.forking`: the Kubernetes client reads $KUBECONFIG only when it is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kubernetes.config import kube_config

from fastgen_operator import main as operator


def main(arguments: Sequence[str]) -> None:
    """Run the operator with the kubeconfig of the environment."""
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = os.environ["KUBECONFIG"]
    operator.main(arguments)

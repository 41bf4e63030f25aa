"""The chart's test: apply, change, read and delete a FastGenDeployment without replicas.

python -m fastgen_operator.round_trip --namespace NAMESPACE --name NAME [--operator-class CLASS]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Final

from kubernetes.config import ConfigException

from fastgen_operator.kinds import FASTGEN, Object
from fastgen_operator.kube.transport import ApiServer, KubeError, connect
from fastgen_operator.metrics import Metrics

_REQUEST_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.5


class RoundTripFailed(Exception):
    """The resource did not get the expected status in time."""


def resource(namespace: str, name: str, operator_class: str | None) -> Object:
    """Return a FastGenDeployment that starts no pod."""
    spec: Object = {"model": {"source": "file:///models/none.gguf"}, "engine": {"device": "cpu"}, "replicas": 0}
    if operator_class is not None:
        spec["operatorClass"] = operator_class
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": FASTGEN.api_version, "kind": FASTGEN.name, "metadata": metadata, "spec": spec}


def wait_for_status(server: ApiServer, namespace: str, name: str, seconds: float) -> Object:
    """Return the resource once its status, with conditions, is of its current generation.

    Raises:
        KubeError: a request failed.
        RoundTripFailed: no such status was written within `seconds`.
    """
    for _ in range(int(seconds / _POLL_SECONDS)):
        found: Object = server.request("GET", FASTGEN.path(namespace, name))
        status: Object = found.get("status", {})
        if status.get("observedGeneration") == found["metadata"]["generation"] and status.get("conditions"):
            return found
        time.sleep(_POLL_SECONDS)
    raise RoundTripFailed(
        f"no operator has written the status of the current spec of FastGenDeployment {namespace}/{name} in "
        f"{seconds:g} s: check that an operator pod is ready, and that one handles this namespace and class"
    )


def round_trip(server: ApiServer, manifest: Object, seconds: float) -> Object:
    """Apply the resource, change it, and return it with the status of the change. Deletes it in any case.

    Raises:
        KubeError: a request failed.
        RoundTripFailed: the operator did not write the status within `seconds` of a write.
    """
    namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
    changed = {**manifest, "spec": {**manifest["spec"], "drainSeconds": 7}}
    path = FASTGEN.path(namespace, name)
    try:
        for version in (manifest, changed):
            server.request("PATCH", path, [("fieldManager", "fastgen-test")], version, "application/apply-patch+yaml")
            found = wait_for_status(server, namespace, name, seconds)
    finally:
        server.request("DELETE", path)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the test. Exits with code 1 and one line if it fails."""
    parser = argparse.ArgumentParser(prog="python -m fastgen_operator.round_trip", description="Test an installation.")
    parser.add_argument("--namespace", required=True, help="namespace of the resource")
    parser.add_argument("--name", required=True, help="name of the resource")
    parser.add_argument("--operator-class", help="class of the operator to test")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="time limit of each wait")
    chosen = parser.parse_args(arguments)
    manifest = resource(chosen.namespace, chosen.name, chosen.operator_class)
    try:
        found = round_trip(ApiServer(connect(), Metrics(), _REQUEST_SECONDS), manifest, chosen.seconds)
    except (ConfigException, KubeError, RoundTripFailed) as error:
        print(f"round trip: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    conditions = {condition["type"]: condition["reason"] for condition in found["status"]["conditions"]}
    print(f"{chosen.namespace}/{chosen.name}: applied, changed and read back: Ready: {conditions.get('Ready')}")


if __name__ == "__main__":
    main()

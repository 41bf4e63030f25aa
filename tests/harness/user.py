"""A user of a test cluster with few rights, and the API server's words about what the user asks for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from kubernetes.client import ApiClient, Configuration
from kubernetes.config import load_kube_config

from fastgen_operator.kinds import FASTGEN, Kind
from fastgen_operator.kube.transport import ApiServer, KubeError
from fastgen_operator.metrics import Metrics
from harness.chart import EDIT_ROLE
from harness.probes import wait_rights
from harness.space import Space, resource
from support.namespace import MERGE, Object

_RBAC = "rbac.authorization.k8s.io"


class User:
    """A user whose only rights in the namespace are the chart's edit role and further rules."""

    def __init__(self, space: Space, name: str, rules: Sequence[Object] = ()) -> None:
        self.space, self.name = space, f"{name}-{space.name}"
        metadata: Object = {"namespace": space.name}
        subjects = [{"apiGroup": _RBAC, "kind": "User", "name": self.name}]
        own = {"apiGroup": _RBAC, "kind": "Role", "name": name}
        edit = {"apiGroup": _RBAC, "kind": "ClusterRole", "name": EDIT_ROLE}
        role: Object = {"kind": "Role", "metadata": {**metadata, "name": name}, "rules": list(rules)}
        bindings: list[Object] = [
            {
                "kind": "RoleBinding",
                "metadata": {**metadata, "name": f"{name}{end}"},
                "roleRef": ref,
                "subjects": subjects,
            }
            for ref, end in ((own, ""), (edit, "-edit"))
        ]
        for obj in (role, *bindings):
            space.kubectl("create", "--filename", "-", stdin=json.dumps({"apiVersion": f"{_RBAC}/v1", **obj}))
        self.server = server_of(str(space.cluster.kubeconfig_for(self.name, self.name)))
        created: Object = {"apiGroups": [FASTGEN.group], "resources": [FASTGEN.plural], "verbs": ["create"]}
        wait_rights(self.server, space.name, [created, *rules])

    def refusal(self, **spec: Any) -> str:
        """Return the API server's words about a new resource, without creating it; empty if it is accepted."""
        return self.refusal_of(resource(**spec))

    def refusal_of(self, obj: Object) -> str:
        """Return the API server's words about a new resource, without creating it; empty if it is accepted."""
        return refusal(self.server, "POST", FASTGEN.path(self.space.name), obj, query=[("dryRun", "All")])

    def patch_refusal(self, patch: Object, subresource: str | None = None) -> str:
        """Return the API server's words about a patch of the resource `chat`, which it makes if it accepts it."""
        path = FASTGEN.path(self.space.name, "chat", subresource)
        return refusal(self.server, "PATCH", path, patch, content_type=MERGE)


def server_of(kubeconfig: str) -> ApiServer:
    """Return the API server as the user of a kubeconfig."""
    configuration = Configuration()
    load_kube_config(kubeconfig, client_configuration=configuration)  # type: ignore[no-untyped-call]
    return ApiServer(ApiClient(configuration), Metrics(), 30)


def refusal(
    server: ApiServer,
    method: str,
    path: str,
    body: Object | None = None,
    *,
    content_type: str = "application/json",
    query: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the API server's words if it answers 403, and an empty string if it accepts. Raises other KubeErrors."""
    try:
        server.request(method, path, list(query), body, content_type)
    except KubeError as error:
        if error.status != 403:
            raise
        return str(error)
    return ""


def create_refusal(server: ApiServer, kind: Kind, manifest: Object) -> str:
    """Return the API server's words about a new object, which it creates if it accepts it."""
    return refusal(server, "POST", kind.path(manifest["metadata"]["namespace"]), manifest)

"""Somebody with the operator's credentials, and what the API server says to manifests of theirs."""

from __future__ import annotations

import copy
from typing import Any

from cluster.controlplane import ControlPlane
from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, Kind
from fastgen_operator.kube.transport import ApiServer
from harness.chart import operator_kubeconfig
from harness.objects import manifests
from harness.probes import wait_rights
from harness.user import refusal, server_of
from support.namespace import Object

APPLY = "application/apply-patch+yaml"
# The last part of a path to a new item of a list.
END = object()


def thief_of(plane: ControlPlane) -> ApiServer:
    """Return a client of the API server that has the operator's credentials, and its rights."""
    server = server_of(str(operator_kubeconfig(plane)))
    wait_rights(server, "", [{"apiGroups": [FASTGEN.group], "resources": [FASTGEN.plural], "verbs": ["list"]}])
    return server


def children(owner: Object) -> dict[Kind, Object]:
    return dict(manifests(owner))


def deployment(owner: Object) -> Object:
    return children(owner)[DEPLOYMENT]


def changed(manifest: Object, path: tuple[Any, ...], value: Any) -> Object:
    """Return the manifest with one value replaced, or added to a list for END."""
    copied = copy.deepcopy(manifest)
    at: Any = copied
    for key in path[:-1]:
        at = at[key]
    if path[-1] is END:
        at.append(value)
    else:
        at[path[-1]] = value
    return copied


def dry(server: ApiServer, kind: Kind, manifest: Object) -> str:
    """Return the API server's words about an apply of the manifest, without making it; empty if it is accepted."""
    path = kind.path(manifest["metadata"]["namespace"], manifest["metadata"]["name"])
    query = [("fieldManager", "fastgen-operator"), ("force", "true"), ("dryRun", "All")]
    return refusal(server, "PATCH", path, manifest, content_type=APPLY, query=query)


POD_SPEC = ("spec", "template", "spec")
ENGINE = (*POD_SPEC, "containers", 0)

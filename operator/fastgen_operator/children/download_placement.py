"""Where a download may run: on nodes that could run a replica. Pure.

A StorageClass with volumeBindingMode WaitForFirstConsumer creates the volume where its first pod is scheduled, and that
pod is the download. The download needs no GPU, so the scheduler alone may choose a node, or a zone, that no replica can
use. Why the download does not simply request what a replica requests: docs/decisions/046.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from fastgen_operator.kinds import Object
from fastgen_operator.quantities import quantity

_HOST: Final = "kubernetes.io/hostname"
_REQUIRED: Final = "requiredDuringSchedulingIgnoredDuringExecution"
# More nodes do not help the scheduler to find one.
_MOST_NODES: Final = 200
# Prefix of the taints of nodes that are cordoned, not ready or under pressure.
_OF_NODES: Final = "node.kubernetes.io/"
_ZERO: Final = Decimal(0)


@dataclass(frozen=True, slots=True)
class Placement:
    """Additions to a download's pod. Without any, it runs wherever the scheduler puts it.

    Attributes:
        hosts: values of the label kubernetes.io/hostname of the nodes that it may run on; empty for all.
        tolerated: keys of taints to tolerate.
        requests: extended resources to request, by name.
    """

    hosts: tuple[str, ...] = ()
    tolerated: tuple[str, ...] = ()
    requests: Mapping[str, str] = field(default_factory=dict)

    def place(self, pod: Object) -> Object:
        """Return the pod's spec with the additions."""
        if self.hosts:
            pod = {**pod, "affinity": _on_hosts(pod.get("affinity") or {}, self.hosts)}
        if self.tolerated:
            more = [{"key": key, "operator": "Exists"} for key in self.tolerated]
            pod = {**pod, "tolerations": [*pod.get("tolerations", ()), *more]}
        if self.requests:
            first, *others = pod["containers"]
            given = first.get("resources", {})
            limits = {**given.get("limits", {}), **self.requests}
            pod = {**pod, "containers": [{**first, "resources": {**given, "limits": limits}}, *others]}
        return pod


ANYWHERE: Final = Placement()


def placement_of(replica: Object, nodes: Sequence[Object]) -> Placement:
    """Return where a replica with this pod spec can run.

    Nodes that the replica's node selector, node affinity or tolerations exclude do not count, nor those that are too
    small for it; what other pods use is ignored. A RuntimeClass adds tolerations, a node selector and an overhead to
    both pods alike, so the scheduler knows them. If there is no such node, taints named like an extended resource of
    the replica are tolerated. If there is still none, the download requests these resources: then an autoscaler of the
    cluster adds a node that has them.

    Args:
        nodes: all nodes; empty if they are unknown.
    """
    wanted = requests(replica)
    extended = {name: str(number) for name, number in wanted.items() if "/" in name}
    chosen = [node for node in nodes if _selects(replica, node)]
    # An admission plugin may let pods that request an extended resource tolerate the taint with its name:
    # kubernetes.io, "Admission Controllers", ExtendedResourceToleration.
    alternatives: tuple[tuple[str, ...], ...] = ((), tuple(sorted(extended)))
    for tolerated in alternatives:
        open_nodes = [node for node in chosen if _is_tolerated(replica, node, tolerated, extended)]
        fitting = [node for node in open_nodes if _has_room(node, wanted)]
        if fitting:
            hosts = () if len(fitting) == len(nodes) else tuple(sorted(map(_host, fitting)))[:_MOST_NODES]
            return Placement(hosts, tolerated)
    return Placement(requests=extended)


def may_run(pod: Object, node: Object, extended: Collection[str]) -> bool:
    """Return whether a node's labels and taints admit a pod that requests these extended resources.

    An admission plugin may let it tolerate the taints with their names, as in `placement_of`.
    """
    return _selects(pod, node) and _is_tolerated(pod, node, tuple(extended), extended)


def requests(pod: Object) -> dict[str, Decimal]:
    """Return what the scheduler counts for a pod: for each resource, the larger of two numbers.

    These are the sum over its containers and sidecars, and its largest init container.
    """
    sidecars = [each for each in pod.get("initContainers", ()) if each.get("restartPolicy") == "Always"]
    total: dict[str, Decimal] = {}
    for container in (*pod["containers"], *sidecars):
        for name, number in _requests_of(container).items():
            total[name] = total.get(name, _ZERO) + number
    for container in pod.get("initContainers", ()):
        for name, number in _requests_of(container).items():
            total[name] = max(total.get(name, _ZERO), number)
    return {name: number for name, number in total.items() if number}


def _requests_of(container: Object) -> dict[str, Decimal]:
    given = container.get("resources", {})
    both = {**given.get("limits", {}), **given.get("requests", {})}
    return {name: quantity(value) or _ZERO for name, value in both.items()}


def _has_room(node: Object, wanted: Mapping[str, Decimal]) -> bool:
    has = node.get("status", {}).get("allocatable", {})
    return all((quantity(has.get(name, 0)) or _ZERO) >= number for name, number in wanted.items())


def _selects(pod: Object, node: Object) -> bool:
    """Return whether the pod's node selector and required node affinity match the node."""
    labels = _labels(node)
    if not (pod.get("nodeSelector") or {}).items() <= labels.items():
        return False
    required = ((pod.get("affinity") or {}).get("nodeAffinity") or {}).get(_REQUIRED)
    if required is None:
        return True
    fields = {"metadata.name": node["metadata"]["name"]}
    return any(
        _meets(term.get("matchExpressions", ()), labels) and _meets(term.get("matchFields", ()), fields)
        for term in required.get("nodeSelectorTerms", ())
        if term.get("matchExpressions") or term.get("matchFields")
    )


def _meets(requirements: Iterable[Mapping[str, Any]], labels: Mapping[str, str]) -> bool:
    return all(_is_met(each, labels.get(each["key"])) for each in requirements)


def _is_met(requirement: Mapping[str, Any], value: str | None) -> bool:
    """Return whether a label's value meets a node selector requirement; None stands for a missing label."""
    values: Sequence[str] = requirement.get("values") or ()
    match requirement["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                left, right = int(value or ""), int(values[0])
            except (ValueError, IndexError):
                return False
            return left > right if operator == "Gt" else left < right
    return False


def _is_tolerated(pod: Object, node: Object, more: Sequence[str], extended: Collection[str]) -> bool:
    """Return whether the pod, or one that also tolerates the taints with the keys `more`, may be scheduled.

    A pod with a RuntimeClass may be: its class can tolerate all taints except those of extended resources, and of nodes
    that accept no pods.
    """
    taints = [taint for taint in node.get("spec", {}).get("taints", ()) if taint["effect"] != "PreferNoSchedule"]
    if pod.get("runtimeClassName"):
        taints = [taint for taint in taints if taint["key"] in extended or taint["key"].startswith(_OF_NODES)]
    given = pod.get("tolerations", ())
    return all(taint["key"] in more or any(_tolerates(each, taint) for each in given) for taint in taints)


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") not in (None, "", taint["key"]):
        return False
    return toleration.get("operator") == "Exists" or (toleration.get("value") or "") == (taint.get("value") or "")


def _host(node: Object) -> str:
    return str(_labels(node).get(_HOST, node["metadata"]["name"]))


def _labels(node: Object) -> dict[str, str]:
    found: dict[str, str] = node["metadata"].get("labels") or {}
    return found


def _on_hosts(affinity: Object, hosts: Sequence[str]) -> Object:
    """Return the affinity, restricted to these hosts. Its terms are alternatives, so each gets the restriction."""
    of_nodes = affinity.get("nodeAffinity") or {}
    terms = (of_nodes.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    only = {"key": _HOST, "operator": "In", "values": list(hosts)}
    placed = [{**term, "matchExpressions": [*term.get("matchExpressions", ()), only]} for term in terms]
    return {**affinity, "nodeAffinity": {**of_nodes, _REQUIRED: {"nodeSelectorTerms": placed}}}

"""The Deployment of placeholder pods, which hold room for further replicas: spec.autoscaling.nodeHeadroom.

A placeholder has the requests and the placement of a replica, and a lower priority. A replica without a node preempts
it. The Deployment controller creates another, which is pending until a node autoscaler adds a node. See
docs/decisions/080.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from fastgen_operator.children.desired import Desired
from fastgen_operator.children.model_volume import CONTAINER_SECURITY
from fastgen_operator.kinds import Object
from fastgen_operator.labels_and_annotations import HEADROOM_SUFFIX, OWNER_LABEL
from fastgen_operator.objects.container import ENGINE_CONTAINER

# Fields of a replica's pod that decide where it runs and whether its images can be pulled.
_KEPT: Final = (
    *("nodeSelector", "tolerations", "affinity", "runtimeClassName", "schedulerName", "resources"),
    *("serviceAccountName", "imagePullSecrets"),
)
_SPREAD: Final = "topologySpreadConstraints"
# The kernel drops a SIGTERM for the first process of a container unless it is handled or blocked.
_WAIT: Final = (
    "import signal; end = [signal.SIGTERM]; signal.pthread_sigmask(signal.SIG_BLOCK, end); "
    "print('holding room for a replica', flush=True); signal.sigwait(end)"
)
# With 0 the API server would forget a pod while its container still has the GPU.
_GRACE_SECONDS: Final = 1
# The Deployment controller takes this number for no deadline: a placeholder may wait forever.
_NO_DEADLINE: Final = 2**31 - 1


def build_headroom(desired: Desired, template: Object) -> Object | None:
    """Build the Deployment of the placeholders; None if there are none.

    Args:
        template: the pod template of the replicas that would be added now.
    """
    scaling, platform = desired.spec.autoscaling, desired.platform
    if scaling is None or not scaling.node_headroom or not platform.headroom_class:
        return None
    # Not the labels of spec.podTemplate: a Service of the user may select replicas by them. Not Kueue's: its quota is
    # for what computes.
    labels = {**desired.labels, **desired.headroom_selector, "app.kubernetes.io/name": "fastgen-headroom"}
    spec = {
        "replicas": desired.spec.num_placeholders(desired.replicas),
        "selector": {"matchLabels": desired.headroom_selector},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": "100%"}},
        "progressDeadlineSeconds": _NO_DEADLINE,
        "template": {"metadata": {"labels": labels}, "spec": _placeholder(desired, template["spec"])},
    }
    return {"metadata": {"name": f"{desired.name}{HEADROOM_SUFFIX}"}, "spec": spec}


def _placeholder(desired: Desired, pod: Object) -> Object:
    """Return the pod that takes the place of a replica's pod: its containers only wait."""
    image = next(each["image"] for each in pod["containers"] if each["name"] == ENGINE_CONTAINER)
    # The kubelet pulls these, too.
    volumes = [each for each in pod.get("volumes", ()) if "image" in each]
    images = {volume["name"] for volume in volumes}
    made: Object = {
        **{name: pod[name] for name in _KEPT if name in pod},
        "priorityClassName": desired.platform.headroom_class,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "securityContext": desired.platform.pods.security_context,
        # All of them: the scheduler adds up what containers request.
        "initContainers": [_idle(each, image, images, is_first=True) for each in pod.get("initContainers", ())],
        "containers": [_idle(each, image, images) for each in pod["containers"]],
        "volumes": volumes,
        _SPREAD: [_beside_replicas(each, desired) for each in pod.get(_SPREAD, ())],
    }
    return {name: value for name, value in made.items() if value not in ([], {})}


def _idle(container: Object, image: str, images: Collection[str], *, is_first: bool = False) -> dict[str, Any]:
    """Return a container with the same requests that waits, or ends if another one waits for its end.

    Args:
        image: the engine's image.
        images: names of the volumes that are images.
        is_first: whether it is an init container.
    """
    policy = {name: container[name] for name in ("restartPolicy",) if name in container}
    is_awaited = is_first and policy.get("restartPolicy") != "Always"
    # Not the claims of devices in it.
    given = container.get("resources", {})
    resources = {kind: given[kind] for kind in ("requests", "limits") if given.get(kind)}
    mounts = [each for each in container.get("volumeMounts", ()) if each["name"] in images]
    return {
        "name": container["name"],
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-c", "pass" if is_awaited else _WAIT],
        **policy,
        **({"resources": resources} if resources else {}),
        **({"volumeMounts": mounts} if mounts else {}),
        "securityContext": CONTAINER_SECURITY,
    }


def _beside_replicas(constraint: Object, desired: Desired) -> Object:
    """Return a spread constraint of the replicas so that placeholders go where the next replicas would go."""
    if constraint.get("labelSelector") != {"matchLabels": desired.selector}:
        return constraint
    names = [*desired.selector.values(), *desired.headroom_selector.values()]
    both = {"matchExpressions": [{"key": OWNER_LABEL, "operator": "In", "values": names}]}
    kept = {name: value for name, value in constraint.items() if name != "matchLabelKeys"}
    return {**kept, "labelSelector": both}

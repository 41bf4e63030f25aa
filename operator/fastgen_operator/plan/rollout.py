"""Additions to the Deployment controller: unblock stuck rollouts and pods. Pure."""

from __future__ import annotations

from fastgen_operator.children.colocation import VOLUME_ON_ONE_NODE
from fastgen_operator.objects.pod import Pod, unschedulable_pods
from fastgen_operator.plan.situation import Situation


def max_unavailable(situation: Situation) -> int:
    """Return the spec's `rollout.maxUnavailable`, or a higher number if the rollout is deadlocked without it.

    If GPUs are scarce, the Deployment controller may keep a crashing old pod that holds a GPU: the new pod waits for
    that GPU, and the controller for the new pod. The raised number covers only pods that are not ready, so that no
    ready pod is deleted.
    """
    observed, configured = situation.observed, situation.spec.rollout.max_unavailable
    deployment = observed.deployment
    if deployment is None or not observed.owns(deployment.obj):
        return configured
    if not deployment.is_observed:
        # Until the controller has seen the raised number, keep it.
        live = deployment.max_unavailable
        return max(configured, live) if isinstance(live, int) else configured
    idle = [pod for pod in observed.older_pods if pod.node and not pod.is_ready and not pod.has_started]
    waiting = [pod for pod in observed.current_pods if pod.pending is not None]
    if not idle or not waiting:
        return configured
    ready = sum(pod.is_ready for pod in (*observed.current_pods, *observed.older_pods))
    return max(configured, situation.desired_replicas - ready)


def pods_to_replace(situation: Situation) -> tuple[Pod, ...]:
    """Return the pods that still wait for the node of a volume that has left it, for example in a node drain.

    The scheduler accepts any node for them now, but it tries them again only after five minutes: see
    https://github.com/kubernetes/kubernetes/issues/141354. It tries a new pod at once. Each pod is replaced once: the
    next status does not say any more that pods wait for a node.
    """
    observed = situation.observed
    pods = (*observed.pods, *observed.fetch_pods)
    conditions = observed.resource.get("status", {}).get("conditions", ())
    # PodsScheduled or ModelCached. ScalingLimited with this reason is True, and a restarted operator keeps it.
    waited = any((each["reason"], each["status"]) == (VOLUME_ON_ONE_NODE, "False") for each in conditions)
    if not waited or not situation.spec.runs_on_one_node or situation.volume_nodes(pods):
        return ()
    return unschedulable_pods(pods)

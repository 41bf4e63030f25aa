"""Labels and annotations that the operator writes or reads."""

from __future__ import annotations

from typing import Final

from fastgen_operator.kinds import ENDPOINT_SLICE, FASTGEN, GROUP, Kind

# Maps a child to its FastGenDeployment: pods are selected and watches filtered by this label.
OWNER_LABEL: Final = f"{GROUP}/deployment"
# On an EndpointSlice: who keeps it, and the Service that it belongs to.
SLICE_MANAGER_LABEL: Final = "endpointslice.kubernetes.io/managed-by"
SERVICE_NAME_LABEL: Final = "kubernetes.io/service-name"
OPERATOR_NAME: Final = "fastgen-operator"
# Suffix of the label's value on download pods, so that no selector of serving pods matches them. Resource names contain
# no underscore.
FETCH_SUFFIX: Final = "_fetch"
# Suffix of the label's value on pods of a canary, which only the gateway may reach, and of the names of its Deployment,
# Service and NetworkPolicy.
CANARY_LABEL_SUFFIX: Final = "_canary"
CANARY_SUFFIX: Final = "-canary"
# Suffixes of the owner label of placeholder pods, so that no selector of serving pods matches them, and of the name of
# their Deployment.
HEADROOM_LABEL_SUFFIX: Final = "_headroom"
HEADROOM_SUFFIX: Final = "-headroom"
# Suffix of the name of the Service that an InferencePool names as its picker. The gateway finds the pool by it.
PICKER_SUFFIX: Final = "-picker"
# On a Deployment whose pod template is held while a canary runs: the revision of the held template.
REVISION_ANNOTATION: Final = f"{GROUP}/revision"
# Hash of the manifest last applied to a child and, if it has a pod template, one of that: see `plan/changes.py`.
APPLIED_ANNOTATION: Final = f"{GROUP}/applied"
# The model's folder in its volume: the folder that pods read, or that a download Job fills.
MODEL_ANNOTATION: Final = f"{GROUP}/model"
# The uid of the claim that a Job fills: a recreated claim of the same name is empty.
CLAIM_ANNOTATION: Final = f"{GROUP}/claim"
# On a Job that the operator ended because another container kept its pod running: the download is complete.
DOWNLOADED_ANNOTATION: Final = f"{GROUP}/downloaded"
# On a claim: its uid and the folder of the model downloaded to it last, so that nothing depends on a finished Job.
CACHED_ANNOTATION: Final = f"{GROUP}/cached"
# On a Job: a hash of its download, independent of the nodes that it may run on.
FETCH_ANNOTATION: Final = f"{GROUP}/fetch"
# The Kueue queue of a workload.
QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
# The hash of its template, on a pod and its ReplicaSet, from the Deployment controller.
TEMPLATE_LABEL: Final = "pod-template-hash"


def listed_labels(kind: Kind) -> str:
    """Return the label selector for lists of a kind; empty for all objects."""
    if kind == ENDPOINT_SLICE:
        # Not those that the cluster keeps for the Services of all engines.
        return f"{OWNER_LABEL},{SLICE_MANAGER_LABEL}={OPERATOR_NAME}"
    return "" if kind == FASTGEN else OWNER_LABEL

"""`spec` of a FastGenDeployment, with the rules across its parts."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from fastgen_operator.api.autoscaling import Autoscaling
from fastgen_operator.api.engine import Engine
from fastgen_operator.api.fields import FREE_FORM, ApiModel, ObjectName, OperatorClass, crd_field, model_rules, rule
from fastgen_operator.api.model import DOWNLOADED, Cache, Model, downloaded_only
from fastgen_operator.api.network import Gateway, Network
from fastgen_operator.api.resources import Resources
from fastgen_operator.api.rollout import Disruption, Rollout
from fastgen_operator.api.scheduling import Scheduling

NAME_LIMIT = 40


class TemplateMetadata(ApiModel):
    """Labels and annotations to add to the pods."""

    labels: dict[str, Annotated[str, Field(max_length=63)]] = Field(
        default={},
        max_length=32,
        json_schema_extra=rule(
            "!('fastgen.dev/deployment' in self) && !('pod-template-hash' in self)",
            "spec.podTemplate.metadata.labels must not contain fastgen.dev/deployment or pod-template-hash, "
            "because pods are selected by them: use another label",
        ),
    )
    """Labels to add to the pods. Labels that the operator selects pods by cannot be set."""
    annotations: dict[str, str] = Field(default={}, max_length=64)
    """Annotations to add to the pods. They override the operator's annotations, except fastgen.dev/model."""


_CLAIMS = {
    "type": "array",
    "items": FREE_FORM,
    "description": "Devices of dynamic resource allocation, as in a pod's spec. With them, "
    "spec.resources.gpu.count may be 0 for device cuda.",
}
# A patch, with the one part that a rule reads.
_PodPatch = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            **FREE_FORM,
            "properties": {"resourceClaims": _CLAIMS},
        }
    ),
]


class PodTemplate(ApiModel):
    """Patch for the generated pod template."""

    metadata: TemplateMetadata = TemplateMetadata()
    spec: _PodPatch | None = None
    """Strategic merge patch for the pod spec, as in `kubectl patch`. List items are matched by their merge key, for
    example containers by name; the engine's container is named engine. `$patch: delete` in an item removes it, and
    `{$patch: delete}` as the value of a field removes the field. The command, arguments and port of the engine
    container cannot be changed. A patch that violates the restricted Pod Security Standard is refused, unless the
    operator allows it (podTemplate: any in the values of its chart); it is then reported in the condition
    PodsRestricted."""


class Spec(ApiModel):
    """Desired state of the FastGenDeployment."""

    model_config = model_rules(
        (
            "self.rollout.progressDeadlineSeconds >= self.startupDeadlineSeconds",
            "spec.rollout.progressDeadlineSeconds must be at least spec.startupDeadlineSeconds, so that a pod that "
            "is still starting is not reported as failed: raise progressDeadlineSeconds or lower "
            "startupDeadlineSeconds",
        ),
        (
            "self.engine.device != 'cuda' || self.resources.gpu.count > 0 || has(self.podTemplate) && "
            "has(self.podTemplate.spec) && has(self.podTemplate.spec.resourceClaims) && "
            "self.podTemplate.spec.resourceClaims.size() > 0",
            "spec.resources.gpu.count must be at least 1 if spec.engine.device is cuda, because a pod only gets "
            "the GPUs that it requests: set it to 1, or claim a device in spec.podTemplate.spec.resourceClaims",
        ),
        (
            "self.engine.device != 'cpu' || self.resources.gpu.count == 0",
            "spec.resources.gpu.count must be 0 if spec.engine.device is cpu, because the engine would reserve "
            "GPUs without using them: set spec.engine.device to cuda or remove spec.resources.gpu",
        ),
        (
            "self.engine.device == 'cpu' || !has(self.engine.tensorParallel) || self.resources.gpu.count == 0 || "
            "self.engine.tensorParallel == self.resources.gpu.count",
            "spec.engine.tensorParallel must equal spec.resources.gpu.count if spec.engine.device is cuda, because "
            "each process of the model has a GPU of its own: remove it, and set spec.resources.gpu.count",
        ),
        (
            "!(has(self.replicas) && has(self.autoscaling) && self.autoscaling.mode == 'Auto')",
            "spec.replicas and spec.autoscaling are mutually exclusive if spec.autoscaling.mode is Auto: remove "
            "spec.replicas and set spec.autoscaling.minReplicas and maxReplicas, or remove spec.autoscaling",
        ),
        (
            "has(self.replicas) || !has(self.autoscaling) || self.autoscaling.mode == 'Auto'",
            "spec.replicas is required if spec.autoscaling.mode is DryRun, because the autoscaler then only recommends "
            "a number: set spec.replicas to the present number",
        ),
        (
            "!has(self.autoscaling) || self.autoscaling.minReplicas > 0 || self.gateway.expose",
            "spec.autoscaling.minReplicas may be 0 only if spec.gateway.expose is true, because only the gateway holds "
            "requests while there is no replica: set spec.gateway.expose to true, or minReplicas to at least 1",
        ),
        (
            "!has(self.rollout.canary) || self.gateway.expose",
            "spec.rollout.canary requires spec.gateway.expose, because only the gateway sends a share of the requests "
            "to a new revision: set spec.gateway.expose to true, or remove spec.rollout.canary",
        ),
        (
            "!has(self.rollout.canary) || !has(self.cache) || self.cache.accessMode != 'ReadWriteOnce'",
            "spec.rollout.canary must be unset if spec.cache.accessMode is ReadWriteOnce, because the pods of both "
            "revisions would have to run on one node: use ReadWriteMany, or remove spec.rollout.canary",
        ),
        (
            "!has(self.autoscaling) || self.autoscaling.nodeHeadroom == 0 || !has(self.cache) || "
            "self.cache.accessMode != 'ReadWriteOnce'",
            "spec.autoscaling.nodeHeadroom must be 0 if spec.cache.accessMode is ReadWriteOnce, because all replicas "
            "run on one node, so that another node is of no use: use ReadWriteMany, or remove "
            "spec.autoscaling.nodeHeadroom",
        ),
        (
            "!has(self.autoscaling) || self.autoscaling.nodeHeadroom == 0 || !has(self.podTemplate) || "
            "!has(self.podTemplate.spec) || !has(self.podTemplate.spec.resourceClaims) || "
            "self.podTemplate.spec.resourceClaims.size() == 0",
            "spec.autoscaling.nodeHeadroom must be 0 with spec.podTemplate.spec.resourceClaims, because the scheduler "
            "does not preempt pods to free claimed devices: use spec.resources.gpu, or remove "
            "spec.autoscaling.nodeHeadroom",
        ),
        downloaded_only("spec.cache", "model.source"),
        (
            "!has(self.cache) || self.cache.accessMode != 'ReadWriteOnce' || !has(self.disruption.minAvailable) || "
            "self.disruption.minAvailable == 0",
            "spec.disruption.minAvailable must be unset or 0 if spec.cache.accessMode is ReadWriteOnce, because all "
            "replicas run on one node, which could then not be drained: remove spec.disruption.minAvailable, or use "
            "ReadWriteMany",
        ),
    )
    operator_class: OperatorClass | None = None
    """Class of the operator that handles this resource: the one with the same --operator-class. If unset, the operator
    without a class handles it. All other operators ignore it. A change hands the resource over; its pods stay."""
    model: Model
    engine: Engine
    resources: Resources = Resources()
    replicas: int | None = Field(default=None, ge=0, le=1000)
    """Number of replicas. 0 stops serving. Defaults to 1 if autoscaling is also unset. Mutually exclusive with
    autoscaling, unless autoscaling.mode is DryRun. An external autoscaler that uses the scale subresource, such as a
    HorizontalPodAutoscaler, needs an initial value here."""
    autoscaling: Autoscaling | None = None
    """Scales the replicas automatically on arriving and queued tokens and on KV cache usage. Mutually exclusive with
    replicas, unless its mode is DryRun."""
    rollout: Rollout = Rollout()
    """Rolling update strategy of the pods."""
    drain_seconds: int = crd_field("drain_seconds")
    startup_deadline_seconds: int = Field(default=1800, ge=10, le=86400)
    """Time in seconds that the engine container has to become ready after it starts, before it is restarted. Rounded up
    to an even number."""
    scheduling: Scheduling = Scheduling()
    cache: Cache | None = Field(
        default=None,
        description="Persistent volume that the model is downloaded to once. If unset, each pod downloads its own copy "
        f"of an {' or '.join(DOWNLOADED)} model when it starts.",
    )
    disruption: Disruption = Disruption()
    network: Network = Network()
    gateway: Gateway = Gateway()
    api_key_secret_name: ObjectName | None = None
    """Name of a Secret in the same namespace whose key api-keys contains the accepted API keys, one per line. Changes
    of the Secret take effect without a restart. If unset, requests need no API key."""
    pod_template: PodTemplate | None = None
    """Strategic merge patch applied to the generated pod template, for settings that have no field of their own."""

    @property
    def is_autoscaled(self) -> bool:
        """Whether the autoscaler sets the number of replicas."""
        return self.autoscaling is not None and self.autoscaling.mode == "Auto"

    @property
    def is_preloaded(self) -> bool:
        """Whether a Job downloads the model to a volume before pods are created for it."""
        return self.model.is_downloaded and self.cache is not None and self.cache.preload

    @property
    def runs_on_one_node(self) -> bool:
        """Whether all replicas must run on one node, because their volume is attached to one node at a time."""
        return self.model.is_downloaded and self.cache is not None and self.cache.access_mode == "ReadWriteOnce"

    @property
    def num_ranks(self) -> int:
        """Processes among which the engine divides the model."""
        on_gpus = self.resources.gpu.count if self.engine.device == "cuda" else 1
        return self.engine.tensor_parallel or max(1, on_gpus)

    def num_placeholders(self, replicas: int) -> int:
        """Return how many placeholder pods there are beside so many replicas: no more than can become replicas."""
        scaling = self.autoscaling
        return 0 if scaling is None else min(scaling.node_headroom, max(0, scaling.max_replicas - replicas))

    def has_minimum(self, replicas: int) -> bool:
        """Return whether the autoscaler sets the number of replicas, and `replicas` is at least minReplicas and 1."""
        return self.autoscaling is not None and self.is_autoscaled and replicas >= max(1, self.autoscaling.min_replicas)

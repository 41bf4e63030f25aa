"""The spec of a FastGenDeployment: the parts together, and the rules between them."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from fastgen_operator.api.autoscaling import Autoscaling
from fastgen_operator.api.engine import Engine
from fastgen_operator.api.fields import ApiModel, FreeForm, ObjectName, engine_setting, rules, setting_field
from fastgen_operator.api.model import Cache, Model
from fastgen_operator.api.network import Network
from fastgen_operator.api.resources import Resources
from fastgen_operator.api.rollout import Disruption, Rollout
from fastgen_operator.api.scheduling import Scheduling

NAME_LIMIT = 40
INTER_TOKEN_TARGET = engine_setting("inter_token_target").flag


class TemplateMetadata(ApiModel):
    """What is added to the pods' metadata."""

    labels: dict[str, Annotated[str, Field(max_length=63)]] = Field(
        default={},
        max_length=32,
        description="More labels, none of those that pods are found by.",
        json_schema_extra=rules(
            (
                "!('fastgen.dev/deployment' in self) && !('pod-template-hash' in self)",
                "spec.podTemplate.metadata.labels may not hold fastgen.dev/deployment or pod-template-hash, because "
                "pods are found by them: choose another label",
            )
        ),
    )
    annotations: dict[str, str] = Field(
        default={}, max_length=64, description="More annotations; those of the operator stay as they are."
    )


class PodTemplate(ApiModel):
    """What the pods are to have beside, or otherwise than, what the operator gives them."""

    metadata: TemplateMetadata = Field(default=TemplateMetadata(), description="What is added to the pods' metadata.")
    spec: FreeForm | None = Field(
        default=None,
        description="Part of a pod's spec, merged over what the operator builds as `kubectl patch` does "
        "(strategically): items of lists are found by their names, the engine's container is called engine, and "
        "$patch: delete takes an item out. The engine's command, arguments and port cannot be changed so. What the "
        "restricted Pod Security standard forbids is done, and said in the condition PodsRestricted.",
    )


class Spec(ApiModel):
    """What the user wants."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.rollout.progressDeadlineSeconds >= self.startupDeadlineSeconds",
                "spec.rollout.progressDeadlineSeconds must be at least spec.startupDeadlineSeconds: a start that is "
                "still allowed may not be reported as failed; raise the one or lower the other",
            ),
            (
                "self.engine.device != 'cuda' || self.resources.gpu.count > 0",
                "spec.resources.gpu.count must be at least 1 where spec.engine.device is cuda: a pod gets no GPU that "
                "it does not ask for",
            ),
            (
                "self.engine.device != 'cpu' || self.resources.gpu.count == 0",
                "spec.resources.gpu.count must be 0 where spec.engine.device is cpu: the engine would hold GPUs and "
                "not use them; set spec.engine.device to cuda, or take the GPUs out",
            ),
            (
                "!has(self.autoscaling) || !has(self.engine.extraArgs) || self.engine.extraArgs.all(a, "
                f"!'{INTER_TOKEN_TARGET}'.startsWith(a.split('=')[0]))",
                f"spec.engine.extraArgs may not set {INTER_TOKEN_TARGET} beside spec.autoscaling, which reckons with "
                "it: set spec.autoscaling.targets.interTokenLatencyMilliseconds instead",
            ),
            (
                "!(has(self.replicas) && has(self.autoscaling))",
                "spec.replicas and spec.autoscaling exclude each other, because only one of them can decide: take "
                "spec.replicas out and set spec.autoscaling.minReplicas and maxReplicas, or take spec.autoscaling out",
            ),
            (
                "!has(self.cache) || self.model.source.startsWith('hf://') || self.model.source.startsWith('s3://')",
                "spec.cache holds what is downloaded, from hf:// or s3://: take it out for another spec.model.source",
            ),
        )
    )
    model: Model = Field(description="Which model is served.")
    engine: Engine = Field(description="How the engine runs.")
    resources: Resources = Field(default=Resources(), description="What one replica takes of its node.")
    replicas: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="Engines behind the Service; 0 stops serving. Where neither this nor autoscaling is given there is "
        "one. An autoscaler from outside that works on /scale, as a HorizontalPodAutoscaler does, needs a number here "
        "to begin with.",
    )
    autoscaling: Autoscaling | None = Field(
        default=None, description="Let the replicas follow the tokens that wait and arrive; instead of replicas."
    )
    rollout: Rollout = Field(default=Rollout(), description="How a change of the pods is rolled out.")
    drain_seconds: int = setting_field("drain_seconds")
    startup_deadline_seconds: int = Field(
        default=1800,
        ge=10,
        le=86400,
        description="A pod that is not ready this long after its start is started again; in steps of two seconds.",
    )
    scheduling: Scheduling = Field(default=Scheduling(), description="Where the pods may run.")

    cache: Cache | None = Field(
        default=None,
        description="A volume that the model is downloaded to once. Without it, each pod downloads its own copy of a "
        "model from hf:// or s3:// as it starts.",
    )
    disruption: Disruption = Field(
        default=Disruption(), description="How many pods those who run the cluster may take away."
    )
    network: Network = Field(default=Network(), description="Who may reach the engines.")
    api_key_secret_name: ObjectName | None = Field(
        default=None,
        description="Secret of the namespace whose key api-keys holds the API keys that requests may use, one a line. "
        "A change of it is taken over without a restart. Where not given, no key is asked for.",
    )
    pod_template: PodTemplate | None = Field(
        default=None, description="The way out where no field says it: a patch of the pods that the operator builds."
    )

"""The status of a FastGenDeployment, as the CRD describes it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from fastgen_operator.api.fields import ApiModel

Time = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]


class StatusCondition(ApiModel):
    """One aspect of the observed state, as in the Kubernetes API conventions."""

    type: str = Field(max_length=316)
    """Type of the condition, for example Ready. docs/operations.md lists all of them."""
    status: Literal["True", "False", "Unknown"]
    """Whether the condition holds."""
    observed_generation: int | None = Field(default=None, ge=0)
    """Generation of the spec that the condition was computed from."""
    reason: str = Field(max_length=1024)
    """Machine-readable reason for the status, as one CamelCase word."""
    message: str = Field(max_length=32768)
    """Human-readable details about the status."""
    last_transition_time: Time
    """Last time the status of the condition changed."""


class PodSupplyStatus(ApiModel):
    """One pod that does not serve."""

    name: str = Field(max_length=253)
    """Name of the pod."""
    state: str = Field(max_length=64)
    """State of the pod: Starting, Unschedulable, Failing, Lost or Draining."""
    message: str = Field(max_length=1024)
    """Human-readable details about the state."""


class ModelStatus(ApiModel):
    """The served model, as its engines describe it. A field that they do not know is unset."""

    family: str | None = Field(default=None, max_length=64)
    """Architecture of the model, for example qwen3_5_text."""
    format: str | None = Field(default=None, max_length=64)
    """Format of its files, for example GGUF Q4_1, safetensors BF16 or safetensors MXFP4."""
    parameters: int | None = Field(default=None, ge=0)
    """Number of weights."""
    bytes: int | None = Field(default=None, ge=0)
    """Size of the files with the weights. An engine may need more or less memory for them."""
    max_model_length: int | None = Field(default=None, ge=0)
    """Longest prompt plus generation that a replica serves, in tokens."""


class SupplyStatus(ApiModel):
    """Which pods serve, and which do not. The autoscaler counts ready and starting pods as supply, no others."""

    ready: int | None = Field(default=None, ge=0)
    """Pods that are ready and not being deleted."""
    starting: int | None = Field(default=None, ge=0)
    """Pods that the scheduler has not handled yet, and pods on a node that are not ready yet and do not take much
    longer than usual."""
    unschedulable: int | None = Field(default=None, ge=0)
    """Pods for which the scheduler found no node, or that a scheduling gate holds back."""
    failing: int | None = Field(default=None, ge=0)
    """Pods that crash, cannot start (for example, because their image cannot be pulled), or take much longer than usual
    to become ready."""
    lost: int | None = Field(default=None, ge=0)
    """Pods whose node does not respond, or that still exist a minute after they should have been gone."""
    draining: int | None = Field(default=None, ge=0)
    """Pods that are being deleted, except lost ones."""
    pods: list[PodSupplyStatus] | None = Field(default=None, max_length=10)
    """Up to ten pods in other states than Ready, in the order Failing, Lost, Unschedulable, Starting, Draining."""


class Capacity(ApiModel):
    """Capacity of one replica, as estimated from the metrics of all replicas."""

    tokens_per_second: int | None = Field(default=None, ge=0)
    """Tokens per second, prompt and generated, that one replica computes within the inter-token latency target."""
    token_budget: int | None = Field(default=None, ge=0)
    """Maximum number of tokens that a replica computes in one engine step."""
    source: str | None = Field(default=None, max_length=64)
    """Source of the estimate: StepModel (the engines' step-time model) or Throughput (measured while requests were
    queued)."""


class ScalingStep(ApiModel):
    """One change of the number of replicas by the autoscaler."""

    time: Time
    """Time of the decision."""
    from_replicas: int = Field(ge=0)
    """Desired replicas before the change."""
    to_replicas: int = Field(ge=0)
    """Desired replicas after the change."""
    reason: str = Field(max_length=1024)
    """Machine-readable reason for the change, as one CamelCase word."""
    message: str = Field(max_length=1024)
    """Human-readable details about the change."""


class ActiveSchedule(ApiModel):
    """The schedule that sets the lower bound of the replicas."""

    name: str = Field(max_length=63)
    """Name of the schedule."""
    min_replicas: int = Field(ge=0)
    """Lower bound that the schedule sets for the number of replicas."""
    until: Time | None = None
    """Time at which the schedule ends. Unset if it never does."""


class LearningStatus(ApiModel):
    """What was learned from the arrivals of the last hours and days."""

    min_replicas: int | None = Field(default=None, ge=0)
    """The lower bound of the replicas that the last hours require. Applies only if spec.autoscaling.learning is Apply.
    Unset while minReplicas suffices."""
    message: str = Field(max_length=1024)
    """The evidence in words: how many requests are in time with the present settings and with the bound, and the
    cost of both; and the same for the bounds that earlier days require at this time of day, if they require any.
    Updated when the bound changes, and every half hour."""
    arrivals: str = Field(max_length=8192)
    """The recorded arrivals of the last hours, compressed. A new leader continues from them."""
    days: str | None = Field(default=None, max_length=8192)
    """The recorded arrivals of the last seven days by time of day, compressed. Unset until there are any."""


class AutoscalingStatus(ApiModel):
    """State of the autoscaler."""

    desired_replicas: int | None = Field(default=None, ge=0)
    """Number of replicas that the autoscaler currently requests. Unset in a dry run."""
    recommended_replicas: int | None = Field(default=None, ge=0)
    """Number of replicas that the autoscaler would request now. Set only in a dry run, which ignores policies and
    selectPolicy of scaleUp and scaleDown."""
    active_schedule: ActiveSchedule | None = None
    """The schedule that sets the lower bound of the replicas. Unset while no active schedule is above minReplicas."""
    last_scale_time: Time | None = None
    """Last time the autoscaler changed the number of replicas."""
    reason: str | None = Field(default=None, max_length=1024)
    """Machine-readable reason for the last change of the number of replicas (in a dry run, of the recommended number),
    as one CamelCase word."""
    message: str | None = Field(default=None, max_length=1024)
    """How the current number of replicas (in a dry run, the recommended one) follows from the demand, the capacity and
    the target, and which bound applies. Updated when the number or the bound changes, and when the demand has changed
    by more than 30 % and by more than a quarter of a replica's capacity."""
    demand_tokens_per_second: int | None = Field(default=None, ge=0)
    """Demand that the message states, in tokens per second: arriving prompt tokens that are not expected in the prefix
    cache, plus tokens that are expected to be generated."""
    learning: LearningStatus | None = None
    """What was learned from the arrivals of the last hours and days. Unset until there are any."""
    history: list[ScalingStep] | None = Field(default=None, max_length=5)
    """Most recent changes of the number of replicas, newest first."""


class Replacement(ApiModel):
    """Replacement of a pod whose GPU failed or whose engine hung."""

    pod: str = Field(max_length=253)
    """Name of the replaced pod."""
    reason: str = Field(max_length=1024)
    """Failure of the pod, as a reason of the condition Progressing: DeviceFailed or EngineHung."""
    message: str = Field(max_length=1024)
    """Human-readable details about the failure."""
    count: int = Field(ge=1)
    """Number of replacements in a row. The pause after each doubles, from 10 s to 5 min. A replacement more than 10
    minutes after the end of a pause counts as the first again."""
    time: Time
    """Time of the decision."""


class CanaryStatus(ApiModel):
    """A new revision that is tried on a share of the requests, or the last one that was rolled back."""

    revision: str = Field(max_length=63)
    """Hash of its pod template."""
    step: int = Field(ge=1)
    """Number of the step, from 1."""
    percent: int = Field(ge=0, le=100)
    """Share of the requests that the gateway sends to it now, in percent."""
    step_started: Time
    """Time at which the step began."""
    measured_since: Time | None = None
    """Time at which the pods of the step were ready. Unset until then."""
    outcome: Literal["Promoted", "RolledBack"] | None = None
    """Result of the canary. Unset until it ends. Promoted is shown until all pods run the revision, RolledBack until
    the spec describes another one."""
    reason: str | None = Field(default=None, max_length=1024)
    """Machine-readable reason for the rollback, as one CamelCase word."""
    message: str = Field(max_length=1024)
    """Human-readable details."""


class Status(ApiModel):
    """Observed state of the FastGenDeployment."""

    observed_generation: int | None = Field(default=None, ge=0)
    """Generation of the spec that the status was computed from."""
    desired_replicas: int | None = Field(default=None, ge=0)
    """Desired number of replicas, from the spec or from the autoscaler."""
    replicas: int | None = Field(default=None, ge=0)
    """Number of pods of all revisions, without those that are being deleted or have ended."""
    ready_replicas: int | None = Field(default=None, ge=0)
    """Number of ready pods that have the current pod template."""
    updated_replicas: int | None = Field(default=None, ge=0)
    """Number of pods that have the current pod template."""
    selector: str | None = Field(default=None, max_length=1024)
    """Label selector of the pods, for the scale subresource."""
    url: str | None = Field(default=None, max_length=1024)
    """URL of the OpenAI-compatible API inside the cluster."""
    cached_model: str | None = Field(default=None, max_length=128)
    """The model downloaded to the volume of spec.cache last: the uid of the PersistentVolumeClaim and the folder in the
    volume. Set only if spec.cache.preload is true."""
    model: ModelStatus | None = None
    """The served model, as a ready pod of the newest revision described it. Unset until there was one."""
    supply: SupplyStatus | None = None
    """Which pods serve, and which do not."""
    capacity: Capacity | None = None
    """Capacity of one replica. Set once a replica has served enough requests to be measured."""
    stragglers: list[Annotated[str, Field(max_length=253)]] | None = Field(default=None, max_length=1000)
    """Names of the pods that are much slower than the other replicas, as in the condition ReplicasUniform. Unset if
    there are none."""
    autoscaling: AutoscalingStatus | None = None
    """State of the autoscaler. Set only if spec.autoscaling is set."""
    last_replacement: Replacement | None = None
    """Last replacement of a pod whose GPU failed or whose engine hung. Unset if there was none."""
    canary: CanaryStatus | None = None
    """A new revision that is tried on a share of the requests, or the last one that was rolled back. Unset if there is
    none."""
    conditions: list[StatusCondition] | None = Field(
        default=None,
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Conditions of the FastGenDeployment, one of each type."""

"""`spec.autoscaling`: how the number of replicas follows the load."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from fastgen_operator.api.fields import ApiModel, model_rule, model_rules, rule

Mode = Literal["Auto", "DryRun"]
LearningMode = Literal["Advise", "Apply", "Disabled"]


class Targets(ApiModel):
    """Latency and utilization targets that determine the number of replicas. They do not configure the engines."""

    time_to_first_token_milliseconds: int = Field(default=1000, ge=10, le=3_600_000)
    """Target for the time from a request's arrival to its first token, in milliseconds. Replicas are added if the
    prompt tokens that are still queued when a new replica is ready would take longer than half the target, or than the
    start of a replica if that is longer; they are kept while fewer could not compute the queue within the target. The
    default of utilizationPercent depends on the target, too."""
    inter_token_latency_milliseconds: int | None = Field(default=None, ge=1, le=60_000)
    """Target for the time between two consecutive tokens of a response, in milliseconds. The capacity of a replica is
    its token throughput with steps of at most this duration; a target that is too short for steps of 16 tokens is
    ignored. The default is spec.engine.interTokenTarget, which bounds the engine's steps, or 50 if that is auto or
    off."""
    utilization_percent: int | None = Field(default=None, ge=10, le=100)
    """Target utilization of each replica, as a percentage of its capacity. The remainder is headroom for bursts. By
    default, it is derived from the work of the mean request, the replicas' speed and the first-token target."""
    attainment_percent: int = Field(default=99, ge=50, le=99)
    """Share of the requests, in percent, that should get their first token within timeToFirstTokenMilliseconds. Only
    the lower bound that spec.autoscaling.learning learns from the past depends on it."""


class ScalingPolicy(ApiModel):
    """A limit for the change of the number of replicas within a period, as in a HorizontalPodAutoscaler."""

    type: Literal["Pods", "Percent"]
    """Unit of value: a number of replicas, or a percentage of the replicas at the start of the period."""
    value: int = Field(ge=1, le=1000)
    """Maximum change within the period."""
    period_seconds: int = Field(ge=1, le=86_400)
    """Length of the sliding period, in seconds."""


SelectPolicy = Literal["Max", "Min", "Disabled"]


class ScaleUp(ApiModel):
    """Scaling policy for adding replicas."""

    stabilization_seconds: int = Field(default=0, ge=0, le=3600)
    """Stabilization window for scaling up, in seconds. The load adds replicas only if more were needed throughout the
    window. 0 scales up immediately. A raised minReplicas and schedules apply at once."""
    policies: list[ScalingPolicy] = Field(default=[], max_length=4)
    """Limits for the replicas that the load can add within a period. In any case, the load at most doubles the replicas
    in a period of 15 seconds, or adds four if that is more; such a period starts with an increase. The limits do not
    apply to a raised minReplicas or to schedules."""
    select_policy: SelectPolicy = "Max"
    """Which policy applies if there are several: the one that allows the largest change (Max) or the smallest (Min).
    Disabled adds no replicas for the load."""


class ScaleDown(ApiModel):
    """Scaling policy for removing replicas."""

    stabilization_seconds: int = Field(default=300, ge=0, le=86400)
    """Stabilization window for scaling down, in seconds. Replicas are removed only if fewer were sufficient throughout
    the window. After an operator restart, nothing is removed until one full window has been observed. If a burst
    requires new replicas within one window after some were removed, the window is doubled, up to four times the
    configured length. It is halved again after three windows without such a burst. A lowered maxReplicas applies at
    once."""
    max_step_percent: int = Field(default=25, ge=1, le=100)
    """Maximum share of the current replicas, in percent, to remove in one step. At least one replica can always be
    removed. Steps are at least 30 seconds apart. A lowered maxReplicas applies at once."""
    policies: list[ScalingPolicy] = Field(default=[], max_length=4)
    """Limits for the replicas that can be removed within a period. maxStepPercent limits each step and these limit the
    sum of the steps in a period, so both apply. A lowered maxReplicas applies at once."""
    select_policy: SelectPolicy = "Max"
    """Which policy applies if there are several: the one that allows the largest change (Max) or the smallest (Min).
    Disabled removes no replicas when the load falls."""


def _cron_rule() -> str:
    """Return a regular expression for five cron fields; names of months and days in any case."""

    def field(number: str) -> str:
        term = rf"(\*|({number})(-({number}))?)(/[1-9][0-9]?)?"
        return f"{term}(,{term})*"

    months = "jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec"
    days = "sun|mon|tue|wed|thu|fri|sat"
    parts = ("[0-5]?[0-9]", "[01]?[0-9]|2[0-3]", "0?[1-9]|[12][0-9]|3[01]", f"0?[1-9]|1[0-2]|{months}", f"[0-7]|{days}")
    return f"(?i)^{' '.join(field(part) for part in parts)}$"


def _cron(name: str) -> dict[str, object]:
    message = (
        f"spec.autoscaling.schedules[].{name} must be a cron expression with five fields (minute, hour, day of the "
        "month, month, day of the week), such as 0 8 * * mon-fri: correct it"
    )
    return rule(f"self.matches(r'{CRON_PATTERN}')", message)


CRON_PATTERN: Final = _cron_rule()


class Schedule(ApiModel):
    """A recurring period with its own lower bound for the number of replicas."""

    model_config = model_rule(
        "has(self.end) != has(self.durationSeconds)",
        "spec.autoscaling.schedules[].end and durationSeconds are mutually exclusive, and one is required: set one "
        "of them",
    )
    name: str = Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
    """Name of the schedule, which the status and the Events show."""
    start: Annotated[str, Field(max_length=100, json_schema_extra=_cron("start"))]
    """Cron expression of the times at which the schedule becomes active: minute, hour, day of the month, month, day of
    the week. For example, 45 7 * * mon-fri starts replicas a quarter of an hour before eight."""
    end: Annotated[str, Field(max_length=100, json_schema_extra=_cron("end"))] | None = None
    """Cron expression of the times at which the schedule ends. Mutually exclusive with durationSeconds."""
    duration_seconds: int | None = Field(default=None, ge=60, le=2_678_400)
    """How long the schedule is active after each start, in seconds. Mutually exclusive with end."""
    time_zone: str = Field(
        default="UTC",
        max_length=64,
        pattern=r"^[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*$",
        json_schema_extra=rule(
            "self != 'Local' && timestamp('2026-01-01T00:00:00Z').getHours(self) >= 0",
            "spec.autoscaling.schedules[].timeZone must be a name of the IANA time zone database, such as "
            "Europe/Berlin: correct it",
        ),
    )
    """IANA time zone of start and end. Defaults to UTC. When daylight saving time skips a start or an end, it
    takes effect at the end of the skipped hour; when an hour is repeated, it takes effect the first time. This does not
    hold for expressions whose minute or hour starts with an asterisk."""
    min_replicas: int = Field(ge=1, le=1000)
    """Lower bound for the number of replicas while the schedule is active. The largest bound of all active schedules
    and spec.autoscaling.minReplicas applies."""


class Autoscaling(ApiModel):
    """Scales the replicas on token demand, within bounds."""

    model_config = model_rules(
        (
            "self.minReplicas <= self.maxReplicas",
            "spec.autoscaling.minReplicas must be at most spec.autoscaling.maxReplicas: lower minReplicas or raise "
            "maxReplicas",
        ),
        (
            "!has(self.schedules) || self.schedules.all(each, each.minReplicas <= self.maxReplicas)",
            "spec.autoscaling.schedules[].minReplicas must be at most spec.autoscaling.maxReplicas: lower the "
            "schedule's minReplicas or raise maxReplicas",
        ),
    )
    mode: Mode = "Auto"
    """Auto scales the replicas. DryRun only recommends a number, in status.autoscaling.recommendedReplicas, while
    spec.replicas is the number that runs: set by hand, or by another autoscaler through the scale subresource."""
    learning: LearningMode = "Advise"
    """Whether to apply a lower bound that is learned from the arrivals of the last six hours: a higher one than
    minReplicas if requests were late in bursts that ended before new replicas were ready. Advise shows it in
    status.autoscaling.learning. Apply also uses it as if minReplicas were that high. It rises by at most a half, or one
    replica, in ten minutes and falls by one replica in half an hour, up to maxReplicas. It is learned once the arrivals
    of two hours are known. In the same way, a load that rises every day faster than replicas start sets lower bounds
    for the next two hours, once two earlier days are known; workdays and weekends are compared separately. Disabled
    records nothing. If minReplicas is 0, nothing is learned."""
    min_replicas: int = Field(default=1, ge=0, le=1000)
    """Lower bound for the number of replicas. 0 requires spec.gateway.expose: the gateway holds the requests that
    arrive while there is no replica, and the first of them starts one. A new resource has no replica until then. Where
    the operator has no gateway, 0 has the effect of 1."""
    max_replicas: int = Field(ge=1, le=1000)
    """Upper bound for the number of replicas."""
    idle_seconds: int = Field(default=600, ge=10, le=604_800)
    """Time without a request, in seconds, after which the last replica is removed if minReplicas is 0. It counts while
    the engine and all pods of the gateway say that they have no request, and starts anew when the operator or the
    gateway restarts. Limits in scaleDown apply to the last replica, too."""
    node_headroom: int = Field(default=0, ge=0, le=100)
    """Number of placeholder pods. A placeholder has the image, the resources and the node constraints of a replica, and
    a lower priority. Placeholders keep nodes ready for more replicas: a replica that finds no room preempts one at
    once, and a new placeholder waits until the cluster's node autoscaler adds a node. Replicas and placeholders
    together are at most maxReplicas. Placeholders also run in a dry run and while there is no replica. Quotas count
    them, and their nodes cost as much as those of replicas."""
    targets: Targets = Targets()
    scale_up: ScaleUp = ScaleUp()
    scale_down: ScaleDown = ScaleDown()
    schedules: list[Schedule] = Field(
        default=[],
        max_length=16,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]},
    )
    """Recurring periods with a higher lower bound, for example office hours. After the end of a schedule, replicas are
    removed as when the load falls."""

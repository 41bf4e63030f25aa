"""Every alert fires when it should and stays silent otherwise, by promtool's unit tests of the rendered rules."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from chart_files.files import ROOT
from cluster.commands import run
from fastgen.server.serving.metrics import Metrics as EngineMetrics
from fastgen_operator.metrics import Metrics as OperatorMetrics
from gateway.stand_ins import gateway_registry
from harness.chart import Helm
from harness.prometheus import ensure_promtool

ENABLED = ("--set", "prometheusRule.enabled=true")
# The other alerts are warnings, those on objectives by their window.
CRITICAL = {
    "FastGenCrashLoop",
    "FastGenBacklogAtMaximum",
    "FastGenRequestsHeld",
    "FastGenGatewayRefusesRequests",
    "FastGenOperatorAbsent",
    "FastGenNoLeader",
    "FastGenNotReconciling",
}
# The labels of an expected alert, except its name and severity.
Alert = dict[str, str]


@dataclass(frozen=True)
class Case:
    """Series, and the alerts of one name that fire at some times.

    Attributes:
        alert: name of the alert.
        series: values by series in promtool's notation. Samples are `minutes` apart, from time 0.
        fires: all firing alerts of that name, by time.
        minutes: between samples and between evaluations.
        window: for an alert on an objective, the only one of its windows that is loaded; all if empty.
    """

    alert: str
    series: Mapping[str, str]
    fires: Mapping[str, Sequence[Alert]]
    minutes: int = 1
    window: str = ""


def owned(name: str, **labels: str) -> Alert:
    return {"namespace": "prod", "name": name, **labels}


def condition(name: str, kind: str, status: str, reason: str, **more: str) -> str:
    labels = {"namespace": "prod", "name": name, "type": kind, "status": status, "reason": reason, **more}
    return f"fastgen_operator_condition{{{_joined(labels)}}}"


def operator(metric: str, name: str, **more: str) -> str:
    labels = {"namespace": "prod", "name": name, "job": "fastgen", "instance": "one:8080", **more}
    return f"fastgen_operator_{metric}{{{_joined(labels)}}}"


def engine(metric: str, name: str, **more: str) -> str:
    return f"fastgen_{metric}{{{_joined({'namespace': 'prod', 'fastgen_dev_deployment': name, **more})}}}"


def gateway(metric: str, name: str, **more: str) -> str:
    return f"fastgen_gateway_{metric}{{{_joined({'namespace': 'prod', 'name': name, 'pod': 'one', **more})}}}"


def process(metric: str, job: str, instance: str = "one:8080") -> str:
    return f'fastgen_operator_{metric}{{job="{job}",instance="{instance}"}}'


def _joined(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


def of_condition(
    alert: str, kind: str, reason: str, wait: int, *harmless: tuple[str, str], shows_reason: bool = False
) -> Case:
    """Return the case of an alert that fires `wait` minutes after a condition has become False with a reason.

    Args:
        harmless: status and reason that fire nothing.
        shows_reason: whether the reason is a label of the alert.
    """
    labels = {"reason": reason} if shows_reason else {}
    # During a change of the leader, two pods show it.
    series = {condition("bad", kind, "False", reason, pod=pod): "_x10 1x200" for pod in ("one", "two")}
    series[condition("good", "Another", "False", reason)] = "1x210"
    series |= {condition(f"good-{place}", kind, *each): "1x210" for place, each in enumerate(harmless)}
    # It is false for a shorter time.
    series[condition("brief", kind, "False", reason)] = f"1x{wait - 2} stale 1x{wait - 2} stale"
    return Case(alert, series, {f"{9 + wait}m": [], f"{10 + wait}m": [owned("bad", **labels)]})


def objective(alert: str, metric: str) -> list[Case]:
    """Return the cases of a latency objective of 99 %: shares of late observations, and the burn rates they reach."""
    bound, least = {"time_to_first_token_seconds": ("2.5", 20), "inter_token_latency_seconds": ("0.1", 1000)}[metric]
    hour = least / 30  # the rate per sample of two minutes with which an hour has the least number of observations
    severity = {"1h": "critical", "6h": "critical", "1d": "warning", "3d": "warning"}

    def history(name: str, *parts: tuple[int, float], rate: float = 10000, pods: int = 1) -> dict[str, str]:
        """Return series of pods with shares of late observations, each for a number of samples."""
        found = {}
        for pod, weight, lateness in (("a", 1.0, 1.0),) if pods == 1 else (("a", 0.25, 2.0), ("b", 0.75, 2 / 3)):
            values, good = ["0"], 0.0
            for samples, late in parts:
                step = rate * weight * (1 - late * lateness)
                values.append(f"{good + step:g}+{step:g}x{samples - 1}")
                good += samples * step
            steps = sum(samples for samples, _ in parts)
            found[engine(f"{metric}_bucket", name, le=bound, pod=pod)] = " ".join(values)
            if pods > 1:
                found[engine(f"{metric}_bucket", name, le="+Inf", pod=pod)] = f"0+{rate * weight:g}x{steps}"
            found[engine(f"{metric}_count", name, pod=pod)] = f"0+{rate * weight:g}x{steps}"
        return found

    def firing(name: str, *windows: str) -> list[Alert]:
        return [owned(name, window=window, severity=severity[window]) for window in windows]

    shares = {"0.146": 4, "0.142": 3, "0.062": 3, "0.058": 2, "0.032": 2, "0.028": 1, "0.012": 1, "0.008": 0}
    steady: dict[str, str] = {}
    for share in shares:
        steady |= history(share.replace("0.", "late-"), (120, float(share)), pods=2)
    expected = [
        alert
        for share, count in shares.items()
        for alert in firing(share.replace("0.", "late-"), *("3d", "1d", "6h", "1h")[:count])
    ]

    def pair(window: str, burn: float, minutes: int, before: int, after: int, counted: int) -> Case:
        """Return a case of the alert on one pair of windows. Shares and numbers are just above and below its limits.

        Args:
            burn: the least burn rate, in both windows.
            before: samples in the long window.
            after: samples for which the present share lasts: many times `for`, so that the mean hardly changes in it.
            counted: samples in the shorter window that needs a number of observations.
        """
        limit = burn / 100
        series = {
            # Much was late, then just too much, or just not.
            **history("long-and-short", (before, 0.5), (after, 1.02 * limit)),
            **history("long-only", (before, 0.5), (after, 0.98 * limit), pods=2),
            # Nothing was late, then much: a little less than the long window allows.
            **history("short-only", (before, 0.0), (after, 0.98 * limit * before / after), pods=2),
            **history("enough", (before + after, 1.0), rate=1.06 * least / counted),
            **history("few", (before + after, 1.0), rate=0.94 * least / counted),
        }
        expected = [*firing("long-and-short", window), *firing("enough", window)]
        return Case(alert, series, {f"{minutes * (before + after)}m": expected}, minutes, window)

    return [
        pair("1h", 14.4, minutes=1, before=60, after=40, counted=60),
        pair("6h", 6, minutes=5, before=72, after=48, counted=72),
        pair("1d", 3, minutes=10, before=144, after=120, counted=12),
        pair("3d", 1, minutes=30, before=144, after=90, counted=12),
        Case(alert, history("late", (10, 0.5)), {"2m": [], "3m": firing("late", "1h")}, window="1h"),
        # Each rate needs its share of late observations, in all of its windows.
        Case(alert, steady, {"4h": expected}, minutes=2),
        # One for each `for`. Nothing burns at first, because an increase needs two samples.
        Case(
            alert,
            history("late", (100, 0.5)),
            {
                "2m": [],
                "4m": firing("late", "1h"),
                "16m": firing("late", "1h"),
                "18m": firing("late", "1h", "6h"),
                "60m": firing("late", "1h", "6h"),
                "62m": firing("late", "1h", "6h", "1d"),
                "180m": firing("late", "1h", "6h", "1d"),
                "182m": firing("late", "1h", "6h", "1d", "3d"),
            },
            minutes=2,
        ),
        # Late, but in an hour too few to count, or just enough. None at all are never late.
        Case(
            alert,
            {
                **history("few", (60, 1.0), rate=0.975 * hour),
                **history("enough", (60, 1.0), rate=1.02 * hour),
                **history("none", (60, 1.0), rate=0),
            },
            {"40m": [], "110m": [*firing("few", "6h"), *firing("enough", "1h", "6h")]},
            minutes=2,
        ),
        # The short windows end an alert: 5 minutes, half an hour, two hours and six hours after the cause.
        Case(
            alert,
            history("over", (95, 0.5), (190, 0.0), pods=2),
            {
                "192m": firing("over", "1h", "6h", "1d", "3d"),
                "196m": firing("over", "6h", "1d", "3d"),
                "214m": firing("over", "6h", "1d", "3d"),
                "222m": firing("over", "1d", "3d"),
                "300m": firing("over", "1d", "3d"),
                "312m": firing("over", "3d"),
                "540m": firing("over", "3d"),
                "552m": [],
            },
            minutes=2,
        ),
        # The long windows begin it: with all late, after 14.4 % of an hour, and 6 % of six.
        Case(
            alert,
            history("fresh", (200, 0.0), (50, 1.0)),
            {
                "410m": [],
                "412m": firing("fresh", "1h"),
                "434m": firing("fresh", "1h"),
                "440m": firing("fresh", "1h", "6h"),
            },
            minutes=2,
        ),
        # After 3 % of a day and an hour, and after 1 % of three days and three hours.
        Case(
            alert,
            history("fresh", (300, 0.0), (30, 1.0)),
            {
                "6100m": firing("fresh", "6h"),
                "6120m": firing("fresh", "6h", "1d"),
                "6220m": firing("fresh", "6h", "1d"),
                "6240m": firing("fresh", "6h", "1d", "3d"),
            },
            minutes=20,
        ),
    ]


CRASHES = ("CrashLoopBackOff", "OutOfMemory", "BadConfiguration", "DeviceFailed", "EngineHung")
# All reasons for which a canary is rolled back.
ROLLBACKS = ("CanaryFailsRequests", "CanaryTooSlow", "CanaryCrashed", "CanaryNotReady", "CanaryUntested")
LIMITED = ("ScalingLimited", "True", "TooManyReplicas")
CASES = [
    of_condition("FastGenDeploymentNotReady", "Ready", "InsufficientGPU", 15, ("True", "Ok"), shows_reason=True),
    Case(
        "FastGenDeploymentNotReady",
        {condition("bad", "Ready", "Unknown", "NoPods"): "1x30", condition("good", "Available", "False", "X"): "1x30"},
        {"20m": [owned("bad", reason="NoPods")]},
    ),
    of_condition(
        *("FastGenInsufficientGPU", "PodsScheduled", "InsufficientGPU", 15),
        *(("True", "AllScheduled"), ("False", "Unschedulable"), ("Unknown", "InsufficientGPU")),
    ),
    *(
        of_condition(
            *("FastGenCrashLoop", "Progressing", reason, 5),
            *(("True", "RollingOut"), ("False", "ImagePullBackOff"), ("True", reason)),
            shows_reason=True,
        )
        for reason in (*CRASHES, "StartupDeadlineExceeded")
    ),
    *(
        of_condition(
            *("FastGenCanaryRolledBack", "Progressing", reason, 2),
            *(("True", "CanaryRunning"), ("False", "CanaryWithoutGateway"), ("True", reason)),
            shows_reason=True,
        )
        for reason in ROLLBACKS
    ),
    of_condition(
        "FastGenDownloadStuck", "ModelCached", "DownloadFailed", 60, ("True", "Cached"), ("True", "NotNeeded")
    ),
    Case(
        "FastGenDownloadStuck",
        {
            # It fails and is tried again.
            condition("bad", "ModelCached", "Unknown", "Downloading"): "1x30 stale _x9 1x60",
            condition("bad", "ModelCached", "False", "VolumeFull"): "_x31 1x9 stale",
            condition("good", "Available", "Unknown", "Downloading"): "1x100",
        },
        {"59m": [], "61m": [owned("bad")]},
    ),
    Case(
        "FastGenBacklogAtMaximum",
        {
            condition("growing", *LIMITED, pod="one"): "1x60",
            condition("growing", *LIMITED, pod="two"): "1x60",
            engine("backlog_prompt_tokens", "growing", pod="a"): "0+220x60",
            engine("backlog_prompt_tokens", "growing", pod="b"): "9000-100x60",
            # Its queue is full.
            condition("rejecting", *LIMITED): "1x60",
            engine("backlog_prompt_tokens", "rejecting"): "9000x60",
            engine("rejected_prompt_tokens_total", "rejecting"): "0+10x60",
            condition("level", *LIMITED): "1x60",
            engine("backlog_prompt_tokens", "level"): "9000x60",
            # It drains, as a whole.
            condition("draining", *LIMITED): "1x60",
            engine("backlog_prompt_tokens", "draining", pod="a"): "0+100x60",
            engine("backlog_prompt_tokens", "draining", pod="b"): "90000-500x60",
            engine("rejected_prompt_tokens_total", "draining"): "10x60",
            condition("slow", *LIMITED): "1x60",
            engine("backlog_prompt_tokens", "slow"): "0+10x60",
            # Its engine restarted.
            condition("restarted", *LIMITED): "1x60",
            engine("backlog_prompt_tokens", "restarted"): "9000x60",
            engine("rejected_prompt_tokens_total", "restarted"): "500+10x4 0+10x55",
            # More replicas are allowed, or none are asked for.
            condition("scaling", "ScalingLimited", "True", "RateLimited"): "1x60",
            engine("backlog_prompt_tokens", "scaling"): "0+500x60",
            condition("content", "ScalingLimited", "False", "TooManyReplicas"): "1x60",
            engine("backlog_prompt_tokens", "content"): "0+500x60",
            condition("another", "ScalingActive", "True", "TooManyReplicas"): "1x60",
            engine("backlog_prompt_tokens", "another"): "0+500x60",
        },
        {"10m": [], "11m": [owned(name) for name in ("growing", "rejecting", "slow", "restarted")]},
    ),
    # It ends ten minutes after the last rejection, and when the backlog has fallen for as long as it had grown.
    Case(
        "FastGenBacklogAtMaximum",
        {
            condition("turning", *LIMITED): "1x60",
            engine("backlog_prompt_tokens", "turning"): "0+100x20 1900-100x18",
            condition("rejected", *LIMITED): "1x60",
            engine("backlog_prompt_tokens", "rejected"): "9000x60",
            engine("rejected_prompt_tokens_total", "rejected"): "0+10x20 200x40",
        },
        {
            "24m": [owned("turning"), owned("rejected")],
            "26m": [owned("rejected")],
            "28m": [owned("rejected")],
            "30m": [],
        },
    ),
    Case(
        "FastGenMetricsStale",
        {
            operator("scrape_age_seconds", "old"): "_x3 125x30",
            condition("old", "ScalingActive", "True", "Active"): "1x30",
            operator("scrape_age_seconds", "fresh", pod="one"): "120x30",
            operator("scrape_age_seconds", "fresh", pod="two"): "70x30",
            # Its engines are read, and the number of replicas is fixed.
            operator("scrape_age_seconds", "fixed"): "600x30",
            condition("fixed", "ScalingActive", "False", "ScalingDisabled"): "1x30",
            condition("old", "Ready", "False", "ScalingDisabled"): "1x30",
            condition("part", "ScalingActive", "False", "MetricsStale"): "_x3 1x30",
            condition("never", "ScalingActive", "False", "NoMetrics"): "_x3 1x30",
            condition("held", "ScalingActive", "False", "NoReadyReplicas"): "1x30",
            condition("past", "ScalingActive", "True", "MetricsStale"): "1x30",
            condition("another", "ScalingLimited", "False", "NoMetrics"): "1x30",
        },
        {"4m": [], "5m": [owned("old"), owned("part"), owned("never")]},
    ),
    Case(
        "FastGenRequestsHeld",
        {
            operator("held_requests", "stuck"): "_x3 5x30",
            operator("held_requests", "woken"): "0x3 40x8 0x20",
            operator("held_requests", "sleeps"): "0x30",
        },
        {"12m": [], "13m": [owned("stuck")]},
    ),
    of_condition(
        *("FastGenGatewayUnreachable", "ScalingActive", "GatewayUnreachable", 2),
        *(("True", "Active"), ("False", "NoReadyReplicas"), ("True", "GatewayUnreachable")),
    ),
    Case(
        "FastGenGatewayRefusesRequests",
        {
            gateway("requests_total", "full", outcome="routed"): "0+90x30",
            gateway("requests_total", "full", outcome="no_ready_replica"): "0+4x30",
            gateway("requests_total", "full", outcome="held_requests_full", pod="two"): "0+6x30",
            gateway("requests_total", "busy", outcome="routed"): "0+96x30",
            gateway("requests_total", "busy", outcome="no_ready_replica"): "0+4x30",
            # Clients send what the gateway cannot accept.
            gateway("requests_total", "asked-wrongly", outcome="routed"): "0+50x30",
            gateway("requests_total", "asked-wrongly", outcome="tokens_per_minute_exceeded"): "0+50x30",
            gateway("requests_total", "", outcome="model_not_found"): "0+50x30",
        },
        {"5m": [], "6m": [owned("full")]},
    ),
    Case(
        "FastGenGatewayRetries",
        {
            gateway("requests_total", "flaky", outcome="routed"): "0+100x30",
            gateway("retries_total", "flaky"): "0+12x30",
            gateway("requests_total", "good", outcome="routed"): "0+100x30",
            gateway("retries_total", "good"): "0+8x30",
        },
        {"10m": [], "11m": [owned("flaky")]},
    ),
    Case(
        "FastGenGatewayStale",
        {
            'fastgen_gateway_watch_failures_total{namespace="system",pod="one",kind="EndpointSlice"}': "0+4x30",
            # The API server restarted.
            'fastgen_gateway_watch_failures_total{namespace="system",pod="two",kind="EndpointSlice"}': "0x5 3x25",
        },
        {"6m": [], "7m": [{"namespace": "system", "pod": "one", "kind": "EndpointSlice"}]},
    ),
    # A resource without replicas, and none because no request comes.
    *(
        Case(
            alert,
            {
                condition("sleeps", "Ready", "True", "ScaledToZero"): "1x300",
                condition("sleeps", "Available", "True", "ScaledToZero"): "1x300",
                condition("sleeps", "ScalingActive", "True", "Active"): "1x300",
                operator("desired_replicas", "sleeps"): "0x300",
                operator("ready_replicas", "sleeps"): "0x300",
                operator("held_requests", "sleeps"): "0x300",
                operator("scaling_load_replicas", "sleeps"): "0x300",
            },
            {"200m": []},
        )
        for alert in ("FastGenDeploymentNotReady", "FastGenMetricsStale", "FastGenDownloadStuck", "FastGenRequestsHeld")
    ),
    Case(
        "FastGenKVCacheThrash",
        {
            engine("preemptions_total", "thrash", pod="a", mode="swap"): "0+16x60",
            engine("preemptions_total", "thrash", pod="b", mode="recompute"): "0+10x60",
            engine("request_success_total", "thrash", pod="a", finish_reason="stop"): "0+60x60",
            engine("request_success_total", "thrash", pod="b", finish_reason="length"): "0+40x60",
            engine("preemptions_total", "some", mode="swap"): "0+24x60",
            engine("request_success_total", "some", pod="a", finish_reason="stop"): "0+50x60",
            engine("request_success_total", "some", pod="b", finish_reason="stop"): "0+50x60",
            # Its engine restarted.
            engine("preemptions_total", "restarted", mode="swap"): "900+60x4 0+60x55",
            engine("request_success_total", "restarted", finish_reason="stop"): "900+100x4 0+100x55",
            engine("preemptions_total", "idle", mode="swap"): "7x60",
            engine("request_success_total", "idle", finish_reason="stop"): "7x60",
            # It is so busy with preemptions that nothing ends.
            engine("preemptions_total", "stuck", mode="swap"): "0+9x60",
            engine("request_success_total", "stuck", finish_reason="stop"): "7x60",
        },
        {"10m": [], "11m": [owned("thrash"), owned("stuck"), owned("restarted")]},
    ),
    # It ends when the last ten minutes had fewer than one preemption for every four requests.
    Case(
        "FastGenKVCacheThrash",
        {
            engine("preemptions_total", "past", mode="swap"): "0+60x30 1800x30",
            engine("request_success_total", "past", finish_reason="stop"): "0+100x60",
            engine("preemptions_total", "busier", mode="swap"): "0+60x60",
            engine("request_success_total", "busier", finish_reason="stop"): "0+100x30 3400+400x29",
        },
        {"33m": [owned("past"), owned("busier")], "35m": [owned("past")], "37m": []},
    ),
    Case(
        "FastGenStraggler",
        {
            operator("straggler_speed_ratio", "chat", pod="slow"): "0.95x30",
            operator("straggler_speed_ratio", "chat", pod="equal"): "1x30",
            operator("straggler_speed_ratio", "chat", pod="brief"): "0.4x5 stale",
        },
        {"9m": [], "10m": [owned("chat", pod="slow")]},
    ),
    Case("FastGenOperatorAbsent", {process("leader", "fastgen"): "1x9 stale"}, {"14m": [], "15m": [{}]}),
    Case(
        "FastGenNoLeader",
        {
            process("leader", "two", "one:8080"): "0x30",
            process("leader", "two", "two:8080"): "1x9 0x20",
            # Another release has a leader.
            process("leader", "other"): "1x30",
        },
        {"11m": [], "12m": [{"job": "two"}]},
    ),
    Case(
        "FastGenNotReconciling",
        {
            process("leader", "stuck"): "1x60",
            process("reconcile_seconds_count", "stuck"): "0+4x9 40x50",
            process("skipped_reconciles_total", "stuck"): "0+4x9 40x50",
            operator("desired_replicas", "chat", job="stuck"): "2x60",
            process("leader", "works"): "1x60",
            process("reconcile_seconds_count", "works"): "0+1x60",
            process("skipped_reconciles_total", "works"): "0x60",
            operator("desired_replicas", "chat", job="works"): "2x60",
            # Nothing changes.
            process("leader", "idle"): "1x60",
            process("reconcile_seconds_count", "idle"): "40x60",
            process("skipped_reconciles_total", "idle"): "0+1x60",
            operator("desired_replicas", "chat", job="idle"): "2x60",
            # On standby, and without a resource.
            process("leader", "standby"): "0x60",
            process("reconcile_seconds_count", "standby"): "40x60",
            process("skipped_reconciles_total", "standby"): "40x60",
            operator("desired_replicas", "chat", job="standby"): "2x60",
            process("leader", "empty"): "1x60",
            process("reconcile_seconds_count", "empty"): "40x60",
            process("skipped_reconciles_total", "empty"): "40x60",
        },
        {"24m": [], "26m": [{"job": "stuck", "instance": "one:8080"}]},
    ),
    # Workers hang, although the resyncs go on.
    Case(
        "FastGenNotReconciling",
        {
            process("stalled_seconds", "level"): "0x9 31.25x50",
            process("leader", "level"): "1x60",
            process("reconcile_seconds_count", "level"): "0x60",
            process("skipped_reconciles_total", "level"): "0+1x60",
            operator("desired_replicas", "chat", job="level"): "2x60",
            # The probe restarts it every three minutes, and it is not scraped then.
            process("stalled_seconds", "restarted"): "0x9" + " 30 90 150 _" * 10,
            # Each request to a slow API server takes almost half a minute, or it hung once.
            process("stalled_seconds", "slow"): "28x60",
            process("stalled_seconds", "once"): "0x9 60 120 0x50",
        },
        {
            "17m": [],
            "21m": [{"job": "restarted", "instance": "one:8080"}],
            "23m": [{"job": "restarted", "instance": "one:8080"}],
            "26m": [{"job": job, "instance": "one:8080"} for job in ("level", "restarted")],
        },
    ),
    Case(
        "FastGenKindStale",
        {
            'fastgen_operator_stale{job="bad",kind="pods",namespace="team"}': "1x30",
            'fastgen_operator_stale{job="bad",kind="jobs",namespace="team"}': "1x4 0x30",
        },
        {"4m": [], "6m": [{"job": "bad", "kind": "pods", "namespace": "team"}]},
    ),
    Case(
        "FastGenReconcilesFail",
        {
            process("reconcile_errors_total", "bad", "one:8080"): "0+5x30",
            process("reconcile_errors_total", "bad", "two:8080"): "0+1.2x30",
            process("reconcile_errors_total", "good"): "0+5.7x30",
        },
        {"14m": [], "16m": [{"job": "bad"}]},
    ),
    *objective("FastGenFirstTokenBudgetBurn", "time_to_first_token_seconds"),
    # The same template: only the shares, each `for` and the least number.
    *objective("FastGenInterTokenBudgetBurn", "inter_token_latency_seconds")[:8],
]


def rule_groups(helm: Helm, *args: str) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = helm.one("PrometheusRule", *ENABLED, *args)["spec"]["groups"]
    return groups


def alerts(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rule for group in groups for rule in group["rules"] if "alert" in rule]


def promtool_case(case: Case) -> dict[str, Any]:
    """Return a case in promtool's format."""
    severity = "critical" if case.alert in CRITICAL else "warning"
    expected = [
        {
            "alertname": case.alert,
            "eval_time": time,
            "exp_alerts": [{"exp_labels": {"severity": severity, **labels}} for labels in firing],
        }
        for time, firing in case.fires.items()
    ]
    series = [{"series": name, "values": values} for name, values in case.series.items()]
    return {"interval": f"{case.minutes}m", "input_series": series, "alert_rule_test": expected}


def test_alerts_fire_when_they_should_and_only_then(helm: Helm, tmp_path: Path) -> None:
    groups = rule_groups(helm)
    files = []
    for alert, minutes, window in dict.fromkeys((case.alert, case.minutes, case.window) for case in CASES):
        # Only the rules of this alert: promtool evaluates all that it gets, at every step.
        rules = [
            {name: value for name, value in rule.items() if name != "annotations"}
            for group in groups
            for rule in group["rules"]
            if rule.get("alert", group["name"]) == alert
            and window in ("", rule.get("labels", {}).get("window", window))
        ]
        chosen = [case for case in CASES if (case.alert, case.minutes, case.window) == (alert, minutes, window)]
        tests = [promtool_case(case) for case in chosen]
        path = tmp_path / f"{alert}-{minutes}-{window}.yaml"
        path.with_suffix(".rules").write_text(json.dumps({"groups": [{"name": alert, "rules": rules}]}))
        content = {"rule_files": [f"{path.stem}.rules"], "evaluation_interval": f"{minutes}m", "tests": tests}
        path.write_text(json.dumps(content))
        files.append(path)
    assert run([ensure_promtool(), "test", "rules", *files]).count("SUCCESS") == len(files)


def test_every_alert_has_cases_in_which_it_fires_and_does_not(helm: Helm) -> None:
    names = {rule["alert"] for rule in alerts(rule_groups(helm))}
    assert len(names) > 10
    for fires in (True, False):
        assert {case.alert for case in CASES for firing in case.fires.values() if bool(firing) == fires} == names


def test_prometheus_accepts_the_rules_with_any_objective(helm: Helm, tmp_path: Path) -> None:
    for seconds, bound in (("1", r"1(\\.0)?"), ("0.25", r"0\\.25(\\.0)?")):
        groups = rule_groups(helm, "--set-json", f"prometheusRule.objectives.timeToFirstToken.seconds={seconds}")
        (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
        assert "SUCCESS" in run([ensure_promtool(), "check", "rules", tmp_path / "rules.yaml"])
        (group,) = [group for group in groups if group["name"] == "FastGenFirstTokenBudgetBurn"]
        records = [rule["expr"] for rule in group["rules"] if "record" in rule]
        assert records
        assert all(f'le=~"{bound}"' in expression for expression in records)


def test_the_objectives_are_bounds_of_the_engines_histograms() -> None:
    schema = json.loads((ROOT / "charts/fastgen/values.schema.json").read_text())
    objectives = schema["properties"]["prometheusRule"]["properties"]["objectives"]["properties"]
    metrics = EngineMetrics("model")
    metrics.first_token(1, 1)
    bounds: dict[str, list[float]] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket") and sample.labels["le"] != "+Inf":
                bounds.setdefault(family.name, []).append(float(sample.labels["le"]))
    for name, metric in (
        ("timeToFirstToken", "fastgen_time_to_first_token_seconds"),
        ("interTokenLatency", "fastgen_inter_token_latency_seconds"),
    ):
        assert objectives[name]["properties"]["seconds"]["enum"] == bounds[metric]


def test_alerts_name_existing_metrics_reasons_and_sections(helm: Helm) -> None:
    page = (ROOT / "docs/operations.md").read_text()
    sections = page.partition("\n## Alerts\n")[2].partition("\n## ")[0]
    groups = rule_groups(helm)
    assert re.findall(r"^### (\w+)$", sections, re.MULTILINE) == list(
        dict.fromkeys(rule["alert"] for rule in alerts(groups))
    )
    known = set()
    for registry in (EngineMetrics("model").registry, OperatorMetrics().registry, gateway_registry()):
        for family in registry.collect():
            known |= {f"{family.name}{end}" for end in ("", "_total", "_bucket", "_count")}
    for rule in (rule for group in groups for rule in group["rules"]):
        metrics = set(re.findall(r"(?<![:\w])fastgen_(?!dev_)\w+", rule["expr"]))
        assert metrics or "burn_rate" in rule["expr"]
        assert metrics <= known
        for reasons in re.findall(r'reason=~?"([\w|]+)"', rule["expr"]):
            assert all(f"| `{reason}` |" in page for reason in reasons.split("|"))
    for rule in alerts(groups):
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"].endswith(".")
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"

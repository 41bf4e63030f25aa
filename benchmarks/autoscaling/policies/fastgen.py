"""This project's operator: its own code from the pods and the scraped text to the decision."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

from benchmarks.autoscaling.manifests import EPOCH, MODEL, exposition, pod_manifest
from benchmarks.autoscaling.simulation import View
from fastgen_operator.api import Spec
from fastgen_operator.autoscale.loop import REHEARSAL_SECONDS
from fastgen_operator.autoscale.rehearsal.days import Calendar, Days
from fastgen_operator.autoscale.rehearsal.forecast import FloorPlan
from fastgen_operator.autoscale.rehearsal.learning import learn
from fastgen_operator.autoscale.sample import Sample
from fastgen_operator.autoscale.scrape.exposition import parse_sample
from fastgen_operator.autoscale.supply import StartTimes
from fastgen_operator.autoscale.watchlist import Record, Subject
from fastgen_operator.kinds import DEPLOYMENT
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.situation import Situation
from fastgen_operator.plan.subject import subject_of


class Operator:
    """The operator with one FastGenDeployment: observe the pods, scrape, decide.

    Args:
        autoscaling: `spec.autoscaling`.
        engine: `spec.engine`.
        period: scrape interval in seconds.
        calendar: how the days of the trace are divided.
        learns_from: what to use of the learned bounds.
    """

    def __init__(
        self,
        autoscaling: Mapping[str, Any],
        engine: Mapping[str, Any],
        period: float = 5.0,
        calendar: Calendar | None = None,
        learns_from: Collection[Literal["hours", "days"]] = ("hours", "days"),
    ) -> None:
        spec = {"model": {"source": "hf://example/model", "servedName": MODEL}, "engine": dict(engine)}
        metadata = {"name": MODEL, "namespace": "benchmark", "uid": MODEL, "generation": 1}
        self._resource = {"metadata": metadata, "spec": {**spec, "autoscaling": dict(autoscaling)}}
        self._spec = Spec.model_validate(self._resource["spec"])
        self._starts = StartTimes()
        self._record = Record(MODEL, days=Days(calendar=calendar or Calendar()))
        self._learns_from = learns_from
        self._rehearsed = 0.0
        self.period = period

    @property
    def starts(self) -> StartTimes:
        """The observed starts of pods."""
        return self._starts

    @property
    def record(self) -> Record:
        """What the operator has learned."""
        return self._record

    def observe(self, view: View) -> int:
        """Make a decision from the pods and one round of scrapes."""
        deployment = {"metadata": {"name": MODEL, "generation": 1}, "spec": {"replicas": view.desired_replicas}}
        observed = Observed(
            resource=self._resource,
            children={(DEPLOYMENT, MODEL): deployment},
            pods=tuple(Pod(pod_manifest(pod)) for pod in view.pods),
        )
        now = EPOCH + timedelta(seconds=view.now)
        situation = Situation(observed, self._spec, now, decision=self._record.decision, known_starts=self._starts)
        subject = subject_of(situation, self.period)
        self._starts = subject.starts
        answers: dict[str, Sample | None] = dict.fromkeys(view.ready)
        for metrics in view.replicas:
            answers[metrics.pod] = parse_sample(exposition(metrics), MODEL, view.now)
        self._record.update(subject, answers, view.now, EPOCH.timestamp() + view.now)
        if view.now - self._rehearsed >= REHEARSAL_SECONDS:
            self._rehearsed = view.now
            self._rehearse(subject, EPOCH.timestamp() + view.now)
        assert self._record.decision is not None
        return self._record.decision.replicas

    def _rehearse(self, subject: Subject, time: float) -> None:
        """Learn from the arrivals so far, if the spec says to apply it: advice changes no decision."""
        if subject.policy.learning != "Apply" or (rehearsal := self._record.rehearsal(subject)) is None:
            return
        learning = learn(rehearsal)
        floor = learning.floor if "hours" in self._learns_from else 0
        plan = learning.plan if "days" in self._learns_from else FloorPlan()
        self._record.set_learning(rehearsal, replace(learning, floor=floor, plan=plan), time)

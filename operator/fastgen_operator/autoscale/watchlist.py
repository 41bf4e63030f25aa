"""The fleets that reconciles register, and what the autoscaler knows about each.

Reconciles run in other threads than the autoscaler's loop, so subjects and the fields of records are replaced, never
changed in place.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final

from fastgen_operator.autoscale.decide import Case, decide
from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.journal import Entry, Journal
from fastgen_operator.autoscale.measure.capacity import ReplicaSpeeds
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rehearsal.arrivals import Arrivals
from fastgen_operator.autoscale.rehearsal.days import Days
from fastgen_operator.autoscale.rehearsal.learning import Learning, Rehearsal
from fastgen_operator.autoscale.rehearsal.replay import FleetModel
from fastgen_operator.autoscale.rules.needs import expected_start
from fastgen_operator.autoscale.rules.rate_limits import NO_LIMITS, RateLimits
from fastgen_operator.autoscale.rules.recommend import State, measure
from fastgen_operator.autoscale.rules.schedules import Floor
from fastgen_operator.autoscale.sample import Fleet, Sample, Traffic
from fastgen_operator.autoscale.scrape.served_model import ServedModel
from fastgen_operator.autoscale.supply import LoadingStage, PodState, PodSupply, StartTimes, supply_of
from fastgen_operator.canary.outcomes import Evidence, Outcomes
from fastgen_operator.kinds import Key
from fastgen_operator.objects.pod import Pod

logger = logging.getLogger(__name__)

# A rehearsal with the same bound is shown in the status only after this time: each is a write.
_SHOWN_SECONDS: Final = 1800.0
# Forward tokens per second of a replica. A lower capacity is an engine's error, and could overflow a rehearsal.
_LEAST_CAPACITY: Final = 0.001


@dataclass(frozen=True, slots=True)
class TrialPods:
    """The pods of a new revision that is tried.

    Attributes:
        revision, step_started: what is tried, and since when its step lasts.
        pods: to measure; none until the pods of the step are ready.
    """

    revision: str
    step_started: datetime
    pods: tuple[Pod, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A fleet, as observed by the last reconcile.

    Attributes:
        pods: those that have not ended.
        failures: why pods fail, by their names.
        without_room: number of pods that may run on only one node, which has no room for them.
        replicas: number of replicas that the resource should have now (`Situation.desired_replicas`).
        is_autoscaled: whether the autoscaler decides on the size. If not, the fleet is only measured.
        is_dry_run: whether decisions are only shown.
        floor: lower bound that a schedule sets now; None if none does.
        rate_limits: how fast the load may change the size.
        revision: hash of the newest pod template; empty while unknown.
        starts: observed starts of the pods.
        startup_deadline: seconds in which a container must become ready.
        loading: the pod whose loading stage the conditions show; None if no engine loads.
        described: a ready pod of the newest template, which can say what it serves; None if there is none.
        trial: the new revision that is tried; None if none is.
        stored: `status.autoscaling.learning`, from which a new leader continues; None if there is none.
    """

    uid: str
    policy: Policy
    model_name: str
    replicas: int
    pods: tuple[Pod, ...] = ()
    failures: Mapping[str, str] = field(default_factory=dict)
    without_room: int = 0
    is_autoscaled: bool = True
    is_dry_run: bool = False
    floor: Floor | None = None
    rate_limits: RateLimits = NO_LIMITS
    revision: str = ""
    starts: StartTimes = field(default_factory=StartTimes)
    startup_deadline: float = 1800.0
    loading: Pod | None = None
    described: Pod | None = None
    trial: TrialPods | None = None
    stored: Mapping[str, Any] | None = None

    @property
    def mode(self) -> tuple[bool, bool]:
        """The pair of `is_autoscaled` and `is_dry_run`."""
        return self.is_autoscaled, self.is_dry_run

    @property
    def learns(self) -> bool:
        """Whether the operator learns from the arrivals."""
        return self.is_autoscaled and self.policy.learning != "Disabled" and self.policy.min_replicas > 0

    @property
    def scales_to_zero(self) -> bool:
        """Whether the autoscaler may decide that there is no replica."""
        return self.is_autoscaled and not self.policy.min_replicas

    def supply(self, time: float) -> tuple[PodSupply, ...]:
        """Return the state of each pod at a time in seconds since 1970."""
        return tuple(
            supply_of(pod, self.failures.get(pod.name, ""), self.starts, self.startup_deadline, time)
            for pod in self.pods
        )

    def fleet(self, samples: Mapping[str, Sample], supply: Sequence[PodSupply]) -> Fleet:
        """Return the fleet with the newest samples, and pod states from `supply`."""
        usual = self.starts.expected_of_next(self.revision)
        return Fleet(
            replicas=self.replicas,
            ready=frozenset(of.pod.name for of in supply if of.state == "Ready"),
            samples=samples,
            revisions={pod.name: pod.revision for pod in self.pods if pod.ready_since is not None},
            starting=tuple(of.passed for of in supply if of.state == "Starting"),
            # The ReplicaSet controller replaces pods that are being deleted.
            failing=sum(of.state in ("Failing", "Lost") and not of.pod.is_terminating for of in supply),
            without_room=self.without_room,
            start_seconds=None if usual is None else usual.seconds,
        )


@dataclass(slots=True)
class Record:
    """What the autoscaler knows about one fleet.

    Attributes:
        mode: mode of the subject. Decisions of another mode do not apply to it.
        samples: the newest usable sample of each ready pod that has one.
        state: demand, speeds and previous decisions.
        decision: the last decision; None without autoscaling, and before the first one.
        journal: the last decisions with their inputs.
        states: the state of each pod in the last round.
        told: the demand for which a new status was last requested.
        shown: the reason that was last counted in the metrics.
        arrivals: the arrivals of the last hours.
        days: those of the last days.
        learning: what was learned from them last.
        rehearsed: monotonic time of the last rehearsal.
        shown_learning: the one that the status shows, since `shown_since`, in seconds since 1970; None while it shows
            that of an earlier leader, or none.
    """

    uid: str
    mode: tuple[bool, bool] = (True, False)
    samples: dict[str, Sample] = field(default_factory=dict)
    state: State = field(default_factory=State)
    decision: Decision | None = None
    journal: Journal = field(default_factory=Journal)
    states: tuple[tuple[str, PodState], ...] = ()
    told: float | None = None
    shown: str = ""
    arrivals: Arrivals = field(default_factory=Arrivals)
    days: Days = field(default_factory=Days)
    learning: Learning = field(default_factory=Learning)
    rehearsed: float = -math.inf
    shown_learning: Learning | None = None
    shown_since: float = math.inf

    @classmethod
    def of(cls, subject: Subject) -> Record:
        """Return a new record, with what an earlier leader has learned."""
        made = cls(subject.uid, subject.mode)
        if subject.stored is not None and subject.learns:
            try:
                made.learning = Learning.from_status(subject.stored)
                made.arrivals = Arrivals.decode(made.learning.arrivals)
                if made.learning.days:
                    made.days = Days.decode(made.learning.days, made.days.calendar)
            except (KeyError, TypeError, ValueError):
                # Written by another version: the arrivals are recorded anew, and the bound stays until they suffice.
                logger.debug("%s: the recorded arrivals cannot be read", subject.uid, exc_info=True)
        return made

    @property
    def speeds(self) -> ReplicaSpeeds:
        """The capacity of a replica, and the stragglers."""
        return self.state.speeds

    @property
    def in_flight_tokens(self) -> dict[str, float]:
        """Tokens of running and waiting requests by pod."""
        return {pod: sample.in_flight_tokens for pod, sample in self.samples.items()}

    def learned(self, time: float) -> int:
        """Return the learned lower bound at a time in seconds since 1970; 0 if there is none."""
        return max(self.learning.floor, self.learning.plan.at(time))

    def without_decisions(self, mode: tuple[bool, bool]) -> Record:
        """Return a record for another mode of autoscaling, with the measurements of this one."""
        state = State(demand=self.state.demand, speeds=self.state.speeds)
        return Record(
            self.uid, mode, self.samples, state, arrivals=self.arrivals, days=self.days, learning=self.learning
        )

    def update(
        self,
        subject: Subject,
        answers: Mapping[str, Sample | None],
        now: float,
        time: float,
        traffic: Traffic | None = None,
    ) -> bool:
        """Add one round of scrapes, and decide if the fleet is autoscaled.

        Args:
            answers: the sample of each scraped pod; None if the scrape failed.
            now: monotonic time in seconds, as in the samples.
            time: seconds since 1970.
            traffic: what the gateway's pods say; None if they were not asked.

        Returns:
            Whether the status of the resource is outdated.
        """
        usable = {pod: sample for pod, sample in answers.items() if sample is not None}
        kept = {pod: sample for pod, sample in self.samples.items() if pod in answers}
        # Replace the dictionary, because a reconcile may read it in another thread.
        self.samples = {**kept, **usable}
        before = self._shown()
        supply = subject.supply(time)
        fleet = subject.fleet(self.samples, supply)
        if subject.is_autoscaled:
            case = Case(
                policy=subject.policy,
                fleet=fleet,
                now=now,
                floor=subject.floor,
                learned=self.learning.floor,
                planned=self.learning.plan.at(time),
                rate_limits=subject.rate_limits,
                is_dry_run=subject.is_dry_run,
                traffic=traffic,
                state=self.state,
            )
            self.decision, self.state = decide(case)
            self.journal = self.journal.add(Entry(time, case, self.decision))
            if subject.learns:
                is_known = self.decision.hold is None and fleet.failing <= len(fleet.ready)
                self.arrivals = self.arrivals.add(time, self.state.demand.rate if is_known else None)
                self.days = self.days.add(self.arrivals)
        else:
            self.decision, self.state = None, measure(subject.policy, self.state, fleet, now)
        sizing = None if self.decision is None else self.decision.sizing
        if sizing is not None and sizing.differs(self.told):
            self.told = sizing.demand
        self.states = tuple((of.pod.name, of.state) for of in supply)
        return self._shown() != before

    def rehearsal(self, subject: Subject) -> Rehearsal | None:
        """Return the inputs of a rehearsal of the recorded arrivals; None while it is not possible.

        It ignores schedules: what is learned must hold after they end. Decisions add their lower bounds.
        """
        capacity = self.speeds.capacity
        if not subject.learns or capacity is None or not self.arrivals.codes:
            return None
        if capacity.tokens_per_second < _LEAST_CAPACITY:
            return None
        usual = subject.starts.expected_of_next(subject.revision)
        return Rehearsal(
            model=FleetModel(
                policy=subject.policy,
                tokens_per_second=capacity.tokens_per_second,
                start_seconds=expected_start(None if usual is None else usual.seconds),
                requests=self.state.demand.requests,
            ),
            arrivals=self.arrivals.encode(),
            days=self.days.encode() if self.days.codes else "",
            calendar=self.days.calendar,
            before=self.learning.floor,
            lower=self.learning.lower,
        )

    def set_learning(self, rehearsal: Rehearsal, learning: Learning, time: float) -> bool:
        """Take over the result of a rehearsal at `time`, in seconds since 1970; return whether the status shows it."""
        is_same, self.learning = learning.floor == self.learning.floor, learning
        self.journal = replace(self.journal, rehearsal=rehearsal, learning=learning)
        # A restart of the operator alone writes nothing.
        self.shown_since = min(self.shown_since, time)
        if is_same and time - self.shown_since < _SHOWN_SECONDS:
            return False
        self.shown_learning, self.shown_since = learning, time
        return True

    def _shown(self) -> tuple[object, ...]:
        """Return what the status shows, except values that fluctuate."""
        speeds = self.speeds
        return self.decision, self.told, speeds.capacity is None, speeds.stragglers, self.states


class Watchlist:
    """All fleets by resource; `scrape_seconds` is the scrape interval of autoscaled ones."""

    def __init__(self, scrape_seconds: float) -> None:
        self.scrape_seconds = scrape_seconds
        self._subjects: dict[Key, Subject] = {}
        self._records: dict[Key, Record] = {}
        self._stages: dict[Key, LoadingStage] = {}
        self._models: dict[Key, tuple[str, ServedModel]] = {}
        self._evidence: dict[Key, tuple[str, Evidence]] = {}

    def register(self, key: Key, subject: Subject) -> None:
        """Add or replace an observed fleet; drop its decisions if its mode changed."""
        record = self.lookup(key, subject.uid)
        if record is not None and record.mode != subject.mode:
            self._records[key] = record.without_decisions(subject.mode)
        self._subjects[key] = subject

    def forget(self, key: Key) -> None:
        """Remove a fleet, if it is known: its resource was deleted, or another operator handles it now."""
        self._subjects.pop(key, None)
        self._records.pop(key, None)
        self._stages.pop(key, None)
        self._models.pop(key, None)
        self._evidence.pop(key, None)

    def subjects(self) -> list[tuple[Key, Subject]]:
        """Return all fleets."""
        return list(self._subjects.items())

    def subject(self, key: Key) -> Subject | None:
        """Return a fleet as it is now; None if it is not known."""
        return self._subjects.get(key)

    def loading_stage(self, key: Key) -> LoadingStage | None:
        """Return what the fleet's loading engine said last; None if it has said nothing."""
        return self._stages.get(key)

    def set_loading_stage(self, key: Key, stage: LoadingStage) -> bool:
        """Record what the fleet's loading engine says; return whether that has changed."""
        if key not in self._subjects or self._stages.get(key) == stage:
            return False
        self._stages[key] = stage
        return True

    def served_model(self, key: Key, uid: str) -> ServedModel | None:
        """Return what an engine of the resource with that uid said it serves; None if none was asked."""
        of, found = self._models.get(key, ("", None))
        return found if of == uid else None

    def set_served_model(self, key: Key, subject: Subject, model: ServedModel) -> None:
        """Record what an engine of a fleet that is still registered says it serves."""
        registered = self._subjects.get(key)
        if registered is not None and registered.uid == subject.uid:
            self._models[key] = subject.uid, model

    def evidence(self, key: Key, uid: str) -> Evidence | None:
        """Return what was measured of the canary of the resource with that uid; None if nothing was."""
        of, found = self._evidence.get(key, ("", None))
        return found if of == uid else None

    def add_evidence(self, key: Key, subject: Subject, outcomes: Mapping[str, Outcomes]) -> None:
        """Add a round of scrapes, by pod, to the evidence about the canary of a fleet that is still registered."""
        trial, registered = subject.trial, self._subjects.get(key)
        if trial is None or registered is None or registered.uid != subject.uid:
            return
        known, about = self.evidence(key, subject.uid), (trial.revision, trial.step_started)
        if known is None or (known.revision, known.step_started) != about:
            known = Evidence(*about)
        tried = {pod.name for pod in trial.pods}
        canary = {pod: each for pod, each in outcomes.items() if pod in tried}
        stable = {pod: each for pod, each in outcomes.items() if pod not in tried}
        self._evidence[key] = subject.uid, known.add(canary, stable)

    def known_starts(self, key: Key, uid: str) -> StartTimes:
        """Return the observed starts of the resource with that uid, if it is known."""
        found = self._subjects.get(key)
        return found.starts if found is not None and found.uid == uid else StartTimes()

    def lookup(self, key: Key, uid: str) -> Record | None:
        """Return the record of the resource with that uid, or None."""
        found = self._records.get(key)
        return found if found is not None and found.uid == uid else None

    def journal(self, key: Key) -> Journal | None:
        """Return the last decisions about a resource; None if there are none."""
        record = self._records.get(key)
        return record.journal if record is not None and record.decision is not None else None

    def open_record(self, key: Key, subject: Subject) -> Record | None:
        """Return the record of a fleet, a new one if needed.

        None if the resource was forgotten since `subject` was registered, or if its mode of autoscaling changed:
        scrapes for the old mode must not decide in the new one.
        """
        registered = self._subjects.get(key)
        if registered is None or (registered.uid, registered.mode) != (subject.uid, subject.mode):
            return None
        found = self.lookup(key, subject.uid) or Record.of(subject)
        # `register` may be half done in another thread.
        self._records[key] = found if found.mode == subject.mode else found.without_decisions(subject.mode)
        return self._records[key]

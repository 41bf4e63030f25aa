"""The fleets that reconciles register with the autoscaler, and what it learned of them.

Reconciles run in other threads than the autoscaler's loop. Values are frozen and replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fastgen_operator.autoscale.capacity import ReplicaSpeeds
from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.dry_run import DryRun, rebased
from fastgen_operator.autoscale.observation import Fleet, Sample
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rate_limits import NO_LIMITS, RateLimits, Scaling, limited
from fastgen_operator.autoscale.recommend import State, measure, recommend
from fastgen_operator.autoscale.schedules import Floor, explained, with_floor
from fastgen_operator.autoscale.supply import PodState, PodSupply, PodView, StartTimes, supply_of
from fastgen_operator.kinds import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A fleet, as observed by the last reconcile.

    Attributes:
        is_autoscaled: whether the autoscaler decides on its size. If not, it is only measured.
        is_dry_run: whether the decisions are only shown.
        floor: lower bound that a schedule sets now; None if none does.
        rate_limits: how fast the load may change the size.
        replicas: current ones of the Deployment.
        revision: hash of the newest pod template; empty while unknown.
        starts: observed starts of its pods.
        startup_deadline: seconds in which a container must become ready.
    """

    uid: str
    policy: Policy
    model_name: str
    replicas: int
    pods: tuple[PodView, ...] = ()
    is_autoscaled: bool = True
    is_dry_run: bool = False
    floor: Floor | None = None
    rate_limits: RateLimits = NO_LIMITS
    revision: str = ""
    starts: StartTimes = field(default_factory=StartTimes)
    startup_deadline: float = 1800.0

    @property
    def mode(self) -> tuple[bool, bool]:
        """Whether decisions are made, and whether they are only shown."""
        return self.is_autoscaled, self.is_dry_run

    def supply(self, time: float) -> tuple[PodSupply, ...]:
        """Return the state of each pod at a time in seconds since 1970."""
        return tuple(supply_of(pod, self.starts, self.startup_deadline, time) for pod in self.pods)

    def fleet(self, samples: Mapping[str, Sample], time: float) -> Fleet:
        """Return the fleet at a time in seconds since 1970, with the newest usable sample of each pod."""
        supply = self.supply(time)
        usual = self.starts.expected_of_next(self.revision)
        return Fleet(
            replicas=self.replicas,
            ready=frozenset(pod.pod for pod in supply if pod.state == "Ready"),
            samples=samples,
            revisions={pod.name: pod.revision for pod in self.pods if pod.ready_since is not None},
            starting=tuple(pod.passed for pod in supply if pod.state == "Starting"),
            # Pods that are being deleted are replaced by the ReplicaSet controller.
            failing=sum(
                of.state in ("Failing", "Lost") and pod.gone_by is None
                for of, pod in zip(supply, self.pods, strict=True)
            ),
            without_room=sum(not pod.has_room for pod in self.pods),
            start_seconds=None if usual is None else usual.seconds,
        )


@dataclass(slots=True)
class Record:
    """What is remembered of one fleet.

    Attributes:
        samples: the newest usable sample of each ready pod.
        state: demand, speeds and previous decisions.
        scalings: the latest changes of the number of replicas by decisions, as far as rate limits need them.
        dry_run: the latest recommendations of a dry run.
        decision: the last one; None without autoscaling, and before the first one.
        states: the state of each pod at the last round.
        told: the demand that the status shows, about.
        shown: the reason counted last.
    """

    uid: str
    samples: dict[str, Sample] = field(default_factory=dict)
    state: State = field(default_factory=State)
    scalings: tuple[Scaling, ...] = ()
    dry_run: DryRun = field(default_factory=DryRun)
    decision: Decision | None = None
    states: tuple[tuple[str, PodState], ...] = ()
    told: float | None = None
    shown: str = ""

    @property
    def speeds(self) -> ReplicaSpeeds:
        """The capacity of a replica, and the stragglers."""
        return self.state.speeds

    @property
    def in_flight_tokens(self) -> dict[str, float]:
        """Tokens of running and waiting requests, by pod."""
        return {pod: sample.in_flight_tokens for pod, sample in self.samples.items()}

    def update(self, subject: Subject, answers: Mapping[str, Sample | None], now: float, time: float) -> bool:
        """Add one round of scrapes, and decide if the fleet is autoscaled.

        Args:
            answers: the sample of each scraped pod, or None if there was no usable one.
            now: monotonic time in seconds, as in the samples.
            time: seconds since 1970.

        Returns:
            Whether the status of the resource has to be computed again.
        """
        usable = {pod: sample for pod, sample in answers.items() if sample is not None}
        kept = {pod: sample for pod, sample in self.samples.items() if pod in answers}
        # Replaced as a whole: a reconcile may read it in another thread.
        self.samples = {**kept, **usable}
        before = self._shown()
        fleet = subject.fleet(self.samples, time)
        if subject.is_autoscaled:
            self.decision = self._decide(subject, fleet, now)
        else:
            self.decision, self.state = None, measure(subject.policy, self.state, fleet, now)
        sizing = None if self.decision is None else self.decision.sizing
        if sizing is not None and sizing.differs(self.told):
            self.told = sizing.demand
        self.states = tuple((pod.pod, pod.state) for pod in subject.supply(time))
        return self._shown() != before

    def _decide(self, subject: Subject, fleet: Fleet, now: float) -> Decision:
        """Apply the schedule's floor, the policy, and either the rate limits or the dry run, in this order."""
        policy = with_floor(subject.policy, subject.floor)
        if subject.is_dry_run:
            decision, self.state = recommend(policy, rebased(self.state, fleet.replicas), fleet, now)
            self.dry_run = self.dry_run.show(
                explained(decision, subject.floor), fleet.replicas, policy.down_window, now
            )
            assert self.dry_run.shown is not None
            return self.dry_run.shown
        before = self.state
        decision, state = recommend(policy, before, fleet, now)
        last = before.replicas or fleet.replicas
        current = policy.within_bounds(last)
        scalings = subject.rate_limits.kept(self.scalings, now)
        allowed = subject.rate_limits.allowed(current, decision.replicas, scalings, now)
        decision = limited(decision, current, allowed)
        if allowed == last:
            # Nothing is done, so there is no new reason, and the next step down need not wait.
            decision, state = replace(decision, change=before.change), replace(state, down_at=before.down_at)
        else:
            scalings = (*scalings, Scaling(now, allowed - last))
        self.scalings = scalings
        decision = explained(decision, subject.floor)
        self.state = replace(state, replicas=allowed, change=decision.change)
        return decision

    def _shown(self) -> tuple[object, ...]:
        """Return what the status shows, without values that fluctuate."""
        speeds = self.speeds
        return self.decision, self.told, speeds.capacity is None, speeds.stragglers, self.states


class Watchlist:
    """All fleets by resource, and what is remembered of each.

    Args:
        scrape_seconds: interval between two scrapes of an autoscaled fleet.
    """

    def __init__(self, scrape_seconds: float) -> None:
        self.scrape_seconds = scrape_seconds
        self._subjects: dict[Key, Subject] = {}
        self._records: dict[Key, Record] = {}

    def register(self, key: Key, subject: Subject) -> None:
        """Add a fleet, or replace its last observation. Another mode of autoscaling drops earlier decisions."""
        before = self._subjects.get(key)
        record = self.lookup(key, subject.uid)
        if record is not None and before is not None and before.mode != subject.mode:
            state = State(demand=record.state.demand, speeds=record.state.speeds)
            self._records[key] = Record(subject.uid, record.samples, state)
        self._subjects[key] = subject

    def forget(self, key: Key) -> None:
        """Remove the fleet of a deleted resource. Does nothing for an unknown fleet."""
        self._subjects.pop(key, None)
        self._records.pop(key, None)

    def subjects(self) -> list[tuple[Key, Subject]]:
        """Return all fleets."""
        return list(self._subjects.items())

    def known_starts(self, key: Key, uid: str) -> StartTimes:
        """Return the observed starts of the resource with that uid; none if it is unknown."""
        found = self._subjects.get(key)
        return found.starts if found is not None and found.uid == uid else StartTimes()

    def lookup(self, key: Key, uid: str) -> Record | None:
        """Return what is remembered of the resource with that uid, or None."""
        found = self._records.get(key)
        return found if found is not None and found.uid == uid else None

    def open_record(self, key: Key, uid: str) -> Record | None:
        """Return the record of a resource, a new one if needed; None if the resource was forgotten meanwhile."""
        if key not in self._subjects:
            return None
        found = self.lookup(key, uid)
        if found is None:
            found = self._records[key] = Record(uid)
        return found

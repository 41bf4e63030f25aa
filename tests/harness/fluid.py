"""Simulates a fleet with a constant rate per replica, sized by the real autoscaler, one scrape per step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from fastgen_operator.autoscale.decision import Change, Decision
from fastgen_operator.autoscale.policy import Policy
from fastgen_operator.autoscale.rules.recommend import State, recommend
from fastgen_operator.autoscale.sample import Fleet, Sample, StepCoefficients
from fastgen_operator.autoscale.supply import StartTimes
from fastgen_operator.autoscale.watchlist import Subject
from fastgen_operator.objects.pod import Pod
from harness.objects import pod_with

PROMPT, GENERATED, BUDGET = 500.0, 100.0, 512.0
STEP = StepCoefficients(0.02, 0.0001)
# Forward tokens per second of one replica with full steps, and the prompt tokens among them.
RATE = BUDGET / (STEP.base + STEP.token * BUDGET)
PROMPT_RATE = RATE / (1 + GENERATED / PROMPT)
# Maximum queued prompt tokens of one replica. More are rejected, as by the engine's bounded queue.
QUEUE = 1024 * PROMPT


def policy(**changes: float | int) -> Policy:
    """Return a policy whose inter-token target does not limit capacity."""
    plain = Policy(min_replicas=1, max_replicas=50, inter_token_seconds=0.2)
    return replace(plain, **changes)  # type: ignore[arg-type]


@dataclass
class Replica:
    """One pod; `born` and `ready` are times in seconds, `speed` is relative to the usual one."""

    born: float
    ready: float
    speed: float = 1.0
    arrived: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    ended: float = 0.0
    rejected: float = 0.0
    cancelled: float = 0.0
    backlog: float = 0.0

    def sample(self, time: float, wobble: Callable[[], float]) -> Sample:
        return Sample(
            time=time,
            prefill_tokens=self.prefill,
            decode_tokens=self.decode,
            ended_requests=self.ended,
            ended_prompt_tokens=self.ended * PROMPT,
            ended_generated_tokens=self.decode,
            cancelled_tokens=self.cancelled,
            arrived_tokens=self.arrived,
            rejected_tokens=self.rejected,
            backlog_tokens=self.backlog,
            kv_used=0.1,
            kv_capacity_tokens=1e6,
            token_budget=BUDGET,
            step_model=StepCoefficients(STEP.base * wobble() / self.speed, STEP.token * wobble() / self.speed),
        )

    def view(self, name: str, time: float) -> Pod:
        """Return the pod as the operator sees it at a time."""
        is_ready = self.ready <= time
        return pod_with(
            name, scheduled_at=self.born, started_at=self.born, ready_since=self.ready if is_ready else None
        )


@dataclass
class FluidFleet:
    """Replicas under an evenly spread load, and the autoscaler's decisions.

    Attributes:
        load: prompt tokens per second at a time, relative to the capacity of one replica.
        start: seconds from a pod's creation to ready.
        noise: maximum relative error of load and step model.
        silent: whether a ready pod's scrape fails at a time.
        never_start: whether pods that are added later never become ready.
        stuck: pods that never become ready.
        patience: seconds after which a client cancels a request that waits.
        slow: speeds of the first replicas, by pod, if not the usual one.
    """

    policy: Policy
    load: Callable[[float], float]
    start: float = 60.0
    noise: float = 0.0
    seed: int = 0
    silent: Callable[[float, str], bool] = lambda *_: False
    never_start: bool = False
    stuck: set[str] = field(default_factory=set)
    patience: float = math.inf
    slow: dict[str, float] = field(default_factory=dict)
    starts: StartTimes = field(default_factory=StartTimes)
    replicas: dict[str, Replica] = field(default_factory=dict)
    samples: dict[str, Sample] = field(default_factory=dict)
    state: State = field(default_factory=State)
    time: float = 0.0
    sizes: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    backlogs: list[float] = field(default_factory=list)
    made: int = 0

    @classmethod
    def of(cls, count: int, policy: Policy, load: Callable[[float], float], **options: object) -> FluidFleet:
        """Return a fleet of `count` ready replicas."""
        fleet = cls(policy, load, **options)  # type: ignore[arg-type]
        for _ in range(count):
            fleet._add(-fleet.start, ready=0.0)
        return fleet

    def run(self, seconds: float) -> FluidFleet:
        """Advance the simulation by `seconds`."""
        wobbles = random.Random(self.seed)
        end = self.time + seconds
        while self.time < end:
            self.time += self.policy.scrape_seconds
            self._work(self.load(self.time) * wobbles.uniform(1 - self.noise, 1 + self.noise))
            self._decide(lambda: wobbles.uniform(1 - self.noise, 1 + self.noise))
        return self

    def _work(self, load: float) -> None:
        ready = [replica for replica in self.replicas.values() if replica.ready <= self.time]
        for replica in ready:
            arrived = load * PROMPT_RATE * self.policy.scrape_seconds / len(ready)
            replica.arrived += arrived
            replica.backlog += arrived
            done = min(replica.backlog, replica.speed * PROMPT_RATE * self.policy.scrape_seconds)
            beyond = max(0.0, replica.backlog - done - QUEUE)
            replica.rejected += beyond
            replica.backlog -= done + beyond
            # The oldest requests wait for as long as the replica takes to reach them.
            left = max(0.0, replica.backlog - self.patience * replica.speed * PROMPT_RATE)
            replica.backlog -= left
            replica.cancelled += left
            replica.prefill += done
            replica.decode += done * GENERATED / PROMPT
            replica.ended += (done + left) / PROMPT
        self.backlogs.append(sum(replica.backlog for replica in ready))

    @property
    def changes(self) -> list[tuple[int, Change]]:
        """The size after each change, and its reason."""
        found = [(each.replicas, each.change) for each in self.decisions if each.change is not None]
        return [one for one, before in zip(found, [None, *found], strict=False) if one != before]

    def observed(self) -> Fleet:
        """Return the fleet as the operator observes it now."""
        pods = tuple(replica.view(name, self.time) for name, replica in self.replicas.items())
        self.starts = self.starts.learn(pods, 1800.0)
        subject = Subject(
            uid="fluid",
            policy=self.policy,
            model_name="fluid",
            replicas=len(self.replicas),
            pods=pods,
            starts=self.starts,
        )
        return subject.fleet(dict(self.samples), subject.supply(self.time))

    def _decide(self, wobble: Callable[[], float]) -> None:
        for name, replica in self.replicas.items():
            if replica.ready <= self.time and not self.silent(self.time, name):
                self.samples[name] = replica.sample(self.time, wobble)
        decision, self.state = recommend(self.policy, self.state, self.observed(), self.time)
        self.decisions.append(decision)
        self.sizes.append(decision.replicas)
        while len(self.replicas) < decision.replicas:
            self._add(self.time, ready=math.inf if self.never_start else self.time + self.start)
        while len(self.replicas) > decision.replicas:
            youngest = max(self.replicas, key=lambda name: self.replicas[name].ready)
            del self.replicas[youngest]
            self.samples.pop(youngest, None)

    def _add(self, born: float, ready: float) -> None:
        self.made += 1
        name = f"pod-{self.made}"
        ready = math.inf if name in self.stuck else ready
        self.replicas[name] = Replica(born, ready, self.slow.get(name, 1.0))

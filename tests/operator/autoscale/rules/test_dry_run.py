"""A dry run: the autoscaler recommends a number, and something else sets it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fastgen_operator.autoscale.decision import Decision
from fastgen_operator.autoscale.rules.scale_down_window import ScaleDownWindow
from fastgen_operator.autoscale.rules.schedules import Floor
from fastgen_operator.autoscale.sample import Sample
from fastgen_operator.autoscale.watchlist import Record, Subject
from harness.fluid import BUDGET, GENERATED, PROMPT, PROMPT_RATE, STEP, policy
from harness.objects import pod_with

SCRAPE = 5.0
WINDOW = 60.0


@dataclass
class OwnedFleet:
    """Replicas whose number the test sets, under a load in capacities of one replica."""

    size: int
    load: float
    floor: Floor | None = None
    record: Record = field(default_factory=lambda: Record("u"))
    time: float = 0.0
    served: dict[str, float] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)

    def watch(self, seconds: float) -> int:
        """Advance the time; return the recommendation."""
        for _ in range(int(seconds / SCRAPE)):
            self.time += SCRAPE
            names = [f"chat-{n}" for n in range(self.size)]
            for name in names:
                served = self.served.get(name, 0.0) + self.load * PROMPT_RATE * SCRAPE / self.size
                self.served[name] = served
            views = (pod_with(name, scheduled_at=0.0, started_at=0.0, ready_since=1.0) for name in names)
            subject = Subject(
                uid="u",
                policy=policy(down_window=WINDOW, max_replicas=20),
                model_name="m",
                replicas=self.size,
                pods=tuple(views),
                is_dry_run=True,
                floor=self.floor,
            )
            samples: dict[str, Sample | None] = {name: self._sample(self.served[name]) for name in names}
            self.record.update(subject, samples, self.time, self.time)
            assert self.record.decision is not None
            self.decisions.append(self.record.decision)
        return self.decisions[-1].replicas

    def _sample(self, served: float) -> Sample:
        return Sample(
            time=self.time,
            arrived_tokens=served,
            prefill_tokens=served,
            decode_tokens=served * GENERATED / PROMPT,
            ended_requests=served / PROMPT,
            ended_prompt_tokens=served,
            ended_generated_tokens=served * GENERATED / PROMPT,
            kv_used=0.01,
            kv_capacity_tokens=1e6,
            token_budget=BUDGET,
            step_model=STEP,
        )


def test_the_recommendation_follows_the_load_and_not_the_present_number() -> None:
    fleet = OwnedFleet(size=1, load=2.0)
    assert fleet.watch(120) == 3
    fleet.load = 0.3
    assert fleet.watch(300) == 1, "stuck above the present number"


def test_a_recommendation_above_the_present_number_is_held_for_the_window_without_other_decisions() -> None:
    fleet = OwnedFleet(size=1, load=2.0)
    assert fleet.watch(120) == 3
    fleet.decisions.clear()
    for load in (1.9, 1.98, 1.85):
        fleet.load = load
        fleet.watch(20)
    assert len(set(fleet.decisions)) == 1, "a noisy load"
    fleet.load = 0.3
    fleet.watch(WINDOW / 2)
    assert fleet.decisions[-1].replicas == 3


def test_a_recommendation_above_the_present_number_is_held_for_the_learned_window() -> None:
    fleet = OwnedFleet(size=1, load=2.0)
    assert fleet.watch(120) == 3
    fleet.record.state = replace(fleet.record.state, scale_down_window=ScaleDownWindow(factor=4, learned=fleet.time))
    fleet.load = 0.3
    assert fleet.watch(3 * WINDOW) == 3
    assert fleet.watch(2 * WINDOW) == 1


def test_a_fleet_that_is_too_large_is_told_to_shrink_as_the_autoscaler_would() -> None:
    fleet = OwnedFleet(size=10, load=0.5)
    fleet.watch(900)
    sizes = [decision.replicas for decision in fleet.decisions]
    assert sizes[-1] == 1
    assert sizes == sorted(sizes, reverse=True)


def test_another_present_number_ends_the_recommendations_for_the_last_one() -> None:
    fleet = OwnedFleet(size=10, load=0.5)
    assert fleet.watch(SCRAPE) == 10
    fleet.size = 4
    assert fleet.watch(SCRAPE) <= 4


def test_a_schedule_is_recommended_too() -> None:
    fleet = OwnedFleet(size=1, load=0.3, floor=Floor("office", 5, None))
    assert fleet.watch(SCRAPE) == 5
    change = fleet.decisions[-1].change
    assert change is not None
    assert change.reason == "ScheduleStarted"

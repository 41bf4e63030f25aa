"""What is written while a new revision is tried."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from fastgen_operator.api.crd import structural
from fastgen_operator.api.status import CanaryStatus
from fastgen_operator.canary.canary import Canary
from fastgen_operator.canary.outcomes import Evidence, Outcomes
from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import CLAIM, DEPLOYMENT, NETWORK_POLICY, POD, SERVICE, Kind, Object
from fastgen_operator.labels_and_annotations import OWNER_LABEL
from fastgen_operator.objects.pod import Pod
from fastgen_operator.objects.stored import fingerprint, name_of
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Plan, make_plan
from fastgen_operator.plan.situation import Situation
from fastgen_operator.plan.subject import subject_of
from fastgen_operator.status.status import build_status
from harness.objects import NOW, applied, pod, pod_template, replica_set, situation, stored

STEPS = {"canary": {"steps": [{"percent": 30, "minutes": 5}]}}
BASE: dict[str, Any] = {"replicas": 4, "gateway": {"expose": True}, "rollout": STEPS}
PRESENT = stored(**BASE)
NEWEST = stored(**BASE, engine={"device": "cpu", "tokenBudget": 512}, generation=2)
REVISION = fingerprint(pod_template(NEWEST))
PLATFORM = Platform("engine:test", has_gateway=True)
DONE = {
    "replicas": 4,
    "updatedReplicas": 4,
    "conditions": [{"type": "Progressing", "reason": "NewReplicaSetAvailable"}],
}


class World:
    """A resource whose children are applied as planned, with the status that the operator writes.

    Attributes:
        seen: what is observed.
        now: the time.
        has_gateway: whether the operator has one.
    """

    def __init__(self, owner: Object = PRESENT, *, ready: bool = True) -> None:
        self.seen = Observed(owner, pods=tuple(Pod(pod(name=name, ready=ready)) for name in "abcd"))
        self.now = NOW
        self.has_gateway = True
        self.evidence: Evidence | None = None
        self.reconcile()

    def situation(self) -> Situation:
        return situation(self.seen, self.now, has_gateway=self.has_gateway, evidence=self.evidence)

    def plan(self) -> Plan:
        return make_plan(self.situation(), replace(PLATFORM, has_gateway=self.has_gateway))

    def reconcile(self) -> Plan:
        """Plan, carry the plan out, and write the status."""
        plan, found = self.plan(), self.situation()
        for each in plan.applies:
            before = self.seen.child(each.kind, each.name)
            changes = before is None or before["spec"] != each.manifest.get("spec")
            generation = 1 if before is None else before["metadata"]["generation"] + changes
            live = applied(each.manifest, uid=f"uid-of-{each.name}", generation=generation, resourceVersion="1")
            if each.kind == DEPLOYMENT:
                live = {**live, "status": {"observedGeneration": generation, **DONE}}
            self.seen = self.seen.with_child(each.kind, live)
        for delete in plan.deletes:
            self.seen = self.seen.without_child(delete.kind, name_of(delete.child))
        status = build_status(replace(found, canary=plan.canary), plan.problem)
        self.seen = replace(self.seen, resource={**self.seen.resource, "status": status})
        self._make_replica_sets()
        return plan

    def settle(self) -> None:
        """Reconcile until nothing changes any more; fail if that does not end."""
        for _ in range(6):
            before = copy.deepcopy(self.seen.resource["status"])
            plan = self.reconcile()
            if not plan.applies and not plan.deletes and self.seen.resource["status"] == before:
                return
        raise AssertionError("it writes again and again")

    def apply(self, owner: Object) -> None:
        """Change the spec."""
        self.seen = replace(self.seen, resource={**owner, "status": self.seen.resource["status"]})

    def run_canary(self, *, ready: bool = True, **status: Any) -> None:
        """Let the pods of the canary exist."""
        labels = {OWNER_LABEL: "chat_canary"}
        found = [pod("canary", name=name, ready=ready, **status) for name in "xy"]
        for each in found:
            each["metadata"]["labels"] |= labels
        self.seen = replace(self.seen, canary_pods=tuple(map(Pod, found)))

    def measure(self, **outcomes: float) -> None:
        """Let so many requests be measured since the last reconcile."""
        self.now += timedelta(minutes=5)
        good = {"requests": 100.0, "first_tokens": 100.0, "first_token_seconds": 1.0, "gaps": 200.0, "gap_seconds": 2.0}
        canary = Canary.from_status(self.canary())
        assert canary is not None
        self.evidence = Evidence(
            canary.revision, canary.step_started, Outcomes(**{**good, **outcomes}), Outcomes(**good)
        )

    def children(self, kind: Kind) -> list[str]:
        return [name for of, name in self.seen.children if of == kind]

    def template(self, name: str = "chat") -> Object:
        found = self.seen.child(DEPLOYMENT, name)
        assert found is not None
        template: Object = found["spec"]["template"]
        return template

    def egress(self, name: str) -> list[Object]:
        """Return what a NetworkPolicy allows its pods to connect to."""
        found = self.seen.child(NETWORK_POLICY, name)
        assert found is not None
        egress: list[Object] = found["spec"]["egress"]
        return egress

    def canary(self) -> dict[str, Any]:
        """Return `status.canary`; empty without one."""
        found: dict[str, Any] = self.seen.resource["status"].get("canary", {})
        return found

    def condition(self, kind: str = "Progressing") -> tuple[str, str, str]:
        each = next(each for each in self.seen.resource["status"]["conditions"] if each["type"] == kind)
        return each["status"], each["reason"], each["message"]

    def _make_replica_sets(self) -> None:
        made = []
        for name, hash_ in (("chat", "new"), ("chat-canary", "canary")):
            if (live := self.seen.child(DEPLOYMENT, name)) is not None:
                found = replica_set(hash_, live["spec"]["template"])
                found["metadata"]["ownerReferences"] = [{"uid": f"uid-of-{name}", "controller": True}]
                made.append(found)
        self.seen = replace(self.seen, replica_sets=tuple(made))


@pytest.fixture
def world() -> World:
    made = World()
    made.settle()
    assert made.children(DEPLOYMENT) == ["chat"]
    assert made.canary() == {}
    return made


def started(world: World) -> World:
    """Return the world with a canary whose pods are ready."""
    world.apply(NEWEST)
    world.settle()
    world.run_canary()
    world.settle()
    assert world.canary()["percent"] == 30
    return world


def test_a_new_revision_gets_pods_of_its_own_which_the_service_does_not_select(world: World) -> None:
    old = world.template()
    world.apply(NEWEST)
    world.reconcile()
    assert world.template() == old
    assert world.children(DEPLOYMENT) == ["chat"], "only when the status says so"
    world.settle()
    assert world.template() == old
    assert world.children(DEPLOYMENT) == ["chat", "chat-canary"]
    canary, service = (world.seen.child(kind, "chat-canary") for kind in (DEPLOYMENT, SERVICE))
    assert canary is not None
    assert service is not None
    assert canary["spec"]["replicas"] == 2, "30 % of 4, rounded up"
    labels = canary["spec"]["template"]["metadata"]["labels"]
    assert labels == pod_template(NEWEST)["metadata"]["labels"] | {OWNER_LABEL: "chat_canary"}
    assert canary["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == {OWNER_LABEL: "chat_canary"}
    assert canary["metadata"]["labels"][OWNER_LABEL] == service["metadata"]["labels"][OWNER_LABEL] == "chat"
    assert canary["spec"]["template"]["spec"] == pod_template(NEWEST)["spec"]
    assert "chat.canary" in world.children(NETWORK_POLICY)
    assert world.condition() == ("True", "CanaryRunning", "step 1 of 1, 30 % of the requests: waits for its pods")


def test_creating_the_pods_of_a_canary_reads_no_metrics_of_the_others(world: World) -> None:
    """Only a Deployment whose pods may be removed needs to know which of them have the fewest tokens."""
    world.apply(NEWEST)
    world.reconcile()
    plan = world.plan()
    assert (DEPLOYMENT, "chat-canary") in plan.names_to_look_up
    assert plan.loads_to_read == ()


def test_a_good_revision_replaces_the_pods_and_its_own_go_last(world: World) -> None:
    started(world).measure()
    world.reconcile()
    assert world.canary()["outcome"] == "Promoted"
    world.reconcile()
    assert world.template()["spec"] == pod_template(NEWEST)["spec"]
    assert world.children(DEPLOYMENT) == ["chat", "chat-canary"], "until all pods have it"
    world.settle()
    assert world.canary() == {}
    assert world.children(DEPLOYMENT) == ["chat"]
    assert world.children(SERVICE) == ["chat"]
    assert world.condition()[1] == "RolloutComplete"


def test_a_bad_revision_goes_and_does_not_come_back(world: World) -> None:
    old = world.template()
    started(world).measure(errors=50.0)
    plan = world.reconcile()
    assert world.canary()["percent"] == 0
    assert plan.deletes == (), "the gateway reads first that it gets no share"
    world.settle()
    assert world.children(DEPLOYMENT) == ["chat"]
    assert world.template() == old
    words = "rolled back: 50 of 100 requests failed, more than 1 %; the pods keep their revision: correct the spec"
    assert world.condition() == ("False", "CanaryFailsRequests", words)
    assert world.condition("Ready")[:2] == ("False", "CanaryFailsRequests")
    world.now += timedelta(days=1)
    world.settle()
    assert world.children(DEPLOYMENT) == ["chat"]
    world.apply(stored(**{**BASE, "replicas": 2}, engine={"device": "cpu", "tokenBudget": 512}, generation=3))
    world.settle()
    assert world.canary()["outcome"] == "RolledBack", "another number of replicas is not another revision"
    world.apply(PRESENT)
    world.settle()
    assert world.canary() == {}
    assert world.condition()[1] == "RolloutComplete"
    assert world.template()["spec"] == old["spec"]


def test_the_previous_spec_ends_a_trial(world: World) -> None:
    old = world.template()
    started(world)
    world.apply(PRESENT)
    world.settle()
    assert world.canary() == {}
    assert world.children(DEPLOYMENT) == ["chat"]
    assert world.template() == old


def test_the_api_servers_defaults_in_a_held_template_are_no_revision(world: World) -> None:
    live = copy.deepcopy(world.seen.child(DEPLOYMENT))
    assert live is not None
    live["spec"]["template"]["spec"]["schedulerName"] = "default-scheduler"
    world.seen = world.seen.with_child(DEPLOYMENT, live)
    world._make_replica_sets()
    started(world)
    world.apply(PRESENT)
    world.settle()
    assert world.canary() == {}


def test_a_newer_revision_starts_with_pods_of_its_own(world: World) -> None:
    started(world)
    newer = stored(**BASE, engine={"device": "cpu", "tokenBudget": 256}, generation=3)
    world.apply(newer)
    world.reconcile()
    assert world.children(DEPLOYMENT) == ["chat"], "the pods of the other one go first"
    world.seen = replace(world.seen, canary_pods=())
    world.settle()
    assert world.children(DEPLOYMENT) == ["chat", "chat-canary"]
    assert (world.canary()["step"], world.canary()["percent"]) == (1, 0)
    assert world.template("chat-canary")["spec"] == pod_template(newer)["spec"]


def test_without_the_field_the_pods_are_replaced_at_once(world: World) -> None:
    started(world)
    world.apply({**NEWEST, "spec": {**NEWEST["spec"], "rollout": {}}})
    world.settle()
    assert world.canary() == {}
    assert world.children(DEPLOYMENT) == ["chat"]
    assert world.template()["spec"] == pod_template(NEWEST)["spec"]


def test_the_model_of_the_present_revision_counts_while_another_is_tried() -> None:
    world = World(stored(**BASE, model={"source": "hf://owner/tiny"}))
    world.settle()
    assert world.condition("ModelCached")[1:] == ("Cached", "4 of 4 pods have hf://owner/tiny")
    world.apply(stored(**BASE, model={"source": "hf://owner/other"}, generation=2))
    world.settle()
    assert world.condition("ModelCached")[1:] == ("Cached", "4 of 4 pods have the model of the present revision")
    assert world.condition("Ready")[0] == "True"


def test_pods_of_the_present_revision_may_download_its_model_while_another_without_a_download_is_tried() -> None:
    """Pods that are added or replaced meanwhile, or after a rollback, download it when they start."""
    world = World(stored(**BASE, model={"source": "hf://owner/tiny"}))
    world.settle()
    egress = world.egress("chat")
    world.apply(stored(**BASE, generation=2))
    world.settle()
    assert world.egress("chat") == egress
    assert world.egress("chat.canary") != egress
    world.run_canary()
    world.settle()
    world.measure()
    world.settle()
    assert world.canary() == {}
    assert world.egress("chat") == world.egress("chat.canary") != egress


CACHED: dict[str, Any] = {
    "model": {"source": "hf://owner/tiny"},
    "cache": {"size": "1Gi", "accessMode": "ReadWriteMany", "preload": False},
}


def test_the_volume_of_the_present_revision_stays_until_another_has_replaced_it() -> None:
    """A volume that is being deleted admits no pod, so the present revision could neither be scaled nor replaced."""
    world = World(stored(**BASE, **CACHED))
    world.settle()
    world.apply(stored(**BASE, generation=2))
    world.settle()
    world.run_canary()
    world.settle()
    assert world.canary()["percent"] == 30
    assert world.children(CLAIM) == ["chat"]
    rolled_back = copy.deepcopy(world)
    rolled_back.measure(errors=50.0)
    rolled_back.settle()
    assert rolled_back.canary()["outcome"] == "RolledBack"
    assert rolled_back.children(CLAIM) == ["chat"]
    world.measure()
    world.settle()
    assert world.canary() == {}
    assert world.children(CLAIM) == []


def test_a_deployment_of_an_unknown_revision_is_written_without_a_trial(world: World) -> None:
    live = copy.deepcopy(world.seen.child(DEPLOYMENT))
    assert live is not None
    del live["metadata"]["annotations"]
    world.seen = world.seen.with_child(DEPLOYMENT, live)
    world.reconcile()
    assert world.canary() == {}


def test_an_object_of_another_owner_with_the_name_of_the_canary_is_left_alone(world: World) -> None:
    other = copy.deepcopy(world.seen.child(DEPLOYMENT))
    assert other is not None
    owner = {**other["metadata"]["ownerReferences"][0], "name": "chat-canary", "uid": "another"}
    other["metadata"] |= {"name": "chat-canary", "ownerReferences": [owner]}
    world.seen = world.seen.with_child(DEPLOYMENT, other)
    old = world.template()
    world.apply(NEWEST)
    world.settle()
    assert (world.template(), world.seen.child(DEPLOYMENT, "chat-canary")) == (old, other)
    assert world.condition()[1] == "NameTaken"
    assert "a Deployment named chat-canary exists" in world.condition()[2]


def test_a_broken_revision_is_replaced_at_once() -> None:
    broken = World(ready=False)
    broken.apply(NEWEST)
    broken.settle()
    assert broken.canary() == {}
    assert broken.template()["spec"] == pod_template(NEWEST)["spec"]


def test_a_revision_that_serves_another_name_replaces_the_pods_at_once(world: World) -> None:
    """The gateway routes requests by the new name, which the present revision rejects with 404."""
    started(world)
    renamed = stored(**BASE, model={**NEWEST["spec"]["model"], "servedName": "other"}, generation=3)
    world.apply(renamed)
    world.settle()
    assert world.canary() == {}
    assert world.children(DEPLOYMENT) == ["chat"]
    assert world.template()["spec"] == pod_template(renamed)["spec"]


def test_without_a_gateway_the_pods_stay_and_the_condition_has_the_remedy(world: World) -> None:
    old, world.has_gateway = world.template(), False
    world.apply(NEWEST)
    world.settle()
    assert world.template() == old
    assert world.children(DEPLOYMENT) == ["chat"]
    status, reason, message = world.condition()
    assert (status, reason) == ("False", "CanaryWithoutGateway")
    assert "install its chart with gateway.enabled, or remove spec.rollout.canary" in message
    world.has_gateway = True
    world.settle()
    assert world.children(DEPLOYMENT) == ["chat", "chat-canary"]


def test_a_crash_of_a_pod_that_serves_is_a_rollback(world: World) -> None:
    started(world)
    finished = (world.now + timedelta(seconds=5)).isoformat()
    ended = {"exitCode": 139, "reason": "Error", "finishedAt": finished, "message": "boom"}
    status = {"name": "engine", "image": "e", "ready": False, "restartCount": 1, "lastState": {"terminated": ended}}
    world.run_canary(containerStatuses=[{**status, "state": {"running": {}}}])
    world.settle()
    words = "rolled back: the engine of pod chat-canary-x ended with exit code 139 (Error): boom"
    assert world.condition()[1] == "CanaryCrashed"
    assert world.condition()[2].startswith(words)


def test_a_pod_that_a_later_step_adds_may_crash_before_it_is_ready() -> None:
    """In the first step, a start may fail too. A crash of a pod that serves since the step before is a rollback."""
    spec = {**BASE, "rollout": {"canary": {"steps": [{"percent": 30, "minutes": 5}, {"percent": 60, "minutes": 5}]}}}
    world = World(stored(**spec))
    world.settle()
    world.apply(stored(**spec, engine={"device": "cpu", "tokenBudget": 512}, generation=2))
    world.settle()
    world.run_canary()
    world.settle()
    world.measure()
    world.settle()
    assert (world.canary()["step"], "measuredSince" in world.canary()) == (2, False)
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": (world.now + timedelta(seconds=9)).isoformat()}
    crashed = [{"name": "engine", "image": "e", "restartCount": 1, "lastState": {"terminated": ended}, "state": {}}]
    for seconds, outcome in ((5, None), (-5, "RolledBack")):
        created = (world.now + timedelta(seconds=seconds)).isoformat()
        world.run_canary(ready=False, containerStatuses=crashed)
        for each in world.seen.canary_pods:
            each.metadata["creationTimestamp"] = created
        world.settle()
        assert world.canary().get("outcome") == outcome
    assert world.canary()["reason"] == "CanaryCrashed"


def test_a_long_message_of_a_crash_fits_into_the_status(world: World) -> None:
    """An API server that rejects the status would keep the share of a revision that crashes."""
    limit = structural(CanaryStatus)["properties"]["message"]["maxLength"]
    started(world)
    finished = (world.now + timedelta(seconds=5)).isoformat()
    ended = {"exitCode": 1, "reason": "Error", "finishedAt": finished, "message": "x" * 4096}
    status = {"name": "engine", "image": "e", "ready": False, "restartCount": 1, "lastState": {"terminated": ended}}
    world.run_canary(containerStatuses=[{**status, "state": {"running": {}}}])
    world.settle()
    assert world.canary()["reason"] == "CanaryCrashed"
    assert len(world.canary()["message"]) <= limit
    assert world.canary()["message"].startswith("the engine of pod chat-canary-x ended with exit code 1 (Error): xxx")


def test_pods_of_an_earlier_canary_do_not_count(world: World) -> None:
    world.apply(NEWEST)
    world.settle()
    world.run_canary()
    stale = [copy.deepcopy(each.obj) for each in world.seen.canary_pods]
    for each in stale:
        each["metadata"]["labels"]["pod-template-hash"] = "earlier"
    world.seen = replace(world.seen, canary_pods=tuple(map(Pod, stale)))
    world.settle()
    assert world.canary()["percent"] == 0


def test_while_a_canary_has_requests_no_replica_is_removed() -> None:
    scaling = {"autoscaling": {"minReplicas": 1, "maxReplicas": 8}}
    spec = {name: value for name, value in BASE.items() if name != "replicas"} | scaling
    autoscaled = World(stored(**spec))
    live = copy.deepcopy(autoscaled.seen.child(DEPLOYMENT))
    assert live is not None
    live["spec"]["replicas"] = 4
    autoscaled.seen = autoscaled.seen.with_child(DEPLOYMENT, live)
    assert subject_of(autoscaled.situation(), 5.0).policy.min_replicas == 1
    autoscaled.apply(stored(**spec, engine={"device": "cpu", "tokenBudget": 512}, generation=2))
    autoscaled.reconcile()
    assert subject_of(autoscaled.situation(), 5.0).policy.min_replicas == 4
    assert autoscaled.situation().min_replicas == 4


def test_only_the_pods_of_a_measured_step_are_scraped(world: World) -> None:
    assert subject_of(world.situation(), 5.0).trial is None
    world.apply(NEWEST)
    world.settle()
    trial = subject_of(world.situation(), 5.0).trial
    assert trial is not None
    assert (trial.revision, trial.pods) == (REVISION, ())
    world.run_canary(ready=False)
    trial = subject_of(world.situation(), 5.0).trial
    assert trial is not None
    assert trial.pods == (), "until they are ready"
    world.run_canary()
    world.settle()
    trial = subject_of(world.situation(), 5.0).trial
    assert trial is not None
    assert len(trial.pods) == 2


def test_a_refused_template_forgets_no_rollback(world: World) -> None:
    started(world).measure(errors=50.0)
    world.settle()
    refused = copy.deepcopy(NEWEST)
    refused["spec"]["podTemplate"] = {"spec": {"hostNetwork": True}}
    world.apply(refused)
    world.settle()
    assert world.condition()[1] == "PodTemplateRefused"
    assert world.canary()["outcome"] == "RolledBack"
    world.apply(NEWEST)
    world.settle()
    assert world.condition()[1] == "CanaryFailsRequests"
    assert Canary.from_status(world.canary()) is not None
    assert all(kind != POD for kind, _ in world.seen.children)

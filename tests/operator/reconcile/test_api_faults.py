"""Faults of the API server: errors, lost responses, delays and hangs. The operator backs off, reports and converges."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cluster.controlplane import ControlPlane
from fastgen import exit_codes
from fastgen_operator.kinds import POD, POD_DISRUPTION_BUDGET
from fastgen_operator.kube.transport import KubeError
from harness.adverse import NO_GPU, bind, bury, node, quota, record
from harness.chart import operator_kubeconfig
from harness.process import OperatorProcess
from harness.proxy import UNAVAILABLE, Answer, Cut, Fault, Gone, Hang, Late, Mute, Proxy, Request, Slow, overloaded
from harness.space import NOW, Space, resource
from harness.webhook import mirror_image, mutating
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("unattended")]

Start = Callable[..., OperatorProcess]


@pytest.fixture
def proxy(plane: ControlPlane) -> Iterator[Proxy]:
    with Proxy(operator_kubeconfig(plane)) as started:
        yield started


@pytest.fixture
def start(proxy: Proxy, space: Space, tmp_path: Path, operators: list[OperatorProcess]) -> Start:
    """Start an operator behind the proxy, in the test's namespace. It relists only after minutes."""

    def start(*arguments: str, wait: bool = True) -> OperatorProcess:
        defaults = ("--namespace", space.name, "--request-seconds", "1.5", "--relist-seconds", "300")
        kubeconfig = proxy.kubeconfig(tmp_path / "kubeconfig")
        operator = OperatorProcess(kubeconfig, tmp_path / "operator.log", (*defaults, *arguments))
        operators.append(operator)
        if wait:
            operator.start()
        else:
            operator.launch()
        return operator

    return start


def wait_served(space: Space, count: int = 1) -> None:
    space.make_ready(count=count)
    space.wait_condition("Ready", "True", "AllReplicasReady")


def once_each(fault: Fault) -> Callable[[Request], Fault | None]:
    """Inject the fault into the first attempt of each write, except Events, which are not retried."""
    met: set[tuple[str, str]] = set()

    def rule(request: Request) -> Fault | None:
        place = request.method, request.path
        if not request.is_write or request.path.endswith("/events") or place in met:
            return None
        met.add(place)
        return fault

    return rule


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Answer(409), "injected 409"),
        (overloaded(1), "Too many requests"),
        (Answer(429, {"Retry-After": "1"}), "injected 429"),
        (Answer(500), "injected 500"),
        (Answer(503, {"Retry-After": "1"}), "injected 503"),
        (Cut(), "reaching the API server"),
        (Hang(), "reaching the API server"),
    ],
    ids=[
        *("conflict", "overload", "too-many-requests", "server-error", "unavailable"),
        *("cut-after-commit", "timeout-after-commit"),
    ],
)
def test_failed_writes_are_retried_and_nothing_is_created_twice(
    fault: Fault, words: str, proxy: Proxy, space: Space, start: Start
) -> None:
    operator = start()
    proxy.rule = once_each(fault)
    space.apply(resource())
    wait_served(space)
    made = Counter(request.path for request, status in proxy.responses if status == 201 and request.method == "PATCH")
    assert max(made.values()) == 1
    assert len(space.items("replicasets")) == 1
    assert words in operator.log.read_text()
    # For the Deployment's dependencies, the Deployment and the status; a connection error ends a reconcile at once.
    assert operator.metrics()["fastgen_operator_reconcile_errors_total", ""] >= 3
    assert "Traceback" not in operator.log.read_text()


def test_an_overloaded_api_server_is_left_alone_for_as_long_as_it_says(
    proxy: Proxy, space: Space, start: Start
) -> None:
    start()
    asked: list[float] = []

    def rule(request: Request) -> Fault | None:
        if request.is_write and not asked:
            asked.append(time.monotonic())
            return overloaded(4)
        return None

    proxy.rule = rule
    space.apply(resource())
    space.apply(resource("other"))
    wait_served(space)
    space.make_ready("other")
    space.wait_condition("Ready", "True", "AllReplicasReady", "other")
    # The reconcile of the other resource may have a request on its way, and Events have no retries.
    early = [request for request, at in proxy.arrivals if request.is_write and asked[0] < at < asked[0] + 3.9]
    assert len(early) <= 2, early


def test_what_the_api_server_says_about_one_request_delays_no_other_resource(
    proxy: Proxy, space: Space, start: Start
) -> None:
    """A Status with Retry-After, as from an admission webhook or a quota that is busy."""
    start()
    asked: list[float] = []

    def rule(request: Request) -> Fault | None:
        if request.method == "PATCH" and request.path.endswith("/services/chat"):
            asked.append(time.monotonic())
            return Answer(429, {"Retry-After": "30"})
        return None

    proxy.rule = rule
    space.apply(resource())
    eventually(lambda: asked, within=20, what="the write that is refused")
    space.apply(resource("other"))
    space.make_ready("other")
    space.wait_condition("Ready", "True", "AllReplicasReady", "other")
    assert len(asked) == 1, "the other resource was served meanwhile"
    eventually(lambda: space.get("networkpolicy", "chat"), within=20, what="the other children")
    eventually(lambda: len(asked) > 1, within=30, what="the retry")
    assert asked[1] - asked[0] >= 15
    proxy.rule = lambda _: None
    wait_served(space)


def test_bursts_of_refusals_of_writes_lists_and_watches_end_without_anything_lost_or_created_twice(
    proxy: Proxy, space: Space, start: Start
) -> None:
    chance = random.Random(28)
    answers = (overloaded(1), Answer(429, {"Retry-After": "1"}), UNAVAILABLE, Answer(503, {"Retry-After": "1"}))
    operator = start("--relist-seconds", "1", "--retry-seconds", "0.5")
    space.apply(resource("before"))
    space.make_ready("before")
    refused: Counter[str] = Counter()

    def rule(request: Request) -> Fault | None:
        kind = "write" if request.is_write else "watch" if request.is_watch else "list"
        # The first three for sure: a watch that has opened is not opened again.
        if refused[kind] >= 3 and chance.random() < 0.5:
            return None
        refused[kind] += 1
        return chance.choice(answers)

    replicas = itertools.cycle((3, 2))
    least = Counter(write=3, watch=3, list=30)

    def enough() -> bool:
        space.patch("fgd/before", {"spec": {"replicas": next(replicas)}})
        assert refused >= least, refused
        return True

    proxy.rule = rule
    proxy.cut_watches()
    space.apply(resource())
    eventually(enough, within=60, what="refusals")
    proxy.rule = lambda _: None
    space.patch("fgd/before", {"spec": {"replicas": 2}})
    space.make_ready("before", count=2)
    wait_served(space)
    space.wait_condition("Ready", "True", "AllReplicasReady", "before")
    made = Counter(request.path for request, status in proxy.responses if status == 201 and request.method == "PATCH")
    assert max(made.values()) == 1
    assert len(space.items("replicasets")) == 2
    assert operator.is_healthy()
    eventually(lambda: not stale(operator), within=30, what="all kinds to be read again")
    assert "Traceback" not in operator.log.read_text()


def stale(operator: OperatorProcess) -> list[str]:
    return [labels for (name, labels), value in operator.metrics().items() if "operator_stale" in name and value]


def test_a_change_between_plan_and_write_is_seen_before_the_write_is_repeated(
    proxy: Proxy, space: Space, start: Start
) -> None:
    operator = start("--request-seconds", "20")  # the proxy handles no other request while kubectl runs
    space.apply(resource())
    wait_served(space)
    written: list[int] = []

    def rule(request: Request) -> Fault | None:
        if request.method == "PATCH" and request.path.endswith("/deployments/chat") and len(written) < 2:
            written.append(len(proxy.responses))
            body = {"spec": {"template": {"spec": {"nodeSelector": {f"disk{len(written)}": "none"}}}}}
            space.kubectl("patch", "deployment", "chat", "--patch", json.dumps(body))
        return None

    proxy.rule = rule
    space.patch("fgd/chat", {"spec": {"engine": {"tokenBudget": 512}}})
    eventually(lambda: len(written) == 2, within=20, what="two writes that come too late")

    def is_intended() -> bool:
        template = str(space.template())
        return "512" in template and "disk1" not in template and "disk2" not in template

    eventually(is_intended, within=20, what="the new template, without the other writer's fields")
    space.finish_rollout()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    answers = [
        status
        for request, status in proxy.responses[written[0] :]
        if request.method == "PATCH" and request.path.endswith("/deployments/chat")
    ]
    # Then perhaps once more, because the controller writes the status.
    assert answers[:2] == [409, 409]
    assert 200 in answers
    assert "Traceback" not in operator.log.read_text()


def test_a_failing_api_server_is_not_overloaded_and_resources_converge_after_it_recovers(
    proxy: Proxy, space: Space, start: Start
) -> None:
    operator = start("--retry-seconds", "0.5", "--retry-limit-seconds", "10", "--resync-seconds", "5")
    for number in range(3):
        space.apply(resource(f"chat{number}"))
        space.make_ready(f"chat{number}")
        space.wait_condition("Ready", "True", "AllReplicasReady", f"chat{number}")
    before = len(proxy.arrivals)
    proxy.rule = lambda _: UNAVAILABLE
    proxy.cut_watches()
    for number in range(3):
        space.patch(f"fgd/chat{number}", {"spec": {"replicas": 2}})
    began = time.monotonic()
    eventually(lambda: time.monotonic() > began + 10, within=20, what="an outage of 10 seconds")
    during = [request for request, at in proxy.arrivals[before:] if at < began + 10]
    watches = sum(request.is_watch or request.is_list for request in during)
    writes = len(during) - watches
    kinds = len({request.path for request, _ in proxy.arrivals if request.is_watch})
    # Each watch 1, 2, 4, 7 seconds after it broke; each reconcile by its own backoff; each resync once in 5 seconds.
    assert watches <= kinds * 7 + 10
    assert writes <= 3 * 8
    proxy.rule = lambda _: None
    for number in range(3):
        space.make_ready(f"chat{number}", count=2)
        space.wait_condition("Ready", "True", "AllReplicasReady", f"chat{number}")
    assert operator.is_healthy()


def test_a_resource_deleted_during_its_reconcile_is_no_error(proxy: Proxy, space: Space, start: Start) -> None:
    operator = start("--request-seconds", "20")  # the proxy handles no other request while kubectl runs
    deleted: list[str] = []

    def rule(request: Request) -> Fault | None:
        if request.is_write and request.path.endswith("/fastgendeployments/chat/status") and not deleted:
            deleted.append(space.cluster.kubectl("delete", "fgd", "chat", "--namespace", space.name))
        return None

    proxy.rule = rule
    space.apply(resource())
    eventually(
        lambda: any(status == 404 and seen.path.endswith("/status") for seen, status in proxy.responses),
        within=20,
        what="a status for what is gone",
    )
    shown = ("fastgen_operator_desired_replicas", f"chat/{space.name}")
    eventually(lambda: shown not in operator.metrics(), within=20, what="a reconcile that finds nothing")
    assert operator.metrics()["fastgen_operator_reconcile_errors_total", ""] == 0
    assert "WARNING" not in operator.log.read_text()


@pytest.mark.parametrize("fault", [None, Gone()], ids=["dropped", "gone"])
def test_closed_watches_are_reopened_without_missing_events(
    fault: Fault | None, proxy: Proxy, space: Space, start: Start
) -> None:
    operator = start()
    space.apply(resource())
    wait_served(space)
    broken: set[str] = set()

    def rule(request: Request) -> Fault | None:
        if not request.is_watch or request.path in broken:
            return None
        broken.add(request.path)
        return fault

    proxy.rule = rule
    for replicas in (2, 3):
        proxy.cut_watches()
        space.patch("fgd/chat", {"spec": {"replicas": replicas}})
        wait_served(space, replicas)
    assert operator.is_healthy()
    assert "Traceback" not in operator.log.read_text()


def test_silent_watches_are_detected_and_reopened(proxy: Proxy, space: Space, start: Start) -> None:
    """A half-open connection, as behind a load balancer that dropped it."""
    operator = start("--silence-seconds", "4")
    space.apply(resource())
    wait_served(space)
    mute: Counter[str] = Counter()

    def rule(request: Request) -> Fault | None:
        if not request.is_watch or mute[request.path] > 0:
            return None
        mute[request.path] += 1
        return Mute()

    proxy.rule = rule
    proxy.cut_watches()
    eventually(lambda: any("fastgendeployments" in path for path in mute), within=20, what="a silent watch")
    space.patch("fgd/chat", {"spec": {"replicas": 2}})
    wait_served(space, 2)
    assert operator.is_healthy()


def test_silent_watches_fail_the_probe_while_lists_keep_reconciles_going(
    proxy: Proxy, space: Space, start: Start
) -> None:
    operator = start("--relist-seconds", "1", "--stall-seconds", "3")
    space.apply(resource())
    wait_served(space)
    proxy.rule = lambda request: Mute() if request.is_watch else None
    proxy.cut_watches()
    space.patch("fgd/chat", {"spec": {"replicas": 2}})
    wait_served(space, 2)

    changes = itertools.count()

    def complaint() -> str:
        # What changed before a watch opens, it does not have to deliver.
        space.patch("fgd/chat", {"metadata": {"annotations": {"example.com/changed": str(next(changes))}}})
        answer = operator.probe("healthz")
        words = str(answer.json()["error"]) if answer.status_code == 500 else ""
        # The machine may have stopped for longer than the other signs may take.
        return words if words.startswith("watchSeconds is ") else ""

    eventually(complaint, within=20, what="a probe that fails because of the watches")


def test_an_operator_that_is_slow_because_of_the_api_server_passes_the_liveness_probe(
    proxy: Proxy, space: Space, start: Start
) -> None:
    """The resources that wait for its only worker wait longer than the probe allows for one step."""
    stall = 15.0
    has_begun = threading.Event()
    names = [f"chat{number}" for number in range(9)]

    def slow(request: Request) -> Slow | Late | None:
        if request.is_watch:
            return None
        return Slow(0.2) if has_begun.is_set() else Late(has_begun)

    proxy.rule = slow
    for name in names:
        space.apply(resource(name, replicas=0))
    operator = start("--workers", "1", "--stall-seconds", str(stall), "--request-seconds", "14", wait=False)
    eventually(lambda: operator.probe("healthz"), within=30, what="a health server", every=0.05)
    assert not operator.is_ready(), "nothing was listed"
    has_begun.set()
    began = time.monotonic()
    complaints: list[str] = []

    def all_ready() -> bool:
        answer = operator.probe("healthz")
        if answer.status_code != 200:
            complaints.append(answer.text)
        return all(space.condition("Ready", name).get("status") == "True" for name in names)

    eventually(all_ready, within=90, what="all resources to be ready", every=0.1)
    assert complaints == []
    assert time.monotonic() - began > 1.3 * stall
    assert operator.is_ready()


def test_a_reconcile_that_keeps_failing_is_reported_within_seconds_and_stops_nothing_else(
    proxy: Proxy, space: Space, start: Start
) -> None:
    start()
    space.apply(resource())
    wait_served(space)
    proxy.rule = lambda request: Answer(500) if request.is_write and "/poddisruptionbudgets/" in request.path else None
    space.patch("fgd/chat", {"spec": {"replicas": 2, "disruption": {"minAvailable": 1}}})
    space.make_ready(count=2)
    condition = space.wait_condition("Ready", "False", "ReconcileFailed")
    assert condition["message"] == "injected 500; the operator retries"
    assert space.condition("Available")["status"] == "True", "the pods are counted nevertheless"
    version = space.settled()
    assert space.settled() == version, "the report is not repeated"
    proxy.rule = lambda _: None
    space.wait_condition("Ready", "True", "AllReplicasReady")


def test_a_foreign_field_is_removed_even_if_the_operator_crashes_after_it_took_the_field_over(
    proxy: Proxy, space: Space, start: Start
) -> None:
    operator = start()
    space.apply(resource())
    wait_served(space)
    before = space.get("deployment", "chat")["spec"]["template"]
    # Applies are forced; taking fields over is another patch.
    proxy.rule = lambda request: Answer(500) if "/deployments/" in request.path and "force" in request.query else None
    body = {"spec": {"template": {"spec": {"nodeSelector": {"disk": "none"}}}}}
    space.patch("deployment/chat", body)

    def taken_over() -> bool:
        entries = space.get("deployment", "chat")["metadata"]["managedFields"]
        return all("f:nodeSelector" not in str(each) for each in entries if each["manager"] != "fastgen-operator")

    eventually(taken_over, within=20, what="the field in the operator's entry")
    operator.kill()
    proxy.rule = lambda _: None
    operator.start()
    eventually(lambda: space.get("deployment", "chat")["spec"]["template"] == before, within=20, what="the template")


@pytest.mark.parametrize("fault", [Answer(500), Cut()], ids=["server-error", "cut-after-commit"])
def test_refused_and_rewritten_children_and_replaced_pods_converge_although_every_first_write_fails(
    fault: Fault, proxy: Proxy, space: Space, start: Start, plane: ControlPlane, tmp_path: Path
) -> None:
    """A quota, a mutating webhook, and replicas that wait for the node of their volume."""
    operator = start()
    quota(space, POD_DISRUPTION_BUDGET, "count/poddisruptionbudgets.policy=0")
    home = f"home-{space.name[-20:]}"
    with mutating(space, tmp_path, mirror_image) as hook, node(plane, home):
        proxy.rule = once_each(fault)
        cache = {"size": "1Gi", "preload": False}
        space.apply(resource(model={"source": "hf://tests/tiny"}, cache=cache))
        (first,) = space.wait_pods(1)
        bind(space, first, home)
        space.set_downloaded(first)
        condition = space.wait_condition("Ready", "False", "ApplyRefused")
        assert "the PodDisruptionBudget was refused: " in condition["message"]
        assert space.wait_condition("TemplateUnmodified", "False", "RewrittenByWebhook")
        space.kubectl("delete", "quota", "none")
        space.wait_condition("Ready", "True", "AllReplicasReady")

        space.patch("fgd/chat", {"spec": {"replicas": 2}})
        (waiting,) = [pod for pod in space.wait_pods(2) if pod["metadata"]["name"] != first["metadata"]["name"]]
        space.set_unschedulable(waiting, NO_GPU)
        space.wait_condition("PodsScheduled", "False", "VolumeOnOneNode")
        space.kubectl("delete", "pod", first["metadata"]["name"], "--wait=false")
        bury(space)
        for pod in space.wait_pods(2, replaced={first["metadata"]["name"], waiting["metadata"]["name"]}):
            space.set_downloaded(pod)
        space.wait_condition("Ready", "True", "AllReplicasReady")
    deleted = [request.path for request, status in proxy.responses if request.method == "DELETE" and status == 200]
    assert [path for path in deleted if "/pods/" in path] == [
        f"/api/v1/namespaces/{space.name}/pods/{waiting['metadata']['name']}"
    ]
    assert len(hook.seen) < 20, "a few writes of the operator's, and the controller's"
    assert len(space.items("replicasets")) == 1
    assert "Traceback" not in operator.log.read_text()


def test_what_stops_a_download_and_its_pods_is_named_although_each_first_write_fails(
    proxy: Proxy, space: Space, start: Start, plane: ControlPlane
) -> None:
    """A quota, a scheduling gate, a missing Secret and a hung engine. The first read of Events fails, too."""
    operator = start()
    writes, failed = once_each(Answer(500)), list[str]()

    def rule(request: Request) -> Fault | None:
        if request.is_list and "involvedObject" in request.query and not failed:
            failed.append(request.query)
            return Answer(500)
        return writes(request)

    proxy.rule = rule
    quota(space, POD, "count/pods=0")
    gate: Object = {"spec": {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}}
    model: Object = {"source": "hf://tests/tiny"}
    spec: Object = {"cache": {"size": "1Gi"}, "podTemplate": gate, "apiKeySecretName": "nope"}
    space.apply(resource(model=model, **spec))
    condition = space.wait_condition("Ready", "False", "FailedCreate")
    assert "exceeded quota: none, requested: count/pods=1" in condition["message"]
    space.kubectl("delete", "quota", "none")
    # Another Job does not wait for the retry of the Job controller.
    space.apply(resource(model={**model, "download": {"resources": {}}}, **spec))
    downloads = "fastgen.dev/deployment=chat_fetch"

    def gated() -> Object | None:
        for pod in space.items("pods", labels=downloads):  # also of the first Job, if it is not deleted yet
            if pod["status"].get("phase") != "Succeeded":
                with suppress(KubeError):  # deleted since it was listed
                    space.patch(f"pod/{pod['metadata']['name']}", {"status": {"phase": "Succeeded"}}, "status")
        found = space.condition("Ready")
        return found if found.get("reason") == "SchedulingGated" else None

    condition = eventually(gated, within=20, what="a gated pod") or {}
    assert "held by the scheduling gate kueue.x-k8s.io/admission" in condition["message"]

    home = f"home-{space.name[-20:]}"
    with node(plane, home):
        (pod,) = space.wait_pods(1)
        place = f"pod/{pod['metadata']['name']}"
        space.patch(place, {"spec": {"schedulingGates": None}})
        bind(space, pod, home)
        space.set_pod(pod, ready=False, container={"state": {"waiting": {"reason": "ContainerCreating"}}})
        record(space, pod, "FailedMount", 'secret "nope" not found')
        condition = space.wait_condition("Ready", "False", "FailedMount")
        assert condition["message"].endswith('a volume cannot be mounted: secret "nope" not found')
        died = {"exitCode": exit_codes.HUNG, "reason": "Error", "message": "the engine hangs", "finishedAt": NOW}
        hung = {"restartCount": 1, "state": {"running": {"startedAt": NOW}}, "lastState": {"terminated": died}}
        space.set_pod(pod, ready=False, container=hung)
        condition = space.wait_condition("Ready", "False", "EngineHung")
        assert condition["message"].endswith(": the engine hangs")
        space.set_pod(pod, ready=True)
        space.wait_condition("Ready", "True", "AllReplicasReady")
        bury(space)
    assert failed, "the Events of the Job"
    made = Counter(request.path for request, status in proxy.responses if status == 201 and request.method == "PATCH")
    assert max(made.values()) == 1
    assert "Traceback" not in operator.log.read_text()


@pytest.mark.parametrize("fault", [Answer(409), Cut()], ids=["conflict", "cut-after-commit"])
def test_a_changed_class_is_taken_over_when_each_first_write_fails(
    fault: Fault, proxy: Proxy, space: Space, start: Start
) -> None:
    start("--engine-image", "engine:plain")
    start("--engine-image", "engine:blue", "--operator-class", "blue")
    space.apply(resource())
    wait_served(space)
    for operator_class, image in (("blue", "engine:blue"), (None, "engine:plain")):
        proxy.rule = once_each(fault)
        space.patch("fgd/chat", {"spec": {"operatorClass": operator_class}})

        def taken_over(expected: str = image) -> bool:
            return bool(space.template()["spec"]["containers"][0]["image"] == expected)

        eventually(taken_over, within=20, what=f"the image {image}")
        space.finish_rollout()
        space.wait_condition("Ready", "True", "AllReplicasReady")
    version = space.settled()
    assert space.settled() == version, "they do not fight"
    assert len(space.items("replicasets")) == 2


@pytest.mark.parametrize("fault", [Answer(500), Cut()], ids=["error", "cut-after-commit"])
def test_pods_with_broken_gpus_are_replaced_once_each_although_each_first_write_fails(
    fault: Fault, proxy: Proxy, space: Space, start: Start
) -> None:
    operator = start()
    space.apply(resource(engine={"device": "cuda"}, resources={"gpu": {"count": 1}}))
    wait_served(space)
    proxy.rule = once_each(fault)
    died = {
        "exitCode": exit_codes.DEVICE_FAILED,
        "reason": "Error",
        "message": "the GPU failed: Xid",
        "finishedAt": NOW,
    }
    (pod,) = space.wait_pods(1)
    before = pod["metadata"]["name"]
    space.set_pod(pod, ready=False, container={"restartCount": 1, "state": {"terminated": died}})
    (new,) = space.wait_pods(1, replaced=[before])
    words = f"pod {before}: the GPU failed: Xid; the pod was replaced, and the new one is not ready yet"

    def is_told() -> bool:
        """Return whether the operator has seen the new pod, too."""
        condition = space.condition("Ready")
        return (condition["reason"], condition["message"]) == ("DeviceFailed", words)

    eventually(is_told, within=20, what="the failure and the replacement in the condition")
    space.set_pod(new, ready=True)
    space.wait_condition("Ready", "True", "AllReplicasReady")
    assert space.get("fgd", "chat")["status"]["lastReplacement"]["count"] == 1
    deleted = [request.path for request, status in proxy.responses if request.method == "DELETE" and status == 200]
    assert [path.rpartition("/")[2] for path in deleted if "/pods/" in path] == [before]
    assert "Traceback" not in operator.log.read_text()

"""A restarted operator repairs everything that an operator killed at any of its writes leaves behind.

A reference run counts the writes of a resource's lifecycle: create, edit, scale, delete. Then the same lifecycle is
repeated, with the operator killed at four of its writes and restarted. Over all runs, the operator is killed at each
write, right before its response and right after it. Shorter lives do the same to the writes of a change of the class,
and to the deletions of pods that wait for the node of a volume. `test_interrupted_reconcile.py` interrupts other kinds
of writes, without an API server.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from kubernetes.client import ApiClient, Configuration
from kubernetes.config import load_kube_config

from cluster.controlplane import ControlPlane, free_ports
from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import DEPLOYMENT, FASTGEN, POD, REPLICA_SET, Kind, Object
from fastgen_operator.kube.transport import ApiServer, KubeError
from fastgen_operator.labels_and_annotations import OWNER_LABEL
from fastgen_operator.metrics import Metrics
from harness.chart import operator_kubeconfig
from harness.process import PROGRAM
from harness.proxy import Proxy, Request
from harness.space import NOW, downloaded, is_observed, resource
from support.forking import Forked, fork_server
from support.waiting import eventually

pytestmark = pytest.mark.controlplane

Moment = Literal["before", "after"]
# Its kind (see `kind_of`), and its number among the writes of that kind, from 1. Timing changes the order of the kinds.
Write = tuple[str, int]
NAMESPACE = Kind("", "v1", "Namespace", "namespaces")
CHILDREN = Platform("engine:test").kinds
AT_ONCE = 6
KILLS = 4  # of an operator in one lifecycle
# Values that differ between runs.
MASKED = {
    *("uid", "resourceVersion", "creationTimestamp", "managedFields", "clusterIP", "clusterIPs"),
    *("lastTransitionTime", "lastUpdateTime", "fastgen.dev/applied"),
}
MERGE = "application/merge-patch+json"
# How often these are written depends on timing.
TIMED = {"PATCH fastgendeployments status", "POST events"}
COUNTED_EVENT = "PATCH events"


@dataclass
class Admin:
    """Administrator client of the API server that starts no process per request."""

    server: ApiServer

    @staticmethod
    def of(plane: ControlPlane) -> Admin:
        configuration = Configuration()
        load_kube_config(str(plane.kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        return Admin(ApiServer(ApiClient(configuration), Metrics(), 30))

    def get(self, kind: Kind, namespace: str, name: str = "chat") -> Object:
        found: Object = self.server.request("GET", kind.path(namespace, name))
        return found

    def items(self, kind: Kind, namespace: str | None, selector: str = "") -> list[Object]:
        found: list[Object] = self.server.request("GET", kind.path(namespace), [("labelSelector", selector)])["items"]
        return found

    def create(self, kind: Kind, namespace: str | None, body: Object) -> None:
        self.server.request("POST", kind.path(namespace), body=body, content_type="application/json")

    def patch(self, kind: Kind, namespace: str, name: str, body: Object, subresource: str | None = None) -> None:
        self.server.request("PATCH", kind.path(namespace, name, subresource), body=body, content_type=MERGE)

    def delete(self, kind: Kind, namespace: str | None, name: str) -> None:
        self.server.request("DELETE", kind.path(namespace, name), body={}, content_type="application/json")


@contextmanager
def kubelet(admin: Admin, absent: set[str]) -> Iterator[None]:
    """Make every pod running and ready shortly after its creation, except in the namespaces `absent`."""
    done = threading.Event()

    def make_ready() -> None:
        for pod in admin.items(POD, None, OWNER_LABEL):
            metadata = pod["metadata"]
            if "containerStatuses" in pod.get("status", {}) or metadata.get("deletionTimestamp"):
                continue
            if metadata["namespace"] not in absent:
                # The pod has been deleted already.
                with suppress(KubeError):
                    admin.patch(POD, metadata["namespace"], metadata["name"], {"status": downloaded()}, "status")

    def run() -> None:
        while not done.wait(0.1):
            make_ready()

    with ThreadPoolExecutor(1) as thread:
        work = thread.submit(run)
        yield
        done.set()
        work.result()


@dataclass
class Life:
    """The lifecycle of one resource in its own namespace, with its own operators, one of each class."""

    admin: Admin
    proxy: Proxy
    kubeconfig: Path
    namespace: str
    log: Path
    writes: list[Request] = field(default_factory=list)
    killed: list[tuple[Moment, Request]] = field(default_factory=list)
    _processes: dict[str | None, Forked] = field(default_factory=dict)
    # Held while operators are killed and started: a thread of the proxy does so, and the test at its end.
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _has_ended: bool = False

    def plan(self, kills: dict[Write, Moment]) -> None:
        """Kill and restart all operators at these writes, counted from now on."""
        counts: Counter[str] = Counter()
        numbers: dict[int, int] = {}  # by the identity of a request, until its response is sent
        self.writes.clear()

        def before(request: Request, _: int) -> None:
            if request.is_write:
                self.writes.append(request)
                counts[kind_of(request)] += 1
                numbers[id(request)] = counts[kind_of(request)]
                kill("before", request, numbers[id(request)])

        def after(request: Request, _: int) -> None:
            if request.is_write:
                kill("after", request, numbers.pop(id(request)))

        def kill(moment: Moment, request: Request, number: int) -> None:
            write = kind_of(request), number
            with self._lock:
                if self._has_ended or kills.get(write) != moment:
                    return
                del kills[write]
                self.killed.append((moment, request))
                classes = list(self._processes)
                self.end()
                for operator_class in classes:
                    self.start(operator_class)

        self.proxy.before_response, self.proxy.after_response = before, after

    def start(self, operator_class: str | None = None) -> None:
        ports = free_ports(3)
        chosen = () if operator_class is None else ("--operator-class", operator_class)
        arguments = [
            *("--engine-image", f"engine:{operator_class or 'test'}", *chosen),
            *("--bind-address", "127.0.0.1", "--no-leader-elect"),
            *("--metrics-port", str(ports[0]), "--health-port", str(ports[1])),
            *("--decisions-port", str(ports[2]), "--namespace", self.namespace),
            *("--retry-seconds", "0.1", "--retry-limit-seconds", "0.5", "--resync-seconds", "2"),
        ]
        environment = {**os.environ, "KUBECONFIG": str(self.kubeconfig)}
        self._processes[operator_class] = fork_server(PROGRAM).start(arguments, self.log, environment)

    def end(self) -> None:
        """Kill the operators, as a crash would."""
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._processes.clear()

    def stop(self) -> None:
        with self._lock:
            self._has_ended = True
            self.end()

    def lead(self, expected: dict[str, Any] | None = None) -> dict[str, Any]:
        """Create, edit, scale and delete; return the objects before the deletion.

        They get some time to become the expected ones: the Deployment's controller writes its counts one by one.
        """
        self.admin.create(FASTGEN, self.namespace, resource())
        self.settled(generation=1, replicas=1)
        self.edit(512)
        self.settled(generation=2, replicas=1)
        self.admin.patch(FASTGEN, self.namespace, "chat", {"spec": {"replicas": 2}})
        self.settled(generation=3, replicas=2)
        end = self.rest(expected)
        self.admin.delete(FASTGEN, self.namespace, "chat")
        eventually(lambda: not self.left(), within=60, what=f"an empty {self.namespace}")
        return end

    def change_class(self, kills: dict[Write, Moment], expected: dict[str, Any] | None = None) -> dict[str, Any]:
        """Create, and move to the operator of the class blue, which has another engine image; return the objects."""
        self.start()
        self.start("blue")
        self.admin.create(FASTGEN, self.namespace, resource())
        self.settled(generation=1, replicas=1)
        self.plan(kills)
        self.admin.patch(FASTGEN, self.namespace, "chat", {"spec": {"operatorClass": "blue"}})
        self.settled(generation=2, replicas=1)
        return self.rest(expected)

    def rest(self, expected: dict[str, Any] | None) -> dict[str, Any]:
        """Give the objects some time to become the expected ones, or else to rest; return them."""
        with suppress(TimeoutError):
            eventually(
                lambda: self.objects() == expected if expected else self.rests(), within=20, what="the end state"
            )
        return self.objects()

    def rests(self) -> bool:
        """Return whether the controllers have counted all pods and no object changes for three seconds."""
        before = self.objects()
        workloads = [*before[DEPLOYMENT.name], *before[REPLICA_SET.name]]
        if not all(is_observed(each) and is_counted(each) for each in workloads):
            return False
        time.sleep(3)
        return self.objects() == before

    def wait_killed(self, count: int) -> None:
        """Wait for so many kills: what the write has changed can be seen before the kill after its response."""
        eventually(lambda: len(self.killed) == count, within=20, what=f"{count} kills of the operator")

    def objects(self) -> dict[str, Any]:
        """Return all masked objects that the operator or the Deployment controller created in the namespace."""
        kinds = (FASTGEN, *CHILDREN, REPLICA_SET)
        found: dict[str, Any] = {kind.name: self.items(kind) for kind in kinds}
        found["pods"] = len(self.items(POD))
        return found

    def left(self) -> bool:
        """Return whether any object is left. The pods go last, so most calls send one request."""
        return any(self.items(kind) for kind in (POD, REPLICA_SET, FASTGEN, *CHILDREN))

    def items(self, kind: Kind) -> list[Object]:
        ours = [obj for obj in self.admin.items(kind, self.namespace) if obj["metadata"]["name"].startswith("chat")]
        return sorted((masked(obj, self.namespace) for obj in ours), key=lambda obj: str(obj["metadata"]["name"]))

    def created(self) -> Counter[str]:
        """Return how often each child was created."""
        kinds = "|".join(kind.plural for kind in CHILDREN)
        paths = [request.path for request, status in self.proxy.responses if status == 201]
        return Counter(path for path in paths if re.search(f"/({kinds})/", path))

    def edit(self, token_budget: int) -> None:
        """Edit the spec so that the pods are replaced."""
        self.admin.patch(FASTGEN, self.namespace, "chat", {"spec": {"engine": {"tokenBudget": token_budget}}})

    def settled(self, generation: int, replicas: int) -> None:
        """Wait until the conditions report a complete resource."""

        def look() -> bool:
            obj = self.admin.get(FASTGEN, self.namespace)
            conditions = {each["type"]: each for each in obj.get("status", {}).get("conditions", ())}
            wanted = {"Ready": "AllReplicasReady", "Progressing": "RolloutComplete"}
            return (
                all(
                    kind in conditions
                    and conditions[kind]["reason"] == reason
                    and conditions[kind]["observedGeneration"] == generation
                    for kind, reason in wanted.items()
                )
                and obj["status"]["readyReplicas"] == obj["status"]["replicas"] == replicas
            )

        try:
            eventually(look, within=60, what=f"generation {generation} of {self.namespace}")
        except TimeoutError as error:
            with self._lock:
                alive = [process.poll() is None for process in self._processes.values()]
            status = self.admin.get(FASTGEN, self.namespace).get("status")
            error.add_note(f"operators alive: {alive}\nkilled: {self.killed}\nstatus: {json.dumps(status)}")
            error.add_note(self.log.read_text())
            raise


def masked(value: Any, namespace: str) -> Any:
    if isinstance(value, dict):
        return {name: masked(each, namespace) for name, each in value.items() if name not in MASKED}
    if isinstance(value, list):
        return [masked(each, namespace) for each in value]
    return value.replace(namespace, "NAMESPACE") if isinstance(value, str) else value


def is_counted(workload: Object) -> bool:
    """Return whether the status of a Deployment or ReplicaSet shows all pods of its spec, ready, and no others."""
    wanted, status = workload["spec"]["replicas"], workload.get("status", {})
    return bool(wanted == status.get("replicas", 0) == status.get("readyReplicas", 0))


def differences(expected: Any, found: Any, path: str = "") -> list[str]:
    """Return where two objects differ, and how."""
    if isinstance(expected, dict) and isinstance(found, dict):
        keys = sorted({*expected, *found})
        return [line for key in keys for line in differences(expected.get(key), found.get(key), f"{path}.{key}")]
    if isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = enumerate(zip(expected, found, strict=True))
        return [line for index, pair in pairs for line in differences(*pair, f"{path}[{index}]")]
    return [] if expected == found else [f"{path}: {found!r} instead of {expected!r}"]


@dataclass
class Field:
    """Environment of the lifecycles."""

    plane: ControlPlane
    admin: Admin
    folder: Path
    credentials: Path
    without_kubelet: set[str]

    @contextmanager
    def life(self, name: str) -> Iterator[Life]:
        self.admin.create(NAMESPACE, None, {"metadata": {"name": name}})
        with Proxy(self.credentials) as proxy:
            kubeconfig = proxy.kubeconfig(self.folder / f"{name}.kubeconfig")
            life = Life(self.admin, proxy, kubeconfig, name, self.folder / f"{name}.log")
            try:
                yield life
            finally:
                life.stop()
        self.admin.delete(NAMESPACE, None, name)


@pytest.fixture(scope="module")
def lives(unattended: None, plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Field]:
    del unattended
    admin, folder = Admin.of(plane), tmp_path_factory.mktemp("lives")
    absent: set[str] = set()
    with kubelet(admin, absent):
        yield Field(plane, admin, folder, operator_kubeconfig(plane), absent)


def kind_of(request: Request) -> str:
    """Return method and object of a request, without names that differ between runs."""
    parts = request.path.split("/")
    return " ".join([request.method, *parts[parts.index("namespaces") + 2 :][:1], *parts[-1:][: "status" in parts]])


def test_an_operator_killed_at_any_write_is_replaced_by_one_that_converges_to_the_same_state(lives: Field) -> None:
    with lives.life("reference") as life:
        life.plan({})
        life.start()
        reference = life.lead()
        numbers: Counter[str] = Counter()
        writes: list[Write] = []
        for kind in map(kind_of, life.writes):
            numbers[kind] += 1
            if kind != COUNTED_EVENT:  # whether an Event repeats, and is counted, depends on timing: see the next test
                writes.append((kind, numbers[kind]))
        assert set(life.created().values()) == {1}

    def run(number: int, kills: dict[Write, Moment]) -> tuple[list[tuple[Moment, str]], set[Write]]:
        """Return the writes at which the operator was killed, and those that did not come."""
        with lives.life(f"killed-{number}") as life:
            left = dict(kills)
            life.plan(left)
            life.start()
            end = life.lead(reference)
            assert not differences(reference, end), f"killed at {kills}: {life.killed}"
            assert max(life.created().values()) == 1, f"killed at {kills}: {life.created()}"
            # The namespace can be empty before the kill after the last write.
            with suppress(TimeoutError):
                eventually(lambda: all(kind in TIMED for kind, _ in list(left)), within=5, what="the other kills")
            return [(moment, kind_of(request)) for moment, request in life.killed], set(left)

    lives_needed = -(-len(writes) // KILLS)
    plans: list[dict[Write, Moment]] = []
    for first in range(lives_needed):
        for moments in (("before", "after"), ("after", "before")):
            plans.append(dict(zip(writes[first::lives_needed], itertools.cycle(moments), strict=False)))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ends = list(pool.map(run, range(len(plans)), plans))
    killed = [kill for kills, _ in ends for kill in kills]
    for moment in ("before", "after"):
        assert {kind for each, kind in killed if each == moment} == {kind for kind, _ in writes}
    # How often the status changes, and is reported as an Event, depends on timing. All other kills took place.
    missing = {write for _, left in ends for write in left} - {write for write in writes if write[0] in TIMED}
    assert not missing, f"of the writes without kills: {writes}"


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_operator_killed_while_it_counts_an_event_is_replaced_by_one_that_continues(
    lives: Field, moment: Moment
) -> None:
    with lives.life(f"counting-{moment}") as life:
        life.plan({(COUNTED_EVENT, 1): moment})
        life.start()
        life.admin.create(FASTGEN, life.namespace, resource())
        life.settled(generation=1, replicas=1)
        generation = 1
        while (
            not life.killed and generation < 10
        ):  # each edit replaces the pods and records the same Event, which is counted
            life.edit(512 + generation)
            generation += 1
            life.settled(generation, replicas=1)
        life.wait_killed(1)  # Events are written after the status
        assert [(each, kind_of(request)) for each, request in life.killed] == [(moment, COUNTED_EVENT)]
        life.edit(1024)
        life.settled(generation + 1, replicas=1)
        assert max(life.created().values()) == 1, life.created()


def test_the_masked_objects_still_hold_what_the_operator_wrote(lives: Field) -> None:
    """A mask that hides everything would make the comparison always pass."""
    with lives.life("compared") as life:
        life.start()
        end = life.lead()
    text = json.dumps(end)
    assert "--token-budget" in text
    assert len(end[REPLICA_SET.name]) == 2
    assert end["pods"] == end[DEPLOYMENT.name][0]["spec"]["replicas"] == 2
    assert {kind.name for kind in CHILDREN if end[kind.name]} >= {"Service", "Deployment", "ServiceAccount"}


def test_a_changed_class_is_taken_over_although_both_operators_are_killed_at_its_writes(lives: Field) -> None:
    with lives.life("class-reference") as life:
        reference = life.change_class({})
        # The rest are Events, which a killed operator does not repeat.
        kinds = ("PATCH deployments", "PATCH fastgendeployments status")
        assert set(kinds) <= {kind_of(request) for request in life.writes} <= {*kinds, "POST events", COUNTED_EVENT}
    for number, moments in enumerate((("before", "after"), ("after", "before"))):
        with lives.life(f"class-{number}") as life:
            kills: dict[Write, Moment] = dict(
                zip(((kind, 1) for kind in kinds), itertools.cycle(moments), strict=False)
            )
            end = life.change_class(kills, reference)
            assert not differences(reference, end), life.killed
            life.wait_killed(len(kinds))
            assert max(life.created().values()) == 1, life.created()


def test_waiting_pods_are_replaced_although_the_operator_is_killed_at_their_deletion(lives: Field) -> None:
    """Three replicas with a volume of one node; two of them wait, and the one on the node is deleted."""
    with lives.life("waiting") as life:
        admin, namespace = life.admin, life.namespace
        lives.without_kubelet.add(namespace)
        life.plan({("DELETE pods", 1): "before", ("DELETE pods", 2): "after"})
        life.start()
        cache = {"size": "1Gi", "preload": False}
        admin.create(FASTGEN, namespace, resource(replicas=3, model={"source": "hf://tests/tiny"}, cache=cache))

        def names() -> set[str]:
            return {pod["metadata"]["name"] for pod in admin.items(POD, namespace)}

        eventually(lambda: len(names()) == 3, within=30, what="three pods")
        home, *waiting = sorted(names())
        binding = {"metadata": {"name": home}, "target": {"apiVersion": "v1", "kind": "Node", "name": "home"}}
        path = POD.path(namespace, home, "binding")
        admin.server.request("POST", path, body=binding, content_type="application/json")
        refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
        body = {"status": {"conditions": [{**refused, "lastTransitionTime": NOW}]}}
        for name in waiting:
            admin.patch(POD, namespace, name, body, "status")

        def reported() -> bool:
            found = admin.get(FASTGEN, namespace)["status"]["conditions"]
            return {"PodsScheduled": "VolumeOnOneNode"}.items() <= {
                each["type"]: each["reason"] for each in found
            }.items()

        eventually(reported, within=30, what="pods that wait for the node")
        force = {"gracePeriodSeconds": 0}
        admin.server.request("DELETE", POD.path(namespace, home), body=force, content_type="application/json")
        eventually(
            lambda: len(names()) == 3 and names().isdisjoint({home, *waiting}), within=60, what="three other pods"
        )
        life.wait_killed(2)
        assert [(moment, kind_of(request)) for moment, request in life.killed] == [
            ("before", "DELETE pods"),
            ("after", "DELETE pods"),
        ]
        lives.without_kubelet.remove(namespace)
        life.settled(generation=1, replicas=3)
        deleted = [request.path for request, status in life.proxy.responses if request.method == "DELETE"]
        assert len(deleted) == len(set(deleted)) == 2, "each waiting pod once"

"""The model's volume, the download Job, and the pod template that waits for it."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fastgen_operator.children.model_volume import SAFE_TO_EVICT, model_files
from fastgen_operator.children.platform import Platform
from fastgen_operator.kinds import CLAIM, DEPLOYMENT, JOB, NETWORK_POLICY, Object
from fastgen_operator.labels_and_annotations import CACHED_ANNOTATION, OWNER_LABEL
from fastgen_operator.objects.pod import Pod
from fastgen_operator.plan.observed import Observed
from fastgen_operator.plan.plan import Plan, make_plan
from fastgen_operator.plan.pod_failures import Failure
from fastgen_operator.status.conditions.model_cached import MODEL_CACHED
from fastgen_operator.status.conditions.table import all_conditions
from harness.objects import (
    applied,
    desired_of,
    leaving,
    lose,
    observed,
    pod,
    pod_template,
    replica_set,
    situation,
    spec_of,
    stored,
)

HUB = "hf://tests/tiny"
PLATFORM = Platform("engine:test")


def cached(source: str = HUB, *, cache: Object | None = None, **spec: Any) -> Object:
    """Return a resource with a cache."""
    model = {"source": source, **spec.pop("model", {})}
    return stored(model=model, cache={"size": "1Gi", **(cache or {})}, **spec)


def plan_of(seen: Observed, **known: Any) -> Plan:
    return make_plan(situation(seen, **known), PLATFORM)


def carried_out(seen: Observed) -> Observed:
    """Return the observed resource after executing plans until they are empty; the volume gets a uid."""
    for _ in range(5):
        plan = plan_of(seen)
        if plan == Plan():
            return seen
        assert plan.problem is None
        if plan.needs_nodes:
            plan = plan_of(seen, nodes=())
        for apply in plan.applies:
            before = seen.child(apply.kind, apply.manifest["metadata"]["name"])
            uid = before["metadata"]["uid"] if before else f"uid-{apply.kind.name}-{len(str(seen))}"
            seen = seen.with_child(apply.kind, applied(copy.deepcopy(apply.manifest), uid=uid, generation=1))
        for delete in plan.deletes:
            seen = seen.without_child(delete.kind, delete.child["metadata"]["name"])
    raise AssertionError("the plans do not come to an end")


def jobs(seen: Observed) -> list[Object]:
    return [child for (kind, _), child in seen.children.items() if kind == JOB]


def finished(seen: Observed) -> Observed:
    """Return the observed resource after a successful download."""
    (job,) = jobs(seen)
    done = {**job, "status": {"conditions": [{"type": "Complete", "status": "True"}]}}
    return seen.with_child(JOB, done)


def served(**spec: Any) -> Observed:
    """Return the state with the model in the volume and an existing Deployment."""
    seen = carried_out(finished(carried_out(Observed(resource=cached(**spec)))))
    assert seen.deployment is not None
    return seen


def arguments(job: Object) -> list[str]:
    found: list[str] = job["spec"]["template"]["spec"]["containers"][0]["args"]
    return found


def serves(seen: Observed) -> str:
    """Return the model path in the engine's arguments."""
    assert seen.deployment is not None
    return str(seen.deployment.obj["spec"]["template"]["spec"]["containers"][0]["args"][1])


def test_pods_are_created_after_the_model_is_in_the_volume() -> None:
    seen = carried_out(Observed(resource=cached()))
    assert seen.deployment is None
    assert seen.child(CLAIM) is not None
    (job,) = jobs(seen)
    address = spec_of(seen.resource).model.address
    assert arguments(job) == [
        *("fetch", HUB, "--to", f"/mnt/models/{address}", "--revision", "main", "--keep", address),
    ]
    seen = carried_out(finished(seen))
    assert serves(seen) == f"/mnt/models/{address}"
    assert len(jobs(seen)) == 1, "the Job is the record that the model is there"


def test_pods_keep_their_template_until_the_new_model_is_downloaded_and_scale_meanwhile() -> None:
    seen = served()
    old = serves(seen)
    seen = carried_out(replace(seen, resource=cached(model={"revision": "v2"}, replicas=3, drainSeconds=7)))
    assert serves(seen) == old
    assert seen.deployment is not None
    assert seen.deployment.obj["spec"]["replicas"] == 3
    assert seen.deployment.obj["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 90
    (job,) = jobs(seen)
    kept = {word for flag, word in zip(arguments(job), arguments(job)[1:], strict=False) if flag == "--keep"}
    assert kept == {old.rpartition("/")[2], spec_of(seen.resource).model.address}, "the model that is served stays"
    seen = carried_out(finished(seen))
    assert serves(seen) == model_files(desired_of(seen.resource)).path != old
    assert seen.deployment is not None
    assert seen.deployment.obj["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 37


def test_models_used_by_existing_pods_are_kept_in_the_volume() -> None:
    seen = served()
    lingering = pod("old")
    lingering["metadata"]["annotations"] = {"fastgen.dev/model": "0123456789abcdef"}
    seen = replace(seen, resource=cached(model={"revision": "v2"}), pods=(Pod(lingering),))
    (job,) = jobs(carried_out(seen))
    assert "0123456789abcdef" in arguments(job)


def test_other_edits_do_not_wait_and_start_no_download() -> None:
    seen = served()
    seen = carried_out(replace(seen, resource=cached(engine={"device": "cpu", "image": "mine:2"})))
    assert seen.deployment is not None
    assert seen.deployment.obj["spec"]["template"]["spec"]["containers"][0]["image"] == "mine:2"
    (job,) = jobs(seen)
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "engine:test"


@pytest.mark.parametrize(
    "edit",
    [
        {"model": {"secretName": "token"}},
        {"engine": {"device": "cpu", "image": "mine:2"}},
        {"scheduling": {"nodeSelector": {"disk": "fast"}}},
    ],
)
def test_a_correction_restarts_an_unfinished_download(edit: Any) -> None:
    seen = carried_out(Observed(resource=cached()))
    (before,) = jobs(seen)
    (after,) = jobs(carried_out(replace(seen, resource=cached(**edit))))
    assert before["metadata"]["name"] != after["metadata"]["name"]
    assert arguments(before) == arguments(after), "it goes on with what is there"


def test_a_download_is_not_restarted_when_pods_change() -> None:
    seen = carried_out(Observed(resource=cached()))
    other = pod("old")
    other["metadata"]["annotations"] = {"fastgen.dev/model": "0123456789abcdef"}
    assert plan_of(replace(seen, pods=(Pod(other),))) == Plan()


def test_a_recreated_volume_is_filled_again_and_the_pods_keep_their_template() -> None:
    seen = served()
    path = serves(seen)
    (old,) = jobs(seen)
    claim = seen.child(CLAIM)
    assert claim is not None
    fresh = {**claim, "metadata": {**claim["metadata"], "uid": "another"}}
    seen = carried_out(seen.with_child(CLAIM, fresh))
    (new,) = jobs(seen)
    assert new["metadata"]["name"] != old["metadata"]["name"]
    assert serves(seen) == path


def without_jobs(seen: Observed) -> Observed:
    """Return the observed resource after a cleaner has removed its Jobs."""
    for job in jobs(seen):
        seen = seen.without_child(JOB, job["metadata"]["name"])
    return seen


def with_claim(seen: Observed, *, size: str | None = None, **metadata: Any) -> Observed:
    """Return the observed resource with a changed claim."""
    claim = seen.child(CLAIM)
    assert claim is not None
    changed = copy.deepcopy(claim)
    changed["metadata"] |= metadata
    if size is not None:
        changed["spec"]["resources"]["requests"]["storage"] = size
    return seen.with_child(CLAIM, changed)


def test_a_finished_job_that_is_removed_is_not_missed() -> None:
    seen = without_jobs(served())
    assert plan_of(seen) == Plan()
    ready, found = condition_of(seen)
    assert (found.status, found.reason) == ("True", "Cached")
    assert ready.reason != "Downloading"
    # A cleaner may be faster than the operator is to write to the volume: the status remembers it, too.
    uid = seen.children[CLAIM, "chat"]["metadata"]["uid"]
    address = spec_of(seen.resource).model.address
    forgotten = with_claim(seen, annotations={})
    remembering = replace(forgotten, resource={**seen.resource, "status": {"cachedModel": f"{uid}/{address}"}})
    assert condition_of(remembering)[1].reason == "Cached"
    assert condition_of(carried_out(remembering))[1].reason == "Cached"
    assert JOB not in [apply.kind for apply in plan_of(remembering).applies]
    assert JOB in [apply.kind for apply in plan_of(forgotten, nodes=()).applies]


def test_what_a_volume_remembers_is_of_one_claim_and_one_model() -> None:
    seen = without_jobs(served())
    restored = with_claim(seen, uid="restored-from-a-backup")
    assert situation(restored).cached_model is None
    assert JOB in [apply.kind for apply in plan_of(restored, nodes=()).applies], "its data may be missing"
    other = replace(seen, resource=cached(model={"revision": "v2"}))
    seen = carried_out(other)
    (job,) = jobs(seen)
    address = spec_of(cached()).model.address
    assert address in arguments(job), "the model that the volume remembers stays in it"
    back = carried_out(replace(seen, resource=cached()))
    assert jobs(back) == [], "the first model is still there"


def test_replicas_that_serve_have_the_model_whatever_becomes_of_volume_and_job() -> None:
    seen = without_jobs(served())
    claim = seen.children[CLAIM, "chat"]
    gone = seen.with_child(CLAIM, {**claim, "metadata": {**claim["metadata"], "deletionTimestamp": "now"}})
    assert gone.deployment is not None
    deployment = {**gone.deployment.obj, "status": {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1}}
    sets = replica_set("new", deployment["spec"]["template"])
    sets["metadata"]["ownerReferences"] = [{"uid": deployment["metadata"]["uid"], "controller": True}]
    gone = replace(gone.with_child(DEPLOYMENT, deployment), replica_sets=(sets,))
    serving = replace(gone, pods=(Pod(pod(ready=True)),))
    assert condition_of(serving)[1].reason == "Cached"
    assert condition_of(gone)[1].reason == "Downloading", "without a replica, the volume matters"
    changed = replace(serving, resource=cached(model={"revision": "v2"}))
    assert condition_of(changed)[1].reason == "Downloading", "the replicas serve another model"


@pytest.mark.parametrize(("live", "size"), [("3Gi", "3Gi"), ("1024Mi", "1Gi"), ("512Mi", "1Gi")])
def test_a_volume_that_somebody_else_has_grown_keeps_its_size(live: str, size: str) -> None:
    seen = with_claim(served(), size=live)
    claim = lose(seen.children[CLAIM, "chat"], "f:spec", "f:resources")
    (apply,) = [apply for apply in plan_of(seen.with_child(CLAIM, claim)).applies if apply.kind == CLAIM]
    assert apply.manifest["spec"]["resources"]["requests"]["storage"] == size


def test_a_volume_that_is_being_deleted_gets_no_job() -> None:
    seen = carried_out(Observed(resource=cached()))
    claim = seen.child(CLAIM)
    assert claim is not None
    leaving = {**claim, "metadata": {**claim["metadata"], "deletionTimestamp": "now"}}
    plan = plan_of(seen.with_child(CLAIM, leaving))
    assert [delete.kind for delete in plan.deletes] == [JOB]
    assert JOB not in [apply.kind for apply in plan.applies]


def test_removing_the_cache_deletes_volume_and_job_and_pods_download_themselves() -> None:
    seen = carried_out(replace(served(), resource=stored(model={"source": HUB})))
    assert jobs(seen) == []
    assert seen.child(CLAIM) is None
    assert seen.deployment is not None
    spec = seen.deployment.obj["spec"]["template"]["spec"]
    assert spec["initContainers"][0]["args"][:2] == ["fetch", HUB]
    assert {"name": "models", "emptyDir": {}} in spec["volumes"]


def test_a_cache_added_to_pods_that_download_themselves_is_filled_before_they_change() -> None:
    seen = carried_out(Observed(resource=stored(model={"source": HUB})))
    before = seen.deployment
    seen = carried_out(replace(seen, resource=cached()))
    assert before is not None
    assert seen.deployment is not None
    assert seen.deployment.obj["spec"]["template"] == before.obj["spec"]["template"]
    seen = carried_out(finished(seen))
    assert seen.deployment is not None
    assert "initContainers" not in seen.deployment.obj["spec"]["template"]["spec"]


def template_of(owner: Object) -> Object:
    template: Object = pod_template(owner)
    return template


@pytest.mark.parametrize(
    ("source", "path", "volume"),
    [
        ("file:///models/a.gguf", "/models/a.gguf", None),
        ("pvc://mine/folder/a.gguf", "/mnt/models/folder/a.gguf", {"persistentVolumeClaim": {"claimName": "mine"}}),
        ("oci://r.example/m:1", "/mnt/models/models", {"image": {"reference": "r.example/m:1"}}),
        ("oci://r:5/a/m@sha256:0#/a.gguf", "/mnt/models/a.gguf", {"image": {"reference": "r:5/a/m@sha256:0"}}),
        ("oci://r.example/m:1@sha256:0#/", "/mnt/models", {"image": {"reference": "r.example/m:1@sha256:0"}}),
        ("hf://o/n", "/mnt/models/{address}", {"emptyDir": {}}),
        ("hf://o/n/sub/a.gguf", "/mnt/models/{address}/a.gguf", {"emptyDir": {}}),
        ("s3://b/some/prefix", "/mnt/models/{address}", {"emptyDir": {}}),
    ],
)
def test_each_kind_of_source_is_mounted_read_only_for_the_engine(source: str, path: str, volume: Any) -> None:
    owner = stored(model={"source": source})
    spec = template_of(owner)["spec"]
    engine = spec["containers"][0]
    assert engine["args"][1] == path.format(address=spec_of(owner).model.address)
    mounts = [mount for mount in engine["volumeMounts"] if mount["name"] == "models"]
    assert mounts == ([] if volume is None else [{"name": "models", "mountPath": "/mnt/models", "readOnly": True}])
    volumes = [each for each in spec["volumes"] if each["name"] == "models"]
    assert volumes == ([] if volume is None else [{"name": "models", **volume}])


# What an author may set beside spec.cache without a right on any claim: the policy takes that name for the cache's own.
THEIRS: Object = {
    "spec": {
        "volumes": [
            {"name": "models", "persistentVolumeClaim": {"$patch": "delete"}, "emptyDir": {}},
            {"name": "theirs", "persistentVolumeClaim": {"claimName": "chat"}},
        ],
        "containers": [{"name": "engine", "volumeMounts": [{"name": "theirs", "mountPath": "/theirs"}]}],
    }
}


@pytest.mark.parametrize("spec", [{"cache": {"preload": False}}, {}, {"podTemplate": THEIRS}])
def test_a_claim_of_another_owner_is_not_mounted_although_it_has_the_name_of_the_cache(spec: Object) -> None:
    """A resource with a Deployment gets a cache later, and its name is that of a claim that somebody else uses."""
    before = carried_out(Observed(resource=stored(model={"source": HUB})))
    assert before.deployment is not None
    foreign: Object = {"metadata": {"name": "chat", "uid": "theirs", "labels": {}}, "spec": {}}
    seen = replace(before, resource=cached(**spec)).with_child(CLAIM, foreign)
    plan = plan_of(seen, nodes=())
    assert plan.problem is not None
    assert plan.problem.reason == "NameTaken"
    assert "a PersistentVolumeClaim named chat exists" in plan.problem.message
    assert CLAIM not in [apply.kind for apply in plan.applies]
    assert JOB not in [apply.kind for apply in plan.applies]
    templates = [apply.manifest["spec"]["template"] for apply in plan.applies if apply.kind == DEPLOYMENT]
    assert all(template == before.deployment.template for template in templates)


def test_without_preload_the_pods_fill_the_volume() -> None:
    owner = cached(cache={"preload": False}, model={"secretName": "token"})
    seen = carried_out(Observed(resource=owner))
    assert jobs(seen) == []
    spec = template_of(owner)["spec"]
    (fetch,) = spec["initContainers"]
    assert "--keep" not in fetch["args"], "a pod does not know what others use"
    assert fetch["envFrom"] == [{"secretRef": {"name": "token"}}]
    assert "envFrom" not in spec["containers"][0], "the engine has no token"
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "chat"}} in spec["volumes"]


def test_the_address_distinguishes_sources_and_revisions_and_defaults_to_main() -> None:
    addresses = [
        spec_of(stored(model=model)).model.address
        for model in (
            {"source": HUB},
            {"source": HUB, "revision": "main"},
            {"source": HUB, "revision": "v2"},
            {"source": f"{HUB}2"},
        )
    ]
    assert addresses[0] == addresses[1]
    assert len(set(addresses)) == 3


def test_the_download_pod_is_restricted_without_permissions_and_not_selected_for_serving() -> None:
    owner = cached(scheduling={"nodeSelector": {"disk": "fast"}, "tolerations": [{"key": "gpu"}]})
    (job,) = jobs(carried_out(Observed(resource=owner)))
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"] == template_of(owner)["spec"]["securityContext"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert job["spec"]["template"]["metadata"]["labels"][OWNER_LABEL] == "chat_fetch"
    assert (spec["nodeSelector"]["disk"], spec["tolerations"][0]["key"]) == ("fast", "gpu")
    assert spec["affinity"] == template_of(owner)["spec"]["affinity"], "it has to run where the engines hold the volume"
    (shared,) = jobs(carried_out(Observed(resource=cached(cache={"accessMode": "ReadWriteMany"}))))
    assert "affinity" not in shared["spec"]["template"]["spec"]
    assert shared["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/os": "linux"}


def test_the_download_has_requests_and_limits_and_the_metadata_and_placement_of_the_engine() -> None:
    patch: Object = {
        "metadata": {"labels": {"team": "search", "app.kubernetes.io/name": "mine"}, "annotations": {"cost": "42"}},
        "spec": {
            "imagePullSecrets": [{"name": "registry"}],
            "schedulerName": "other",
            "dnsConfig": {"nameservers": ["10.0.0.1"]},
        },
    }
    owner = cached(podTemplate=patch, scheduling={"priorityClassName": "high"})
    (job,) = jobs(carried_out(Observed(resource=owner)))
    template = job["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["resources"].keys() == {"requests", "limits"}
    for quantities in container["resources"].values():
        assert quantities.keys() == {"cpu", "memory"}, "a quota may require each of them"
    labels = template["metadata"]["labels"]
    assert (labels["team"], labels["app.kubernetes.io/name"]) == ("search", "fastgen-fetch")
    assert labels[OWNER_LABEL] == "chat_fetch"
    assert template["metadata"]["annotations"] == {SAFE_TO_EVICT: "tmp", "cost": "42"}
    assert {name: template["spec"][name] for name in patch["spec"]} == patch["spec"]
    assert template["spec"]["priorityClassName"] == "high"


@pytest.mark.parametrize("preload", [True, False])
def test_the_resources_of_the_download_replace_the_defaults(preload: bool) -> None:
    download: Object = {"resources": {"limits": {"memory": "4Gi"}}}
    owner = cached(model={"download": download}, cache={"preload": preload})
    if preload:
        (job,) = jobs(carried_out(Observed(resource=owner)))
        (container,) = job["spec"]["template"]["spec"]["containers"]
    else:
        (container,) = template_of(owner)["spec"]["initContainers"]
    assert container["resources"] == download["resources"]


def test_an_edit_of_the_downloads_resources_or_metadata_replaces_a_job_that_has_not_finished() -> None:
    first = carried_out(Observed(resource=cached()))
    for edit in ({"model": {"download": {"resources": {}}}}, {"podTemplate": {"metadata": {"labels": {"a": "b"}}}}):
        (job,) = jobs(carried_out(replace(first, resource=cached(**edit))))
        assert job["metadata"]["name"] != jobs(first)[0]["metadata"]["name"]


def with_sidecar(seen: Observed, fetch: Object, *, native: bool = False) -> Observed:
    """Return the observed resource with a pod of its Job, in which a sidecar runs."""
    (job,) = jobs(seen)
    found = fetching({"state": fetch})
    sidecar = {"name": "proxy", "image": "p", "ready": True, "restartCount": 0, "state": {"running": {}}}
    found["status"].setdefault("initContainerStatuses" if native else "containerStatuses", []).append(sidecar)
    found["metadata"]["ownerReferences"] = [{"uid": job["metadata"]["uid"], "controller": True}]
    return replace(seen, fetch_pods=(Pod(found),))


def test_a_job_is_ended_when_only_a_sidecar_keeps_its_pod_running() -> None:
    seen = carried_out(Observed(resource=cached()))
    done = {"terminated": {"exitCode": 0}}
    (end,) = plan_of(with_sidecar(seen, done)).ends
    assert "because of the running container proxy" in end.why
    for other in ({"running": {}}, {"terminated": {"exitCode": 1}}):
        assert plan_of(with_sidecar(seen, other)).ends == ()
    assert plan_of(with_sidecar(seen, done, native=True)).ends == (), "the kubelet stops it with the pod"
    (job,) = jobs(seen)
    ended = {**job, "metadata": {**job["metadata"]}}
    ended["metadata"]["annotations"] = {**job["metadata"]["annotations"], "fastgen.dev/downloaded": "true"}
    seen = with_sidecar(seen, done).with_child(JOB, ended)
    assert plan_of(seen).ends == ()
    assert carried_out(seen).deployment is not None, "the download counts as complete"


def test_a_download_pod_reaches_only_dns_and_sources_and_accepts_no_connections() -> None:
    seen = carried_out(Observed(resource=cached()))
    fetching = seen.child(NETWORK_POLICY, "chat.fetch")
    serving = seen.child(NETWORK_POLICY)
    assert fetching is not None
    assert serving is not None
    assert fetching["spec"]["podSelector"] == {"matchLabels": {OWNER_LABEL: "chat_fetch"}}
    assert "ingress" not in fetching["spec"]
    assert [rule["ports"][0]["port"] for rule in fetching["spec"]["egress"]] == [53, 443, 80]
    assert [rule["ports"][0]["port"] for rule in serving["spec"]["egress"]] == [53]
    in_pods = carried_out(Observed(resource=stored(model={"source": HUB}))).child(NETWORK_POLICY)
    assert in_pods is not None
    assert in_pods["spec"]["egress"] == fetching["spec"]["egress"]


def fetching(container: Object, *, where: str = "containerStatuses", **more: Any) -> Object:
    """Return a pod whose download container has this state."""
    status = {"name": "fetch", "image": "e", "ready": False, "restartCount": 0, **container}
    statuses: Object = {where: [status]}
    found = pod(**statuses, **more)
    found["metadata"]["labels"][OWNER_LABEL] = "chat_fetch"
    return found


def ended(code: int, words: str) -> Object:
    message = f"fastgen: 3 files\nfastgen: error: {words}\n"
    return {"terminated": {"exitCode": code, "reason": "Error", "message": message}}


def waiting(reason: str, message: str = "") -> Object:
    return {"waiting": {"reason": reason, "message": message}}


BACK_OFF = waiting("CrashLoopBackOff", "back-off")
NO_ROOM = "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims"
NO_VOLUME = 'running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded'
CONFLICT = 'running Bind plugin "DefaultBinder": Operation cannot be fulfilled on pods/binding "x"'


def failing_scheduler(words: str) -> Object:
    """Return a pod that the scheduler could not bind to the node that it had chosen."""
    found = pod(scheduled=words)
    found["status"]["conditions"][-1]["reason"] = "SchedulerError"
    return found


def evicted(*, name: str = "x", created: str = "2026-01-01T00:00:01Z") -> Object:
    """Return an evicted pod: its container is reported as killed."""
    words = "The node was low on resource: ephemeral-storage."
    unknown = {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown", "startedAt": None}}
    found = fetching({"state": unknown}, name=name, phase="Failed", reason="Evicted", message=words)
    found["metadata"]["creationTimestamp"] = created
    return found


def with_init(container: Object, *, native: bool = False) -> Object:
    """Return a pod of the Job with an injected init container, before the download starts; or a native sidecar."""
    found = fetching({"name": "istio-init", "image": "proxy:1", **container}, where="initContainerStatuses")
    policy = {"restartPolicy": "Always"} if native else {}
    found["spec"]["initContainers"] = [{"name": "istio-init", "image": "proxy:1", **policy}]
    return found


# Pods of the download; status and reason of the condition; part of its message.
TABLE: list[tuple[str, list[Object], str, str, str]] = [
    ("no pod yet", [], "Unknown", "Downloading", "no pod yet"),
    ("a pod without a status", [pod()], "Unknown", "Downloading", HUB),
    ("it runs", [fetching({"state": {"running": {}}})], "Unknown", "Downloading", HUB),
    ("no node", [pod(scheduled=NO_ROOM)], "False", "VolumeNotBound", NO_ROOM),
    # WaitForFirstConsumer: the scheduler has chosen a node, and the provisioner makes no volume there.
    ("no volume", [failing_scheduler(NO_VOLUME)], "False", "VolumeNotBound", NO_VOLUME),
    ("a conflict", [failing_scheduler(CONFLICT)], "False", "Unschedulable", CONFLICT),
    (
        "evicted",
        [evicted()],
        "False",
        "DownloadFailed",
        "Evicted: The node was low on resource: ephemeral-storage.; the",
    ),
    (
        "evicted twice: the newest pod is described",
        [evicted(name="a", created="2026-01-01T00:00:02Z"), evicted(name="b")],
        "False",
        "DownloadFailed",
        "pod chat-new-a: Evicted",
    ),
    (
        "evicted, and goes on",
        [evicted(), fetching({"state": {"running": {}}}, name="y")],
        "Unknown",
        "Downloading",
        HUB,
    ),
    (
        "evicted, and waits for a node",
        [evicted(), pod(scheduled=NO_ROOM, name="y")],
        "False",
        "VolumeNotBound",
        "pod chat-new-y waits",
    ),
    (
        "a container that cannot be created",
        [fetching({"state": waiting("CreateContainerError", "context deadline exceeded")})],
        "False",
        "DownloadFailed",
        "container fetch cannot be created: context deadline exceeded",
    ),
    (
        "an injected init container that crashes",
        [with_init({"state": BACK_OFF, "lastState": ended(126, "iptables: Permission denied"), "restartCount": 4})],
        "False",
        "DownloadFailed",
        "init container istio-init ended with exit code 126 (Error); last log line: fastgen: error: iptables",
    ),
    (
        "the image of a native sidecar",
        [with_init({"state": waiting("ImagePullBackOff", "not found")}, native=True)],
        "False",
        "DownloadFailed",
        "of sidecar istio-init cannot be pulled: not found",
    ),
    (
        "an injected init container that runs",
        [with_init({"state": {"running": {"startedAt": "T1"}}})],
        "Unknown",
        "Downloading",
        "init container istio-init has been running since T1",
    ),
    (
        "an image being pulled",
        [fetching({"state": waiting("ContainerCreating")})],
        "Unknown",
        "Downloading",
        f"the download of {HUB} has not started; pod chat-new-x: starts on node n1",
    ),
    ("no node yet", [pod(scheduled="")], "Unknown", "Downloading", "has not started; pod chat-new-x: waits for the"),
    (
        "at work",
        [fetching({"state": {"running": {}}})],
        "Unknown",
        "Downloading",
        f"pod chat-new-x is downloading {HUB}",
    ),
    (
        "done, and a sidecar goes on",
        [fetching({"state": ended(0, "")})],
        "Unknown",
        "Downloading",
        f"pod chat-new-x has downloaded {HUB}, and has not ended yet",
    ),
    ("no image", [fetching({"state": waiting("ErrImagePull", "gone")})], "False", "DownloadFailed", "pulled: gone"),
    (
        "no secret",
        [fetching({"state": waiting("CreateContainerConfigError", 'secret "token" not found')})],
        "False",
        "SecretNotFound",
        'secret "token" not found: create it, or correct spec.podTemplate',
    ),
    ("not there", [fetching({"state": ended(3, "no such")})], "False", "SourceNotFound", "no such: correct spec.model"),
    (
        "refused",
        [fetching({"state": BACK_OFF, "lastState": ended(4, "gated")})],
        "False",
        "AccessDenied",
        "gated: create a Secret with credentials that have read access, and name it in spec.model.secretName",
    ),
    ("full", [fetching({"state": BACK_OFF, "lastState": ended(5, "full")})], "False", "VolumeFull", "raise spec.cache"),
    ("cut", [fetching({"state": BACK_OFF, "lastState": ended(1, "cut")})], "False", "DownloadFailed", "cut"),
    (
        "killed",
        [fetching({"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}})],
        "False",
        "DownloadFailed",
        "exit code 137 (OOMKilled): its node had no memory left: set spec.model.download.resources.requests.memory",
    ),
    (
        "tried again",
        [fetching({"state": {"running": {}}, "lastState": ended(1, "cut"), "restartCount": 2})],
        "Unknown",
        "Downloading",
        "attempt 3; the previous one failed: cut",
    ),
]


@pytest.mark.parametrize(("pods", "status", "reason", "words"), [row[1:] for row in TABLE], ids=[r[0] for r in TABLE])
def test_model_cached_reports_the_state_of_the_download(
    pods: list[Object], status: str, reason: str, words: str
) -> None:
    seen = replace(carried_out(Observed(resource=cached())), fetch_pods=tuple(map(Pod, pods)))
    ready, found = condition_of(seen)
    assert (found.status, found.reason) == (status, reason)
    assert words in found.message
    assert (ready.status, ready.reason) == (status, reason), "the cause comes before what follows from it"


@pytest.mark.parametrize(
    ("capacity", "words"),
    [
        ("1Gi", "full: raise spec.cache.size"),
        ("1024Mi", "full: raise spec.cache.size"),
        ("512Mi", "full: the volume chat has not grown from 512Mi to 1Gi yet"),
    ],
)
def test_a_full_volume_that_does_not_grow_is_not_asked_to_grow_again(capacity: str, words: str) -> None:
    seen = carried_out(Observed(resource=cached()))
    claim = seen.child(CLAIM)
    assert claim is not None
    seen = seen.with_child(CLAIM, {**claim, "status": {"capacity": {"storage": capacity}}})
    full = fetching({"state": BACK_OFF, "lastState": ended(5, "full")})
    _, found = condition_of(replace(seen, fetch_pods=(Pod(full),)))
    assert found.reason == "VolumeFull"
    assert found.message.startswith(words)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            {"state": waiting("CreateContainerConfigError", 'secret "token" not found')},
            'secret "token" not found: create it, or correct spec.model.secretName',
        ),
        (
            {"state": waiting("CreateContainerConfigError", 'secret "other" not found')},
            'secret "other" not found: create it, or correct spec.podTemplate',
        ),
        (
            {"state": BACK_OFF, "lastState": ended(4, "gated")},
            "gated: provide credentials with read access in the Secret named by spec.model.secretName",
        ),
        (
            {"state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}},
            "exit code 137 (OOMKilled): raise spec.model.download.resources.limits.memory",
        ),
    ],
)
def test_a_remedy_names_what_the_resource_has(state: Object, words: str) -> None:
    fetch = fetching(state)
    fetch["spec"]["containers"] = [{"name": "fetch", "image": "e", "resources": {"limits": {"memory": "1Gi"}}}]
    seen = carried_out(Observed(resource=cached(model={"secretName": "token"})))
    _, found = condition_of(replace(seen, fetch_pods=(Pod(fetch),)))
    assert found.message.endswith(words)


def test_without_a_cache_an_unbound_volume_is_one_of_the_pod_template() -> None:
    _, found = condition_of(observed(pod(scheduled=NO_ROOM), owner=stored(model={"source": HUB})))
    assert found.reason == "VolumeNotBound"
    assert "waits for a volume" in found.message
    assert "the claims that spec.podTemplate mounts" in found.message


def test_without_a_cache_a_full_disk_is_that_of_the_node() -> None:
    full = fetching({"state": BACK_OFF, "lastState": ended(5, "full")})
    seen = observed(full, owner=stored(model={"source": HUB}))
    _, found = condition_of(seen)
    assert found.reason == "VolumeFull"
    assert "nodes with more free disk space, or set spec.cache" in found.message


def test_a_download_that_something_else_has_ended_is_reported_with_the_remedy() -> None:
    """Such as a deadline that a policy adds to every Job: it stays, and starts no pod any more."""
    seen = carried_out(Observed(resource=cached()))
    (job,) = jobs(seen)
    late = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "Job was active too long"}
    _, found = condition_of(seen.with_child(JOB, {**job, "status": {"conditions": [late]}}))
    assert (found.status, found.reason) == ("False", "DownloadFailed")
    name = job["metadata"]["name"]
    assert found.message.startswith(f"Job {name} was ended: DeadlineExceeded: Job was active too long: ")
    assert f"run kubectl delete job {name}" in found.message
    _, found = condition_of(finished(seen))
    assert found.reason == "Cached"


def test_a_download_on_a_lost_node_is_reported_with_the_remedy() -> None:
    """The Job starts no other pod, because both would write the same files."""
    lost = leaving(pod(), until="2026-01-01T00:01:30Z")
    seen = replace(carried_out(Observed(resource=cached())), fetch_pods=(Pod(lost),))
    for second, status, reason, words in (
        (30, "Unknown", "Downloading", "the next attempt waits: pod chat-new-x on node n1 still holds its resources"),
        (151, "False", "DownloadFailed", "run kubectl taint node n1 node.kubernetes.io/out-of-service"),
    ):
        at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=second)
        _, found = condition_of(seen, now=at)
        assert (found.status, found.reason) == (status, reason)
        assert words in found.message
    _, found = condition_of(replace(seen, fetch_pods=(Pod(lost), Pod(pod(name="y")))))
    assert found.message == "the download of hf://tests/tiny has not started; pod chat-new-y: starts on node n1"
    silent = pod()
    silent["status"]["conditions"].append({"type": "ContainersReady", "status": "True"})
    _, found = condition_of(replace(seen, fetch_pods=(Pod(silent),)))
    assert (found.status, found.message) == ("Unknown", "pod chat-new-x: its node n1 does not respond")


def test_a_suspended_download_and_one_behind_a_gate_are_reported() -> None:
    seen = carried_out(Observed(resource=cached()))
    (job,) = jobs(seen)
    suspended = {**job, "status": {"conditions": [{"type": "Suspended", "status": "True"}]}}
    _, found = condition_of(seen.with_child(JOB, suspended))
    assert (found.status, found.reason) == ("False", "JobSuspended")
    assert f"kubectl patch job {job['metadata']['name']}" in found.message
    suspended["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "gpus"
    assert "Kueue has not admitted it to the queue gpus" in condition_of(seen.with_child(JOB, suspended))[1].message
    held = pod(scheduled="blocked")
    held["status"]["conditions"][-1]["reason"] = "SchedulingGated"
    held["spec"]["schedulingGates"] = [{"name": "a"}]
    _, found = condition_of(replace(seen, fetch_pods=(Pod(held),)))
    assert (found.status, found.reason) == ("False", "SchedulingGated")


def test_queue_labels_reach_the_deployment_the_job_and_their_pods() -> None:
    owner = cached()
    owner["metadata"]["labels"] = {
        **{"kueue.x-k8s.io/queue-name": "cpus", "kueue.x-k8s.io/priority-class": "high"},
        **{"kueue.x-k8s.io/pod-group-name": "mine", "team": "search"},
    }
    owner["spec"]["podTemplate"] = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "gpus"}}}
    seen = carried_out(Observed(resource=owner))
    (job,) = jobs(seen)
    seen = carried_out(finished(seen))
    assert seen.deployment is not None
    for obj in (job, seen.deployment.obj):
        for metadata in (obj["metadata"], obj["spec"]["template"]["metadata"]):
            queue = {name: value for name, value in metadata["labels"].items() if "kueue" in name or name == "team"}
            assert queue == {"kueue.x-k8s.io/queue-name": "gpus", "kueue.x-k8s.io/priority-class": "high"}


REFUSED = "the API server rejects the pod of Job fetch: "


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("failed quota: q: must specify limits.cpu for: fetch", "set these in spec.model.download.resources"),
        ("exceeded quota: q, requested: pods=1, used: pods=9", "or raise the quota"),
        ("minimum memory usage per Container is 2Gi", "correct spec.model.download.resources"),
        ('violates PodSecurity "restricted:latest"', "correct spec.podTemplate"),
        ('admission webhook "costs" denied the request: no label', "in spec.podTemplate.metadata"),
        ("no PriorityClass with name high was found", "correct spec.scheduling.priorityClassName"),
        (
            'error looking up service account space/mine: serviceaccount "mine" not found',
            "correct spec.podTemplate.spec.serviceAccountName",
        ),
        # The requests and limits of the download have a ratio of 10.
        (
            "cpu max limit to request ratio per Container is 2, but provided ratio is 10.000000",
            "set both in spec.model.download.resources",
        ),
        ("insufficient quota to match these scopes: [{PriorityClass In [high]}]", "spec.scheduling.priorityClassName"),
        ('pod rejected: RuntimeClass "kata" not found', "correct spec.scheduling.runtimeClassName"),
        (
            "conflict: runtimeClass.scheduling.nodeSelector[pool] = a; pod.spec.nodeSelector[pool] = b",
            "correct spec.scheduling.nodeSelector",
        ),
        ("pod node label selector conflicts with its namespace node label selector", "the namespace's annotations"),
        (
            "pod tolerations (possibly merged with namespace default ones) conflict with its namespace whitelist",
            "correct spec.scheduling.tolerations",
        ),
        ("image policy webhook backend denied one or more images: unsigned", "spec.engine.image"),
        (
            'volume with secret.secretName="token" is not allowed because service account chat does not reference that '
            "secret",
            "name the Secret in the ServiceAccount",
        ),
        (
            "ValidatingAdmissionPolicy 'costs' with binding 'costs' denied request: no label",
            "in spec.podTemplate.metadata",
        ),
        (
            'Internal error occurred: failed calling webhook "a.b": failed to call webhook: tls: failed to verify '
            "certificate: x509: certificate has expired or is not yet valid",
            "repair or remove the webhook",
        ),
        ("another reason", ""),
    ],
)
def test_a_rejected_download_pod_is_reported_with_the_remedy(words: str, remedy: str) -> None:
    seen = carried_out(Observed(resource=cached()))
    (job,) = jobs(seen)
    failures = {job["metadata"]["name"]: Failure("FailedCreate", REFUSED + words)}
    ready, found = condition_of(seen, failures=failures)
    assert (found.status, found.reason) == ("False", "FailedCreate")
    assert found.message.startswith(REFUSED + words)
    said = found.message.removeprefix(REFUSED + words)
    assert (remedy in said) if remedy else not said
    assert ready.reason == "FailedCreate"


def condition_of(seen: Observed, **known: Any) -> tuple[Any, Any]:
    conditions = all_conditions(situation(seen, **known), None)
    return conditions["Ready"], conditions[MODEL_CACHED]


def test_a_downloaded_model_is_cached_whatever_the_state_of_the_job_pod() -> None:
    _, found = condition_of(served())
    assert (found.status, found.reason) == ("True", "Cached")


def test_an_image_without_a_digest_is_said_to_be_able_to_change() -> None:
    said = {}
    for source in ("oci://r.example/m:1", "oci://r.example/m", "oci://r.example/m:1@sha256:0#/a.gguf"):
        _, found = condition_of(observed(owner=stored(model={"source": source})))
        assert (found.status, found.reason) == ("True", "NotNeeded")
        said[source.partition("@")[2]] = found.message
    assert "each node pulls the image r.example/m and keeps it; its tag can change" in said[""]
    assert "add the digest to spec.model.source" in said[""]
    assert "can change" not in said["sha256:0#/a.gguf"]


@pytest.mark.parametrize("source", ["file:///m", "pvc://mine/m", "oci://r.example/m:1"])
def test_a_model_that_needs_no_download_is_not_needed(source: str) -> None:
    _, found = condition_of(observed(owner=stored(model={"source": source})))
    assert (found.status, found.reason) == ("True", "NotNeeded")


def test_the_model_is_cached_when_all_downloading_pods_have_it() -> None:
    owner = stored(model={"source": HUB}, replicas=2)
    done = fetching({"state": {"terminated": {"exitCode": 0}}}, where="initContainerStatuses")
    busy = fetching({"state": {"running": {}}}, where="initContainerStatuses")
    failed = fetching({"state": BACK_OFF, "lastState": ended(4, "gated")}, where="initContainerStatuses")
    seen = [condition_of(observed(done, other, owner=owner))[1].reason for other in (done, busy, failed)]
    assert seen == ["Cached", "Downloading", "AccessDenied"]
    _, found = condition_of(observed(owner=stored(model={"source": HUB}, replicas=0)))
    assert (found.status, found.reason) == ("True", "NotNeeded")


def test_the_held_deployment_is_written_once_and_names_no_new_model() -> None:
    seen = replace(served(), resource=cached(model={"revision": "v2"}))
    plan = plan_of(seen)
    deployments = [apply.manifest for apply in plan.applies if apply.kind == DEPLOYMENT]
    for manifest in deployments:
        assert seen.deployment is not None
        assert manifest["spec"] == seen.deployment.obj["spec"]


def test_a_refused_pod_template_leaves_the_volume_and_its_record_alone() -> None:
    seen = served()
    claim = seen.claim
    assert claim is not None
    assert CACHED_ANNOTATION in claim.annotations
    refused = cached(podTemplate={"spec": {"containers": [{"name": "engine", "args": ["x"]}]}}, replicas=3)
    plan = plan_of(replace(seen, resource=refused))
    assert plan.problem is not None
    assert plan.problem.reason == "PodTemplateRefused"
    assert [apply.kind for apply in plan.applies] == [DEPLOYMENT]

"""A resource that is deleted without its children, and created again, goes on serving with the same pods."""

from __future__ import annotations

import pytest

from harness.process import OperatorProcess
from harness.space import Space, resource
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.controlplane, pytest.mark.usefixtures("operator")]

KINDS = "deployments,services,serviceaccounts,networkpolicies,poddisruptionbudgets,persistentvolumeclaims,jobs"
CACHED: Object = {"model": {"source": "hf://tests/tiny"}, "cache": {"size": "1Gi"}}


def identities(space: Space) -> dict[str, str]:
    """Return the uid of each child and pod by kind and name."""
    found = space.items(f"{KINDS},pods", labels="fastgen.dev/deployment in (chat,chat_fetch)")
    return {f"{each['kind']} {each['metadata']['name']}": each["metadata"]["uid"] for each in found}


def owners(space: Space) -> set[str]:
    found = space.items(KINDS, labels="fastgen.dev/deployment=chat")
    return {reference["uid"] for each in found for reference in each["metadata"].get("ownerReferences", ())}


def download(space: Space) -> None:
    """Let the download succeed."""

    def pods() -> list[Object]:
        return space.items("pods", labels="fastgen.dev/deployment=chat_fetch")

    (pod,) = eventually(pods, within=20, what="the download's pod") or []
    time = "2026-01-01T00:00:00Z"
    ended = {"exitCode": 0, "reason": "Completed", "startedAt": time, "finishedAt": time}
    container = {"name": "fetch", "image": "e", "imageID": "", "ready": False, "restartCount": 0}
    status = {"phase": "Succeeded", "containerStatuses": [{**container, "state": {"terminated": ended}}]}
    space.patch(f"pod/{pod['metadata']['name']}", {"status": status}, "status")


def test_orphaned_children_are_adopted_without_a_restart(space: Space, operator: OperatorProcess) -> None:
    space.apply(resource(**CACHED))
    download(space)
    space.make_ready()
    space.wait_condition("Ready", "True", "AllReplicasReady")
    before = identities(space)
    space.kubectl("delete", "fgd", "chat", "--cascade=orphan")
    eventually(lambda: owners(space) == set(), within=20, what="children without an owner")
    assert identities(space) == before
    space.apply(resource(**CACHED))
    space.wait_condition("Ready", "True", "AllReplicasReady")
    uid = space.get("fgd", "chat")["metadata"]["uid"]
    eventually(lambda: owners(space) == {uid}, within=20, what="adopted children")
    settled = space.settled()
    operator.let_resyncs_pass(3)
    assert identities(space) == before, "nothing was created, deleted or restarted"
    assert space.versions() == settled
    space.kubectl("delete", "fgd", "chat")
    eventually(lambda: identities(space) == {}, within=30, what="the end of the children with their owner")


def test_children_that_lose_their_controller_get_it_back(space: Space) -> None:
    space.serve()
    before = identities(space)
    for kind in ("deployment", "service", "pdb"):
        space.patch(f"{kind}/chat", {"metadata": {"ownerReferences": None}})
    uid = space.get("fgd", "chat")["metadata"]["uid"]

    def adopted() -> bool:
        live = [space.get(kind, "chat")["metadata"].get("ownerReferences") for kind in ("deployment", "service", "pdb")]
        return all(references and references[0]["uid"] == uid for references in live)

    eventually(adopted, within=20, what="the owner of all three")
    assert identities(space) == before
    space.wait_condition("Ready", "True", "AllReplicasReady")

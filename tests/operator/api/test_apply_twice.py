"""Applying a resource a second time changes nothing, and a resource that no operator has seen is not ready."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from harness.edits import spec_schema
from harness.everything import AUTOSCALED, BLOCK_STORAGE, EVERYTHING
from harness.space import Space, resource
from support.namespace import Object

EXAMPLES = Path(__file__).parents[3] / "examples"
# With a class of no operator, so that nothing else changes them.
UNATTENDED = {"operatorClass": "nobody"}


def resources() -> dict[str, Object]:
    found = {"everything": EVERYTHING, "autoscaled": AUTOSCALED, "block storage": BLOCK_STORAGE, "a minimal one": {}}
    named = {name: resource(**{**spec, **UNATTENDED}) for name, spec in found.items()}
    for path in sorted(EXAMPLES.glob("*.yaml")):
        for obj in yaml.safe_load_all(path.read_text()):
            if obj["kind"] == "FastGenDeployment":
                named[path.name] = {**obj, "spec": {**obj["spec"], **UNATTENDED}}
    return named


@pytest.mark.controlplane
@pytest.mark.parametrize("name", resources())
@pytest.mark.parametrize("way", [(), ("--server-side",)], ids=["client", "server"])
def test_a_second_apply_changes_nothing(name: str, way: tuple[str, ...], space: Space) -> None:
    obj = resources()[name]
    space.apply(obj, *way)
    if way:
        # The first update stores the default of the status, which a creation leaves out.
        space.apply(obj, *way)
    before = space.get("fgd", obj["metadata"]["name"])["metadata"]["resourceVersion"]
    said = space.apply(obj, *way)
    # Server-side apply says so whether or not anything changes.
    assert way or said.split()[-1] == "unchanged", said
    assert space.get("fgd", obj["metadata"]["name"])["metadata"]["resourceVersion"] == before
    # What Argo CD compares: with the live object, each field of the manifest.
    assert space.kubectl("diff", "--filename", "-", *way, stdin=yaml.safe_dump(obj)) == ""


@pytest.mark.controlplane
@pytest.mark.parametrize("way", [(), ("--server-side",)], ids=["client", "server"])
def test_a_number_that_was_never_in_the_manifest_survives_each_apply(way: tuple[str, ...], space: Space) -> None:
    """What a HorizontalPodAutoscaler has set through the scale subresource."""
    manifest = resource(**UNATTENDED)
    space.apply(manifest, *way)
    space.kubectl("scale", "fgd/chat", "--replicas=3")
    space.apply({**manifest, "metadata": {**manifest["metadata"], "labels": {"team": "search"}}}, *way)
    assert space.get("fgd", "chat")["spec"]["replicas"] == 3


@pytest.mark.controlplane
def test_a_number_that_is_taken_out_of_the_manifest_is_removed(space: Space) -> None:
    """As the page on other autoscalers warns."""
    space.apply(resource(replicas=1, **UNATTENDED))
    space.kubectl("scale", "fgd/chat", "--replicas=3")
    space.apply(resource(**UNATTENDED))
    assert "replicas" not in space.get("fgd", "chat")["spec"]


def test_no_item_of_a_list_has_defaults() -> None:
    def check(schema: Object, path: str, in_list: bool) -> None:
        assert not (in_list and "default" in schema), path
        for name, child in schema.get("properties", {}).items():
            check(child, f"{path}.{name}", in_list)
        if "items" in schema:
            check(schema["items"], f"{path}[]", True)

    check(spec_schema(), "spec", False)


@pytest.mark.controlplane
def test_a_resource_that_no_operator_has_seen_is_not_taken_for_ready(space: Space) -> None:
    """By the rules of kstatus, which Flux uses: an observedGeneration that differs means that it is in progress."""
    space.apply(resource(**UNATTENDED))
    live = space.get("fgd", "chat")
    assert live["status"]["observedGeneration"] != live["metadata"]["generation"]

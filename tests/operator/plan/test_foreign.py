"""Which fields of a Deployment are foreign, and what taking them over does to `managedFields`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastgen_operator.kinds import Object
from fastgen_operator.plan.foreign_fields import foreign_fields, take_over

ENGINE = 'k:{"name":"engine"}'
OURS = {"f:containers": {ENGINE: {".": {}, "f:args": {}, "f:env": {'k:{"name":"HOME"}': {"f:value": {}}}}}}
APPLIED: Object = {"f:metadata": {"f:annotations": {"f:fastgen.dev/applied": {}}}}


def fields(pod: Object, **more: Any) -> Object:
    return {"f:spec": {"f:template": {"f:spec": pod}}, **more}


def entry(manager: str, owned: Object, operation: str = "Update", **more: Any) -> Object:
    return {"manager": manager, "operation": operation, "fieldsV1": owned, **more}


OWN = entry("fastgen-operator", fields(OURS, **APPLIED), "Apply")
STATUS = entry("kube-controller-manager", {"f:status": {}}, subresource="status")


def live(*others: Object, own: Object = OWN) -> Object:
    return {"metadata": {"managedFields": [STATUS, own, *others]}}


FOREIGN: dict[str, tuple[Object, list[tuple[str, bool]]]] = {
    "nothing else": (fields(OURS), []),
    "a node selector": (fields({"f:nodeSelector": {}}), [("spec.template.spec.nodeSelector", True)]),
    "a variable of the engine": (
        fields({"f:containers": {ENGINE: {"f:env": {'k:{"name":"A"}': {"f:value": {}}}}}}),
        [("spec.template.spec.containers[engine].env[A]", True)],
    ),
    "a sidecar": (
        fields({"f:containers": {'k:{"name":"proxy"}': {".": {}, "f:image": {}}}}),
        [("spec.template.spec.containers[proxy]", False)],
    ),
    "an annotation": ({"f:spec": {"f:template": {"f:metadata": {"f:annotations": {"f:restartedAt": {}}}}}}, []),
    "a field outside the template": ({"f:spec": {"f:paused": {}}}, []),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_a_field_that_only_another_manager_owns_is_foreign(case: str) -> None:
    owned, expected = FOREIGN[case]
    found = foreign_fields(live(entry("kubectl-edit", owned)))
    assert [(field.name, field.conflicts) for field in found] == expected
    assert {field.manager for field in found} <= {"kubectl-edit"}


def test_everything_that_came_with_an_older_template_conflicts() -> None:
    own = entry("fastgen-operator", fields(OURS), "Apply")
    sidecar = {"f:containers": {'k:{"name":"proxy"}': {".": {}}}}
    (field,) = foreign_fields(live(entry("kubectl", fields(sidecar, **APPLIED)), own=own))
    assert field.conflicts


def test_taking_over_moves_the_fields_and_nothing_else() -> None:
    theirs = fields({"f:nodeSelector": {}, "f:containers": {'k:{"name":"proxy"}': {".": {}, "f:image": {}}}})
    deployment = live(entry("kubectl-edit", theirs), entry("helm", fields({"f:nodeSelector": {}})))
    before = json.dumps(deployment)
    taken = [field for field in foreign_fields(deployment) if field.conflicts]
    status, own, left = take_over(deployment, taken)
    assert status == STATUS
    assert own["fieldsV1"] == fields({**OURS, "f:nodeSelector": {}}, **APPLIED)
    assert left["fieldsV1"] == fields({"f:containers": {'k:{"name":"proxy"}': {".": {}, "f:image": {}}}})
    assert json.dumps(deployment) == before
    after = {"metadata": {"managedFields": [status, own, left]}}
    assert [field.name for field in foreign_fields(after)] == ["spec.template.spec.containers[proxy]"]


def test_a_field_that_two_managers_share_is_taken_over_from_both() -> None:
    own = entry("fastgen-operator", fields(OURS), "Apply")
    proxy = 'k:{"name":"proxy"}'
    undone = entry("kubectl", fields({"f:containers": {proxy: {".": {}, "f:image": {}}}}, **APPLIED))
    edited = entry("kubectl-edit", fields({"f:containers": {proxy: {"f:args": {}}}, "f:hostIPC": {}}))
    deployment = live(undone, edited, own=own)
    taken = [field for field in foreign_fields(deployment) if field.conflicts]
    assert [(field.manager, field.name) for field in taken] == [("kubectl", "spec.template.spec.containers[proxy]")]
    after = take_over(deployment, taken)
    assert after[1]["fieldsV1"] == fields({"f:containers": {**OURS["f:containers"], proxy: {}}})
    assert [each["fieldsV1"] for each in after[2:]] == [APPLIED, fields({"f:hostIPC": {}})]

"""What people get wrong by hand on a live cluster: the resource says what is wrong, keeps serving, and recovers."""

from __future__ import annotations

import pytest

from support.deployments import ServedNamespace, chat, manifest
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.cluster]


def template(space: ServedNamespace) -> Object:
    found: Object = space.get("deployment", "chat")["spec"]["template"]
    return found


def pod_names(space: ServedNamespace) -> list[str]:
    return [pod["metadata"]["name"] for pod in space.pods("chat")]


def test_a_misspelt_field_is_named_while_the_pods_serve_and_the_resource_scales(served: ServedNamespace) -> None:
    served.wait_condition("Ready", "True")
    before, pods = template(served), pod_names(served)
    typo = '{"spec": {"podTemplate": {"spec": {"hostNetwrok": true}}}}'
    served.kubectl("patch", "fgd", "chat", "--type", "merge", "--patch", typo)
    ready = served.wait_condition("Ready", "False", "PodTemplateRefused")
    assert "spec.podTemplate.spec.hostNetwrok: field not declared in schema" in ready["message"]
    assert pod_names(served) == pods
    with served.url("chat") as url:
        assert "Berlin" in chat(url)
        served.kubectl("scale", "fgd/chat", "--replicas=0")
        eventually(lambda: not served.pods("chat"), within=60, what="the end of the pods")
    correction = '{"spec": {"podTemplate": null, "replicas": 1}}'
    served.kubectl("patch", "fgd", "chat", "--type", "merge", "--patch", correction)
    served.wait_condition("Ready", "True")
    assert template(served) == before


def test_a_node_selector_added_by_hand_is_removed_and_its_author_named(served: ServedNamespace) -> None:
    served.wait_condition("Ready", "True")
    before = template(served)
    selector = '{"spec": {"template": {"spec": {"nodeSelector": {"disk": "none"}}}}}'
    served.kubectl("patch", "deployment", "chat", "--patch", selector)
    # The operator sets one of its own, and the field has one owner as a whole.
    words = "Deployment chat restored: spec.template.spec.nodeSelector had been changed by kubectl-patch"

    def named() -> bool:
        return words in [event["message"] for event in served.items("events") if event["reason"] == "Applied"]

    eventually(named, within=60, what=words)
    assert template(served) == before

    def complete() -> bool:
        deployment = served.get("deployment", "chat")
        status = deployment["status"]
        observed = status["observedGeneration"] == deployment["metadata"]["generation"]
        return observed and (status.get("updatedReplicas"), status.get("availableReplicas")) == (1, 1)

    eventually(complete, within=90, what="the rollout")
    served.wait_condition("Ready", "True")
    with served.url("chat") as url:
        assert "Berlin" in eventually(lambda: chat(url), within=30, what="an answer")


def test_a_missing_secret_is_named_until_it_exists(served: ServedNamespace) -> None:
    served.apply(manifest("locked", apiKeySecretName="no-such-secret"))

    def names_secret() -> Object | None:
        ready = served.condition("Ready", "locked")
        return ready if "no-such-secret" in ready["message"] else None

    ready = eventually(names_secret, within=60, what="the Secret in the Ready condition")
    assert ready is not None
    assert (ready["status"], ready["reason"]) == ("False", "FailedMount")
    assert 'secret "no-such-secret" not found' in ready["message"]
    served.kubectl("create", "secret", "generic", "no-such-secret", "--from-literal=api-keys=one-key")
    served.wait_condition("Ready", "True", name="locked")

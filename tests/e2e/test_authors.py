"""An author with only the chart's roles serves by a template of harmless fields, and cannot take the node."""

from __future__ import annotations

import json

import pytest

from cluster.commands import CommandError
from harness.chart import CLUSTER_NAME
from support.deployments import ServedNamespace, chat, manifest
from support.namespace import Object
from support.waiting import eventually

pytestmark = [pytest.mark.cluster]

AUTHOR = "alice"
HARMLESS: Object = {
    "metadata": {"labels": {"team": "search"}},
    "spec": {
        "volumes": [{"name": "scratch", "emptyDir": {}}, {"name": "notes", "configMap": {"name": "notes"}}],
        "containers": [
            {
                "name": "engine",
                "env": [{"name": "COLOUR", "value": "green"}],
                "volumeMounts": [
                    {"name": "scratch", "mountPath": "/scratch"},
                    {"name": "notes", "mountPath": "/notes"},
                ],
            }
        ],
    },
}
ROOT = {"name": "engine", "securityContext": {"privileged": True, "runAsUser": 0, "allowPrivilegeEscalation": True}}
TAKES_THE_NODE: list[Object] = [
    {"volumes": [{"name": "host", "hostPath": {"path": "/"}}]},
    {"hostPID": True},
    {"hostNetwork": True},
    {"containers": [ROOT]},
    {"containers": [{"name": "mine", "image": "mine:1"}]},
    {"nodeName": "node"},
    {"priorityClassName": "system-node-critical"},
    {"volumes": [{"name": "token", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}]},
]


def apply(space: ServedNamespace, author: str, pod_template: Object) -> str:
    """Apply the resource `chat` as the author, and return why it was rejected; empty if it was accepted."""
    try:
        made = manifest("chat", podTemplate=pod_template)
        space.kubectl("apply", f"--as={author}", "--filename", "-", stdin=json.dumps(made))
    except CommandError as error:
        return str(error)
    return ""


def test_an_author_without_rights_on_pods_serves_but_cannot_take_the_node(namespace: ServedNamespace) -> None:
    for role in ("view", "edit"):
        named = f"--clusterrole={CLUSTER_NAME}-{role}"
        namespace.kubectl("create", "rolebinding", f"{AUTHOR}-{role}", named, f"--user={AUTHOR}")
    question = ("auth", "can-i", "get", "fastgendeployments", f"--as={AUTHOR}")
    eventually(lambda: "yes" in namespace.kubectl(*question), within=20, what="the author's rights")
    namespace.kubectl("create", "configmap", "notes", "--from-literal=a=b")
    for spec in TAKES_THE_NODE:
        words = apply(namespace, AUTHOR, {"spec": spec})
        assert "denied request: spec." in words, (spec, words)
    assert apply(namespace, AUTHOR, HARMLESS) == ""
    namespace.wait_condition("Ready", "True")
    with namespace.url("chat") as url:
        assert "Berlin" in chat(url)
    (pod,) = namespace.pods("chat")
    assert pod["metadata"]["labels"]["team"] == "search"
    said = namespace.kubectl("exec", pod["metadata"]["name"], "--", "sh", "-c", "echo $COLOUR; id -u; cat /notes/a")
    colour, user, note = said.split()
    assert (colour, note) == ("green", "b")
    assert user != "0"


def test_the_operator_refuses_such_a_template_also_from_an_administrator(namespace: ServedNamespace) -> None:
    """The administrator of the cluster may create pods, so admission accepts it."""
    namespace.apply(manifest("chat", podTemplate={"spec": {"hostPID": True}}))
    ready = namespace.wait_condition("Ready", "False", "PodTemplateRefused")
    assert "hostPID must be false" in ready["message"]
    assert namespace.pods("chat") == []

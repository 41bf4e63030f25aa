"""The generated CRD: a real API server accepts it, and rejects invalid specs with a message that names the remedy."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from kubernetes.config import new_client_from_config

from cluster.commands import CommandError
from cluster.controlplane import ControlPlane
from fastgen.settings import ENGINE_SETTINGS, SERVER_SETTINGS
from fastgen_operator.api import Spec
from fastgen_operator.api.crd import CHART_PATH, CRD_PATH, chart_yaml, crd_yaml, custom_resource_definition
from fastgen_operator.kinds import FASTGEN, NETWORK_POLICY, POD, Kind
from fastgen_operator.kube.transport import ApiServer, KubeError
from fastgen_operator.metrics import Metrics
from harness.objects import pod_template, stored
from harness.space import Space, resource
from support.manifests import dump_all, load
from support.namespace import Object
from support.pages import documents

ROOT = Path(__file__).parents[3]


def engine(**fields: Any) -> Object:
    return resource(engine={"device": "cpu", **fields})


HUB = {"source": "hf://owner/name"}
DIGEST = f"sha256:{'0' * 64}"
BY_HOST = "spec.model.source must name an image by its registry's host and a lower-case repository"


OFFICE = {
    "name": "office",
    "start": "0 8 * * mon-fri",
    "end": "0 18 * * *",
    "timeZone": "Europe/Berlin",
    "minReplicas": 2,
}


def scheduled(**fields: Any) -> Object:
    """Return a resource with one schedule; a field that is None is left out."""
    schedule = {name: value for name, value in {**OFFICE, **fields}.items() if value is not None}
    return resource(autoscaling={"maxReplicas": 2, "schedules": [schedule]})


def peer(cidr: str, *exceptions: str) -> Object:
    """Return a resource with one range of addresses as peer."""
    return resource(network={"allowFrom": [{"ipBlock": {"cidr": cidr, "except": exceptions}}]})


OUTSIDE = "spec.network.allowFrom: each range in except must be a smaller one within cidr"


# What is wrong, a resource with that defect, and part of the expected message.
INVALID: dict[str, tuple[Object, str]] = {
    "no model": ({**resource(), "spec": {"engine": {"device": "cpu"}}}, "spec.model: Required value"),
    "no device": (resource(engine={}), "spec.engine.device: Required value"),
    "an unknown device": (engine(device="tpu"), 'Unsupported value: "tpu": supported values: "cpu", "cuda"'),
    "device cuda without a GPU": (engine(device="cuda"), "spec.resources.gpu.count must be at least 1"),
    "more GPUs than eight": (
        resource(engine={"device": "cuda"}, resources={"gpu": {"count": 9}}),
        "spec.resources.gpu.count",
    ),
    "more processes than GPUs": (
        resource(engine={"device": "cuda", "tensorParallel": 2}, resources={"gpu": {"count": 1}}),
        "spec.engine.tensorParallel must equal spec.resources.gpu.count if spec.engine.device is cuda",
    ),
    "GPUs without a process": (
        resource(engine={"device": "cuda", "tensorParallel": 1}, resources={"gpu": {"count": 4}}),
        "spec.engine.tensorParallel must equal spec.resources.gpu.count if spec.engine.device is cuda",
    ),
    "more processes than eight": (engine(tensorParallel=9), "spec.engine.tensorParallel"),
    "no process": (engine(tensorParallel=0), "spec.engine.tensorParallel"),
    "--tensor-parallel in extraArgs": (
        engine(extraArgs=["--tensor-parallel", "2"]),
        "spec.engine.extraArgs must not contain a flag that the operator sets",
    ),
    "device cuda with an empty list of device claims": (
        resource(engine={"device": "cuda"}, podTemplate={"spec": {"resourceClaims": []}}),
        "or claim a device in spec.podTemplate.spec.resourceClaims",
    ),
    "GPUs with device cpu": (
        resource(resources={"gpu": {"count": 1}}),
        "spec.resources.gpu.count must be 0 if spec.engine.device is cpu",
    ),
    "an inter-token target in extraArgs": (
        engine(extraArgs=["--inter-token-target=9"]),
        "spec.engine.extraArgs must not contain a flag that the operator sets",
    ),
    "an unknown dtype": (engine(dtype="int3"), 'Unsupported value: "int3"'),
    "a token budget that is not a number": (
        engine(tokenBudget="lots"),
        "spec.engine.tokenBudget must be auto, or an integer",
    ),
    "a token budget in quotes": (engine(tokenBudget="256"), 'spec.engine.tokenBudget: Invalid value: "256"'),
    "a token budget in quotes, and what to write": (
        engine(tokenBudget="256"),
        "spec.engine.tokenBudget must be auto, or an integer",
    ),
    "a request above its limit": (
        resource(resources={"requests": {"cpu": "1500m"}, "limits": {"cpu": 1}}),
        "spec.resources.requests must not exceed spec.resources.limits",
    ),
    "a request of the download above its limit": (
        resource(
            model={**HUB, "download": {"resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1Gi"}}}}
        ),
        "spec.model.download.resources.requests must not exceed spec.model.download.resources.limits",
    ),
    "an excluded address range with too many bits": (
        peer("10.0.0.0/8", "10.1.0.0/33"),
        "spec.network.allowFrom[0].ipBlock.except[0]",
    ),
    "an address range with a byte above 255": (peer("10.0.256.0/8"), "spec.network.allowFrom[0].ipBlock.cidr"),
    "an address range with too many bits": (peer("10.0.0.0/33"), "spec.network.allowFrom[0].ipBlock.cidr"),
    "an IPv6 range with too many bits": (peer("fd00::/129"), "spec.network.allowFrom[0].ipBlock.cidr"),
    "an IPv6 range with two gaps": (peer("fd00::1::/64"), "write one such as 10.0.0.0/8 or fd00::/64"),
    "an IPv6 range with too few groups": (peer("fd00:1:2/64"), "spec.network.allowFrom[0].ipBlock.cidr"),
    "an IPv6 range with too many groups": (peer("1:2:3:4:5:6:7:8:9/64"), "spec.network.allowFrom[0].ipBlock.cidr"),
    "an IPv4 range in an IPv6 one": (peer("::ffff:10.0.0.0/104"), "spec.network.allowFrom[0].ipBlock.cidr"),
    "an excluded range outside": (peer("10.0.0.0/8", "10.1.0.0/16", "11.0.0.0/16"), OUTSIDE),
    "an excluded range that is larger": (peer("10.1.0.0/16", "10.0.0.0/8"), OUTSIDE),
    "an excluded range that is all": (peer("10.0.0.0/8", "10.0.0.0/8"), OUTSIDE),
    "an excluded range of the other family": (peer("10.0.0.0/8", "fd00::/64"), OUTSIDE),
    "an invalid swap space": (engine(kvCache={"swapSpace": "much"}), "spec.engine.kvCache.swapSpace"),
    "a source without a scheme": (
        resource(model={"source": "org/name"}),
        "spec.model.source must be hf://owner/name",
    ),
    "a relative file path as source": (resource(model={"source": "file://models/a"}), "or file:///absolute/path"),
    "a hub model without an owner": (resource(model={"source": "hf://gpt2"}), "must be hf://owner/name"),
    "a hub file that is not a GGUF file": (resource(model={"source": "hf://a/b/c.txt"}), "hf://owner/name/file.gguf"),
    "a bucket without a prefix": (resource(model={"source": "s3://bucket"}), "s3://bucket/prefix"),
    "a claim name in capitals": (resource(model={"source": "pvc://Models/a"}), "pvc://claim/path"),
    "a source path with ..": (resource(model={"source": "pvc://models/../a"}), "must not contain the path element .."),
    "an image without a registry": (resource(model={"source": "oci://models/smollm2:1"}), BY_HOST),
    "an image without a repository": (resource(model={"source": "oci://registry.example:5000"}), BY_HOST),
    "an image in capitals": (resource(model={"source": "oci://registry.example/Models/a:1"}), BY_HOST),
    "an image with a short digest": (resource(model={"source": "oci://registry.example/a@sha256:00"}), BY_HOST),
    "an image with another digest": (
        resource(model={"source": f"oci://registry.example/a@md5:{'0' * 32}"}),
        "oci://registry.example/smollm2@sha256:DIGEST#/smollm2.gguf",
    ),
    "an image with an empty tag": (resource(model={"source": "oci://registry.example/a:"}), BY_HOST),
    "an image with a relative path": (resource(model={"source": "oci://registry.example/a:1#models"}), BY_HOST),
    "an image with a path and no mark": (resource(model={"source": "oci://registry.example/a:1/m.gguf"}), BY_HOST),
    "an image with two paths": (resource(model={"source": "oci://registry.example/a:1#/a#/b"}), BY_HOST),
    "an image in a URL": (resource(model={"source": "oci://https://registry.example/a:1"}), BY_HOST),
    "an image with a user": (resource(model={"source": "oci://me@registry.example/a:1"}), BY_HOST),
    "an image with a path with ..": (
        resource(model={"source": "oci://registry.example/a:1#/models/../etc"}),
        "must not contain the path element ..",
    ),
    "a revision for an image": (
        resource(model={"source": "oci://registry.example/a:1", "revision": "main"}),
        "spec.model.revision applies to hf:// sources only",
    ),
    "a secret for an image": (
        resource(model={"source": "oci://registry.example/a:1", "secretName": "token"}),
        "spec.model.secretName applies to hf:// and s3:// sources only",
    ),
    "a cache for an image": (
        resource(model={"source": "oci://registry.example/a:1"}, cache={"size": "1Gi"}),
        "spec.cache applies to hf:// and s3:// sources only",
    ),
    "a revision for a file source": (
        resource(model={"source": "file:///a", "revision": "main"}),
        "spec.model.revision applies to hf:// sources only",
    ),
    "an invalid revision": (resource(model={**HUB, "revision": "-x y"}), "spec.model.revision"),
    "a secret for a pvc source": (
        resource(model={"source": "pvc://models/a", "secretName": "token"}),
        "spec.model.secretName applies to hf:// and s3:// sources only",
    ),
    "an invalid secret name": (resource(model={**HUB, "secretName": "My_Secret"}), "spec.model.secretName"),
    "a cache for a file source": (
        resource(cache={"size": "1Gi"}),
        "spec.cache applies to hf:// and s3:// sources only",
    ),
    "a cache without a size": (resource(model=HUB, cache={}), "spec.cache.size: Required value"),
    "a cache of size 0": (
        resource(model=HUB, cache={"size": "0Gi"}),
        "spec.cache.size must be a quantity greater than 0",
    ),
    "a cache of an invalid size": (resource(model=HUB, cache={"size": "big"}), "spec.cache.size"),
    "replicas and autoscaling": (
        resource(replicas=1, autoscaling={"maxReplicas": 2}),
        "spec.replicas and spec.autoscaling are mutually exclusive",
    ),
    "a dry run without replicas": (
        resource(autoscaling={"maxReplicas": 2, "mode": "DryRun"}),
        "spec.replicas is required if spec.autoscaling.mode is DryRun",
    ),
    "a schedule without an end": (
        scheduled(end=None),
        "spec.autoscaling.schedules[].end and durationSeconds are mutually exclusive, and one is required",
    ),
    "a schedule with two ends": (
        scheduled(durationSeconds=60),
        "spec.autoscaling.schedules[].end and durationSeconds are mutually exclusive, and one is required",
    ),
    "a schedule that starts in no hour": (
        scheduled(start="0 24 * * *"),
        "spec.autoscaling.schedules[].start must be a cron expression with five fields",
    ),
    "a schedule that ends by a macro": (
        scheduled(end="@daily"),
        "spec.autoscaling.schedules[].end must be a cron expression with five fields",
    ),
    "a schedule in an unknown time zone": (
        scheduled(timeZone="Mars/Olympus"),
        "spec.autoscaling.schedules[].timeZone must be a name of the IANA time zone database",
    ),
    "a schedule in the zone of whatever machine": (
        scheduled(timeZone="Local"),
        "spec.autoscaling.schedules[].timeZone must be a name of the IANA time zone database",
    ),
    "a schedule above maxReplicas": (
        scheduled(minReplicas=3),
        "spec.autoscaling.schedules[].minReplicas must be at most spec.autoscaling.maxReplicas",
    ),
    "a schedule without a name": (scheduled(name=None), "spec.autoscaling.schedules[0].name: Required value"),
    "two schedules of one name": (
        resource(autoscaling={"maxReplicas": 2, "schedules": [OFFICE, OFFICE]}),
        'spec.autoscaling.schedules[1]: Duplicate value: {"name":"office"}',
    ),
    "a scaling policy of an unknown type": (
        resource(
            autoscaling={
                "maxReplicas": 2,
                "scaleUp": {"policies": [{"type": "GPUs", "value": 1, "periodSeconds": 60}]},
            }
        ),
        'Unsupported value: "GPUs"',
    ),
    "autoscaling without maxReplicas": (resource(autoscaling={}), "spec.autoscaling.maxReplicas: Required value"),
    "autoscaling to zero without the gateway": (
        resource(autoscaling={"minReplicas": 0, "maxReplicas": 2}),
        "set spec.gateway.expose to true, or minReplicas to at least 1",
    ),
    "a dry run to zero without the gateway": (
        resource(autoscaling={"minReplicas": 0, "maxReplicas": 2, "mode": "DryRun"}, replicas=1),
        "spec.autoscaling.minReplicas may be 0 only if spec.gateway.expose is true",
    ),
    "fewer than no replicas": (
        resource(autoscaling={"minReplicas": -1, "maxReplicas": 2}, gateway={"expose": True}),
        "spec.autoscaling.minReplicas",
    ),
    "a replica that is idle at once": (
        resource(autoscaling={"minReplicas": 0, "maxReplicas": 2, "idleSeconds": 1}, gateway={"expose": True}),
        "spec.autoscaling.idleSeconds",
    ),
    "a schedule of no replicas": (scheduled(minReplicas=0), "spec.autoscaling.schedules[0].minReplicas"),
    "minReplicas above maxReplicas": (
        resource(autoscaling={"minReplicas": 3, "maxReplicas": 2}),
        "spec.autoscaling.minReplicas must be at most spec.autoscaling.maxReplicas",
    ),
    "a fractional target": (
        resource(autoscaling={"maxReplicas": 2, "targets": {"timeToFirstTokenMilliseconds": 0.5}}),
        "timeToFirstTokenMilliseconds",
    ),
    "utilization above 100 percent": (
        resource(autoscaling={"maxReplicas": 2, "targets": {"utilizationPercent": 101}}),
        "utilizationPercent",
    ),
    "a wanted share of 100 percent": (
        resource(autoscaling={"maxReplicas": 2, "targets": {"attainmentPercent": 100}}),
        "attainmentPercent",
    ),
    "learning that YAML reads as a boolean": (
        resource(autoscaling={"maxReplicas": 2, "learning": False}),
        "spec.autoscaling.learning",
    ),
    "a scale-down step of 0 percent": (
        resource(autoscaling={"maxReplicas": 2, "scaleDown": {"maxStepPercent": 0}}),
        "maxStepPercent",
    ),
    "a volume that only readers can mount": (
        resource(model={"source": "hf://o/n"}, cache={"size": "1Gi", "accessMode": "ReadOnlyMany"}),
        "use ReadWriteMany, or fill a ReadOnlyMany claim yourself and set spec.model.source to pvc://claim/path",
    ),
    "a volume for one pod": (
        resource(model={"source": "hf://o/n"}, cache={"size": "1Gi", "accessMode": "ReadWriteOncePod"}),
        "use ReadWriteOnce, with all replicas on one node, or ReadWriteMany",
    ),
    "an unknown access mode": (
        resource(model={"source": "hf://o/n"}, cache={"size": "1Gi", "accessMode": "RWX"}),
        "spec.cache.accessMode must be ReadWriteOnce or ReadWriteMany",
    ),
    "minAvailable for replicas that move together": (
        resource(model={"source": "hf://o/n"}, cache={"size": "1Gi"}, disruption={"minAvailable": 1}),
        "spec.disruption.minAvailable must be unset or 0 if spec.cache.accessMode is ReadWriteOnce",
    ),
    "placeholder pods for replicas of one node": (
        resource(model=HUB, cache={"size": "1Gi"}, autoscaling={"maxReplicas": 2, "nodeHeadroom": 1}),
        "spec.autoscaling.nodeHeadroom must be 0 if spec.cache.accessMode is ReadWriteOnce",
    ),
    "placeholder pods with claimed devices": (
        resource(
            autoscaling={"maxReplicas": 2, "nodeHeadroom": 1},
            podTemplate={"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimName": "gpu"}]}},
        ),
        "spec.autoscaling.nodeHeadroom must be 0 with spec.podTemplate.spec.resourceClaims",
    ),
    "too many placeholder pods": (
        resource(autoscaling={"maxReplicas": 2, "nodeHeadroom": 101}),
        "spec.autoscaling.nodeHeadroom",
    ),
    "a negative minAvailable": (resource(disruption={"minAvailable": -1}), "spec.disruption.minAvailable"),
    "an empty peer": (
        resource(network={"allowFrom": [{}]}),
        "spec.network.allowFrom: each item must set either ipBlock",
    ),
    "a peer with a pod selector and an IP block": (
        resource(network={"allowFrom": [{"podSelector": {}, "ipBlock": {"cidr": "10.0.0.0/8"}}]}),
        "spec.network.allowFrom: each item must set either ipBlock, or podSelector",
    ),
    "an invalid CIDR": (resource(network={"allowFrom": [{"ipBlock": {"cidr": "everybody"}}]}), "ipBlock.cidr"),
    "an operator class in capitals": (resource(operatorClass="Blue"), "spec.operatorClass"),
    "an empty API key secret name": (resource(apiKeySecretName=""), "spec.apiKeySecretName"),
    "a token budget below maxSequences": (
        engine(tokenBudget=16, maxSequences=32),
        "spec.engine.tokenBudget must be at least spec.engine.maxSequences",
    ),
    "maxSequences above the default token budget": (
        engine(maxSequences=512),
        "or lower maxSequences",
    ),
    "a token budget of 0": (engine(tokenBudget=0), "spec.engine.tokenBudget"),
    "a fractional token budget": (engine(tokenBudget=12.5), "tokenBudget"),
    "a block size that is not a power of two": (engine(kvCache={"blockSize": 48}), "blockSize must be a power of two"),
    "memory above 100 percent": (engine(kvCache={"memoryPercent": 101}), "less than or equal to 100"),
    "a flag that the operator sets": (
        engine(extraArgs=["--port", "1"]),
        "must not contain a flag that the operator sets",
    ),
    "a flag that the operator sets, with its value": (
        engine(extraArgs=["--device=cpu"]),
        "remove it, and use the spec field of the setting if there is one",
    ),
    "a prefix of a flag that the operator sets": (
        engine(extraArgs=["--token-b=5"]),
        "must not contain a flag that the operator sets",
    ),
    "a GPU in the limits": (
        resource(resources={"limits": {"nvidia.com/gpu": 1}}),
        "spec.resources.limits must not contain the GPU resource: set spec.resources.gpu.count instead",
    ),
    "another GPU resource in the requests": (
        resource(resources={"gpu": {"resourceName": "amd.com/gpu"}, "requests": {"amd.com/gpu": 1}}),
        "spec.resources.requests must not contain the GPU resource",
    ),
    "a request that is not a quantity": (
        resource(resources={"requests": {"cpu": "much"}}),
        "spec.resources.requests.cpu",
    ),
    "a GPU resource without a domain": (resource(resources={"gpu": {"resourceName": "gpu"}}), "resourceName"),
    "maxSurge and maxUnavailable both 0": (
        resource(rollout={"maxSurge": 0, "maxUnavailable": 0}),
        "spec.rollout.maxSurge and spec.rollout.maxUnavailable must not both be 0",
    ),
    "a progress deadline below the startup deadline": (
        resource(startupDeadlineSeconds=3600),
        "spec.rollout.progressDeadlineSeconds must be at least spec.startupDeadlineSeconds",
    ),
    "a toleration of every value with a value": (
        resource(scheduling={"tolerations": [{"key": "gpu", "operator": "Exists", "value": "a"}]}),
        "spec.scheduling.tolerations[].value must not be set with the operator Exists",
    ),
    "a toleration without a key": (
        resource(scheduling={"tolerations": [{"value": "a"}]}),
        "spec.scheduling.tolerations[].operator must be Exists without a key",
    ),
    "a toleration for a time without the effect that evicts": (
        resource(scheduling={"tolerations": [{"key": "gpu", "tolerationSeconds": 5}]}),
        "spec.scheduling.tolerations[].tolerationSeconds requires the effect NoExecute",
    ),
    "a toleration of something that is no label key": (
        resource(scheduling={"tolerations": [{"key": "a b", "operator": "Exists"}]}),
        "spec.scheduling.tolerations[0].key",
    ),
    "a node label's value with a space": (
        resource(scheduling={"nodeSelector": {"disk": "very fast"}}),
        "spec.scheduling.nodeSelector.disk",
    ),
    "a PriorityClass with a capital letter": (
        resource(scheduling={"priorityClassName": "High"}),
        "spec.scheduling.priorityClassName",
    ),
    "the same topology twice": (
        resource(
            scheduling={
                "topologySpreadConstraints": [
                    {"topologyKey": "zone"},
                    {"topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule", "maxSkew": 2},
                ]
            }
        ),
        "spec.scheduling.topologySpreadConstraints[] must not repeat a topologyKey",
    ),
    "a label selector without values": (
        resource(network={"allowFrom": [{"podSelector": {"matchExpressions": [{"key": "a", "operator": "In"}]}}]}),
        "values of a label selector are required for the operators In and NotIn",
    ),
    "negative replicas": (resource(replicas=-1), "spec.replicas"),
    "a name too long": (resource("a" * 41), "metadata.name must be at most 40 characters"),
    "a name that starts with a digit": (resource("7b"), "metadata.name must start with a letter"),
    "a name with a dot": (resource("llama.7b"), "because the Service is named after it"),
}


@pytest.mark.controlplane
@pytest.mark.parametrize("case", INVALID)
def test_an_invalid_spec_is_rejected_with_the_field_and_the_remedy(plane: ControlPlane, case: str) -> None:
    obj, words = INVALID[case]
    with pytest.raises(CommandError) as rejected:
        Space(plane, "default").apply(obj, "--dry-run=server")
    assert words in str(rejected.value)


RANGES = {
    "10.0.0.0/8": ("10.1.0.0/16", "10.255.255.255/32"),
    "0.0.0.0/0": ("10.0.0.0/8",),
    "fd00::/8": ("fd00:1:2:3::/64", "FD12:3456:789a:1:2:3:4:5/128"),
    "::/0": (),
}


@pytest.mark.controlplane
@pytest.mark.parametrize(
    "image",
    [
        "registry.example/smollm2",
        "registry.example/a/b-c/d_e.f:v1.0_x-2",
        f"registry.example/smollm2@{DIGEST}",
        f"registry.example:5000/smollm2:1@{DIGEST}#/models/a+b.gguf",
        "localhost/smollm2:1",
        "registry:5000/smollm2:1#/",
        "10.0.0.1:5000/smollm2:1",
    ],
)
def test_images_that_a_node_can_pull_are_accepted_as_sources(plane: ControlPlane, image: str) -> None:
    obj = resource(model={"source": f"oci://{image}"})
    created = plane.kubectl("create", "--dry-run=server", "--filename", "-", stdin=json.dumps(obj))
    assert "created (server dry run)" in created


def test_ranges_of_addresses_that_a_network_policy_takes_are_accepted(plane: ControlPlane) -> None:
    for cidr, exceptions in RANGES.items():
        Space(plane, "default").apply(peer(cidr, *exceptions), "--dry-run=server")
        policy = {"podSelector": {}, "ingress": [{"from": peer(cidr, *exceptions)["spec"]["network"]["allowFrom"]}]}
        kind = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "chat"}}
        Space(plane, "default").apply({**kind, "spec": policy}, "--dry-run=server")


TOLERATIONS = [
    {name: value for name, value in zip(("key", "operator", "value", "effect", "tolerationSeconds"), each, strict=True)
     if value is not None}
    for each in itertools.product(
        (None, "gpu", "example.com/gpu", "a b", "/gpu"), (None, "Exists", "Equal"), (None, "", "x", "-x"),
        (None, "NoSchedule", "NoExecute"), (None, 5),
    )
]  # fmt: skip
SPREADS = [
    [{"topologyKey": "zone"}],
    [{"topologyKey": "zone"}, {"topologyKey": "host"}],
    [{"topologyKey": "zone"}, {"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
    [{"topologyKey": "zone"}, {"topologyKey": "zone", "maxSkew": 2}],
    [{"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}] * 2,
]
SELECTORS = [
    {"matchExpressions": [{"key": key, "operator": operator, **values}]}
    for key in ("a", "a b")
    for operator in ("In", "NotIn", "Exists", "DoesNotExist")
    for values in ({}, {"values": []}, {"values": ["x"]}, {"values": ["-x"]})
]


@pytest.mark.controlplane
def test_what_the_crd_takes_of_pods_and_policies_is_what_the_api_server_takes_of_them(plane: ControlPlane) -> None:
    """Otherwise the Deployment is rejected after the resource was accepted, or the other way round."""
    server = ApiServer(new_client_from_config(str(plane.kubeconfig)), Metrics(), 30.0)

    def takes(kind: Kind, spec: Object) -> bool:
        body = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {"name": "chat"}, "spec": spec}
        try:
            server.request("POST", kind.path("default"), [("dryRun", "All")], body)
        except KubeError as error:
            if error.status != 422:
                raise
            return False
        return True

    containers = [{"name": "engine", "image": "e"}]
    for toleration in TOLERATIONS:
        scheduling = {"tolerations": [toleration]}
        pod = {**scheduling, "containers": containers}
        assert takes(FASTGEN, resource(scheduling=scheduling)["spec"]) == takes(POD, pod), toleration
    for spreads in SPREADS:
        scheduling = {"topologySpreadConstraints": spreads}
        written = [{"maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule", **each} for each in spreads]
        pod = {"topologySpreadConstraints": written, "containers": containers}
        assert takes(FASTGEN, resource(scheduling=scheduling)["spec"]) == takes(POD, pod), spreads
    for selector in SELECTORS:
        peers = [{"podSelector": selector}]
        policy = {"podSelector": {}, "ingress": [{"from": peers}]}
        assert takes(FASTGEN, resource(network={"allowFrom": peers})["spec"]) == takes(NETWORK_POLICY, policy), selector


@pytest.mark.controlplane
def test_an_unknown_field_is_rejected_by_name(plane: ControlPlane) -> None:
    with pytest.raises(CommandError, match=r'unknown field "spec.engine.tokenBugdet"'):
        Space(plane, "default").apply(engine(tokenBugdet=1), "--dry-run=server")


@pytest.mark.controlplane
def test_a_negative_scale_is_rejected(plane: ControlPlane, space: Space) -> None:
    del plane
    space.apply(resource(replicas=0))
    with pytest.raises(KubeError, match="greater than or equal to 0"):
        space.patch("fgd/chat", {"spec": {"replicas": -1}})
    assert space.get("fgd", "chat")["spec"]["replicas"] == 0


@pytest.mark.controlplane
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_accepted_without_warnings(plane: ControlPlane, path: Path) -> None:
    said = plane.kubectl("apply", "--dry-run=server", "--warnings-as-errors", "--filename", str(path))
    assert "created" in said


@pytest.mark.controlplane
def test_every_resource_of_the_documentation_is_accepted_without_warnings(plane: ControlPlane) -> None:
    found = {place: made for place, made in documents() if made.get("kind") == "FastGenDeployment"}
    for number, made in enumerate(found.values()):
        made["metadata"]["name"] += f"-{number}"
    text = dump_all(found.values())
    said = plane.kubectl("apply", "--dry-run=server", "--warnings-as-errors", "--filename", "-", stdin=text)
    assert said.count("created") == len(found) > 8


@pytest.mark.controlplane
def test_every_part_of_a_resource_in_the_documentation_is_accepted(plane: ControlPlane) -> None:
    """Blocks that only show some fields of the spec: the rest is that of a minimal resource."""
    for place, part in documents():
        if part.keys() <= {"spec", "podTemplate", "autoscaling"}:
            spec = part.get("spec", part)
            made = resource(**{**spec, "engine": {"device": "cpu", **spec.get("engine", {})}})
            try:
                plane.kubectl("apply", "--dry-run=server", "--filename", "-", stdin=json.dumps(made))
            except CommandError as error:
                pytest.fail(f"{place}: {error}")


@pytest.mark.controlplane
def test_a_minimal_resource_gets_the_same_defaults_from_the_api_server_and_the_operator(
    plane: ControlPlane, space: Space
) -> None:
    del plane
    smallest = resource(replicas=0)
    space.apply(smallest)
    stored = space.get("fgd", "chat")["spec"]
    assert Spec.model_validate(stored) == Spec.model_validate(smallest["spec"])
    kv_cache = {"memoryPercent": 90, "blockSize": 64, "swapSpace": "0Gi", "prefixCaching": True}
    assert stored["engine"] == {
        "device": "cpu",
        "dtype": "auto",
        "interTokenTarget": "auto",
        "maxQueuedRequests": 1024,
        "kvCache": kv_cache,
    }


def test_the_committed_crds_are_up_to_date() -> None:
    assert (ROOT / CRD_PATH).read_text() == crd_yaml(), "run: python -m fastgen_operator.api.crd --write"
    assert (ROOT / CHART_PATH).read_text() == chart_yaml(), "run: python -m fastgen_operator.api.crd --write"


def test_the_charts_crd_is_the_same_and_survives_an_uninstall() -> None:
    text = (ROOT / CHART_PATH).read_text()
    chart = load("\n".join(line for line in text.splitlines() if not line.startswith("{{-")))
    assert chart["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert chart == custom_resource_definition() == load((ROOT / CRD_PATH).read_text())


def test_every_field_has_a_description_and_no_field_is_a_float() -> None:
    version = custom_resource_definition()["spec"]["versions"][0]

    def check(path: str, schema: dict[str, Any]) -> int:
        assert schema.get("type") != "number", path
        count = 1
        for name, child in schema.get("properties", {}).items():
            assert child.get("description", "").endswith("."), f"{path}.{name} has no description in sentences"
            bounded = {"maximum", "maxLength", "enum", "format"} & child.keys()
            free = child.get("type") not in ("integer", "string") or path.startswith("status")
            assert bounded or free, f"{path}.{name} has no bound"
            count += check(f"{path}.{name}", child)
        return count

    properties = version["schema"]["openAPIV3Schema"]["properties"]
    assert sum(check(part, properties[part]) for part in ("spec", "status")) > 40


def test_the_flags_that_extra_args_must_not_contain_are_those_that_the_operator_passes() -> None:
    engine = {
        "device": "cpu",
        "tensorParallel": 2,
        "tokenBudget": 64,
        "interTokenTarget": 20,
        "maxSequences": 8,
        "maxModelLength": 64,
    }
    words: list[str] = []
    for on in (True, False):
        owner = stored(engine={**engine, "kvCache": {"prefixCaching": on}}, apiKeySecretName="keys")
        words += pod_template(owner)["spec"]["containers"][0]["args"]
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    rules = schema["properties"]["spec"]["properties"]["engine"]["x-kubernetes-validations"]
    (message,) = [each["message"] for each in rules if "extraArgs" in each["message"]]
    # Probes and Services need the default of --host; engines of earlier versions have another one.
    assert {word for word in words if word.startswith("--")} | {"--host"} == set(re.findall(r"--[-a-z]+", message))


def test_engine_fields_have_the_defaults_and_bounds_of_the_engines_settings() -> None:
    spec = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    in_engine = spec["properties"]["engine"]["properties"]
    fields = {
        **{name: field for name, field in in_engine.items() if name not in ("image", "extraArgs", "kvCache")},
        **in_engine["kvCache"]["properties"],
        "drainSeconds": spec["properties"]["drainSeconds"],
    }
    settings = {
        "".join(p.title() if i else p for i, p in enumerate(k.name.split("_"))): k
        for k in ENGINE_SETTINGS + SERVER_SETTINGS
    }
    swap_space = fields.pop("swapSpace")
    assert swap_space["default"] == "0Gi", "the engine's default, as a Kubernetes quantity"
    assert settings["swapSpace"].default == 0
    for name, field in fields.items():
        setting = settings[name]
        if setting.words:
            assert (
                f"self >= {setting.minimum} && self <= {setting.maximum}"
                in field["x-kubernetes-validations"][0]["rule"]
            )
            continue
        assert (field.get("minimum"), field.get("maximum")) == (setting.minimum, setting.maximum), name
        assert field.get("default") == (None if name in ("device", "tensorParallel") else setting.default), name
        assert field["description"].startswith(setting.help)
        assert tuple(field.get("enum", ())) == setting.choices

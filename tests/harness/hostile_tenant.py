"""A tenant with only the chart's edit role that stores FastGenDeployments of random hostile shapes. Seeded."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import count
from typing import Any

from kubernetes.client import ApiClient, Configuration
from kubernetes.config import load_kube_config

from fastgen_operator.kinds import FASTGEN
from harness.hostile import deep
from harness.space import Space, resource
from harness.user import User
from support.namespace import Object

_LETTERS = "aZ0-_./ \t\n\"\\{}[]$%'`éß漢字🦙\u202e\u200b\u0000\u001b"
_DIRECTIVES: tuple[Any, ...] = (
    {"$patch": "delete"},
    {"$patch": "replace"},
    {"$retainKeys": ["x"]},
    None,
    {},
    [],
    "",
    0,
    -1,
    True,
    1e308,
)
# Fields of a pod that take any value at admission, and some that do not.
_FIELDS = (
    *("affinity", "tolerations", "nodeSelector", "topologySpreadConstraints", "dnsConfig", "hostAliases", "resources"),
    *("schedulingGates", "dnsPolicy", "schedulerName", "enableServiceLinks"),
)
_REFUSED = ("containers", "initContainers", "volumes", "securityContext", "imagePullSecrets", "overhead", "hostPID")


class Tenant:
    """A user of one namespace with the chart's edit role.

    Attributes:
        answers: what the API server answered to its writes, by status code.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self.answers: Counter[int] = Counter()
        user = User(space, "mallory")
        configuration = Configuration()
        kubeconfig = space.cluster.kubeconfig_for(user.name, user.name)
        load_kube_config(str(kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        self._pool = ApiClient(configuration).rest_client.pool_manager
        self._url = configuration.host + FASTGEN.path(space.name)
        self._resources = _resources(random.Random(seed))

    def store(self, number: int) -> None:
        """Try to create resources, one after another, until the API server has stored `number` more."""
        wanted = self.answers[201] + number
        while self.answers[201] < wanted:
            # Not by kubectl, which takes longer than the API server, and not as an object, which may be too deep.
            body, headers = next(self._resources).encode(), {"Content-Type": "application/json"}
            answer = self._pool.request("POST", self._url, body=body, headers=headers)
            self.answers[answer.status] += 1
            # 504: the API server gives up after a minute, on a busy machine.
            assert answer.status in (201, 400, 403, 413, 422, 504), answer.data


def _resources(chance: random.Random) -> Iterator[str]:
    """Yield JSON texts without end. Equal seeds give equal resources."""
    makers = (_deep, _long, _wide, _odd_template, _odd_spec, _odd_metadata, _served)
    for number in count():
        yield makers[number % len(makers)](chance, _name(chance, number))


def _name(chance: random.Random, number: int) -> str:
    shape = chance.randrange(16)
    if shape == 0:
        return f"{'x' * 36}{number:04}"
    if shape == 1:
        return f"{chance.choice(['null', 'true', 'e3', 'kubernetes', 'fgd'])}-{number}"
    return f"{chance.choice(['Ä', 'a_b', '1', '..', 'a/b'])}{number}" if shape == 2 else f"t-{number}"


def _text(chance: random.Random, length: int) -> str:
    return "".join(chance.choice(_LETTERS) for _ in range(length))


def _manifest(name: str, pod_spec: str = "{}", **spec: Any) -> str:
    text = json.dumps(resource(name, **{"replicas": 0, "podTemplate": {"spec": "POD"}, **spec}))
    return text.replace('"POD"', pod_spec)


def _deep(chance: random.Random, name: str) -> str:
    # At most 28 are stored. The API server takes up to a second to reject more.
    levels = chance.choice([5, 10, 15, 20, 25, 27, 28, 28, 28, 28, 29, 700, 9000])
    return _manifest(name, f'{{"{chance.choice(_FIELDS)}": {deep(levels, chance.choice(["map", "list"]))}}}')


def _long(chance: random.Random, name: str) -> str:
    length = chance.choice([1000, 5_000, 10_000, 15_000, 20_000, 25_000, 30_000, 70_000, 1_400_000])
    value = _text(chance, 10) * (length // 10)
    return _manifest(name, json.dumps({"containers": [{"name": "engine", "env": [{"name": "A", "value": value}]}]}))


def _wide(chance: random.Random, name: str) -> str:
    items = chance.choice([90, 300, 600, 900, 900, 1000, 1001])
    shapes: list[Any] = [
        [0] * items,
        {f"k{n}": {"a": 1} for n in range(items)},
        [{"name": f"v{n}"} for n in range(items)],
    ]
    value = chance.choice(shapes)
    pods: list[Object] = [{"x": value}, {"nodeSelector": value}, {"containers": [{"name": "engine", "env": value}]}]
    return _manifest(name, json.dumps(chance.choice(pods)))


def _odd_value(chance: random.Random, levels: int = 3) -> Any:
    if levels and chance.random() < 0.6:
        names = [chance.choice(["name", "$patch", "image", _text(chance, 4)]) for _ in range(chance.randrange(4))]
        values = [_odd_value(chance, levels - 1) for _ in names]
        return dict(zip(names, values, strict=True)) if chance.random() < 0.5 else values
    return chance.choice([*_DIRECTIVES, _text(chance, 20), 10**18, -(10**18)])


def _odd_template(chance: random.Random, name: str) -> str:
    fields = chance.sample(_FIELDS, 3) + chance.sample(_REFUSED, chance.randrange(4) == 0)
    labels = {_text(chance, 5): _text(chance, 5)} if chance.random() < 0.2 else {}
    pod = json.dumps({each: _odd_value(chance) for each in fields})
    return _manifest(name, pod).replace(
        '"podTemplate": {', f'"podTemplate": {{"metadata": {{"labels": {json.dumps(labels)}}}, '
    )


def _odd_spec(chance: random.Random, name: str) -> str:
    schedule = {"name": "s", "start": "0 8 30 2 *", "durationSeconds": 60, "timeZone": "Mars/Base", "minReplicas": 1}
    odd: list[Object] = [
        {"model": {"source": f"file:///{_text(chance, 200)}"}},
        {"engine": {"device": "cpu", "extraArgs": [_text(chance, 900)] * 64}},
        {"engine": {"device": "cpu", "image": _text(chance, 400)}},
        {"scheduling": {"affinity": _odd_value(chance)}},
        {"scheduling": {"nodeSelector": {_text(chance, 10): _text(chance, 10)}}},
        {"replicas": None, "autoscaling": {"maxReplicas": 2, "schedules": [schedule]}},
        {"operatorClass": "green"},
        {"cache": {"size": "1Gi"}, "model": {"source": "hf://a/b", "revision": _text(chance, 30)}},
        {"resources": {"requests": {_text(chance, 8): "1"}}},
    ]
    return _manifest(name, **chance.choice(odd))


def _odd_metadata(chance: random.Random, name: str) -> str:
    notes = {f"example.com/{n}": _text(chance, 10) * 4_000 for n in range(chance.choice([1, 6]))}
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "y", "controller": chance.random() < 0.5}
    odd: list[Object] = [
        {"annotations": notes},
        {"labels": {"fastgen.dev/deployment": "chat", "kueue.x-k8s.io/queue-name": "x"}},
        {"finalizers": [f"example.com/{n}" for n in range(500)]},
        {"ownerReferences": [owner]},
        {"annotations": {"fastgen.dev/applied": _text(chance, 1000), "fastgen.dev/model": _text(chance, 1000)}},
    ]
    obj = resource(name, replicas=0)
    obj["metadata"] |= chance.choice(odd)
    return json.dumps(obj)


def _served(chance: random.Random, name: str) -> str:
    """Return a resource with pods, for an engine that answers scrapes."""
    scaling: Object = {"minReplicas": chance.choice([1, 2]), "maxReplicas": 4}
    return json.dumps(resource(name, engine={"device": "cpu", "interTokenTarget": 200}, autoscaling=scaling))

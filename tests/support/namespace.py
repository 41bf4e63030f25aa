"""One namespace of a test cluster: apply, get, and wait for conditions of FastGenDeployments."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from support.waiting import eventually

Object = dict[str, Any]


class Cluster(Protocol):
    """A cluster that kubectl can reach."""

    def kubectl(self, *args: str, stdin: str | None = None) -> str: ...


ClusterT = TypeVar("ClusterT", bound=Cluster)


@dataclass
class Namespace(Generic[ClusterT]):
    """One namespace. Waits for a condition take at most `patience` seconds and poll `every` seconds."""

    patience: ClassVar[float] = 20
    every: ClassVar[float] = 0.1

    cluster: ClusterT
    name: str

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("--namespace", self.name, *args, stdin=stdin)

    def apply(self, obj: Object, *args: str) -> str:
        return self.kubectl("apply", *args, "--filename", "-", stdin=json.dumps(obj))

    def patch(self, what: str, body: Object, *args: str) -> None:
        self.kubectl("patch", what, "--type", "merge", "--patch", json.dumps(body), *args)

    def get(self, *what: str) -> Object:
        answer: Object = json.loads(self.kubectl("get", *what, "--output", "json"))
        return answer

    def items(self, *what: str) -> list[Object]:
        items: list[Object] = self.get(*what)["items"]
        return items

    def pods(self, name: str = "chat") -> list[Object]:
        """Return the resource's pods that are not being deleted."""
        pods = self.items("pods", "--selector", f"fastgen.dev/deployment={name}")
        return [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]

    def condition(self, kind: str, name: str = "chat") -> Object:
        """Return the condition if it was observed for the current generation, or {}."""
        obj = self.get("fgd", name)
        for condition in obj.get("status", {}).get("conditions", []):
            if condition["type"] == kind and condition["observedGeneration"] == obj["metadata"]["generation"]:
                found: Object = condition
                return found
        return {}

    def wait_condition(self, kind: str, status: str, reason: str | None = None, name: str = "chat") -> Object:
        """Wait until the condition has this status, and this reason if given, and return it."""

        def matching() -> Object | None:
            condition = self.condition(kind, name)
            fits = condition.get("status") == status and reason in (None, condition.get("reason"))
            return condition if fits else None

        what = f"{kind}={status}" + (f"/{reason}" if reason else "") + f" of {name}"
        condition = eventually(matching, within=self.patience, what=what, every=self.every)
        assert condition is not None
        return condition

"""The leader election's Lease: reads, writes, and the rules of its holder, as in client-go's leaderelection."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fastgen_operator.kinds import LEASE, Object
from fastgen_operator.kube.transport import ApiServer, KubeError


@dataclass(frozen=True, slots=True)
class Lease:
    """One Lease; created when it is first acquired."""

    server: ApiServer
    namespace: str
    name: str

    def read(self) -> Object | None:
        """Return the Lease, or None. Raises KubeError."""
        try:
            found: Object = self.server.request("GET", LEASE.path(self.namespace, self.name))
        except KubeError as error:
            if error.status == 404:
                return None
            raise
        return found

    def write(self, lease: Object) -> Object:
        """Create the Lease, or replace the version that was read.

        Raises:
            KubeError: the write failed; with status 409 if the Lease exists already or has changed.
        """
        metadata = {**lease.get("metadata", {}), "namespace": self.namespace, "name": self.name}
        body = {"apiVersion": LEASE.api_version, "kind": LEASE.name, **lease, "metadata": metadata}
        method, name = ("PUT", self.name) if "resourceVersion" in metadata else ("POST", None)
        path = LEASE.path(self.namespace, name)
        stored: Object = self.server.request(method, path, body=body, content_type="application/json")
        return stored


@dataclass(frozen=True, slots=True)
class Observation:
    """A Lease as last read (None if missing), and the local time since which its spec is unchanged."""

    lease: Object | None
    since: float


def observe_lease(before: Observation | None, lease: Object | None, now: float) -> Observation:
    """Combine a read with the previous one. Only a change of the spec counts: others may edit labels."""
    unchanged = before is not None and _spec(before.lease) == _spec(lease)
    return Observation(lease, before.since if before is not None and unchanged else now)


def holder_of(lease: Object | None) -> str:
    """Return the identity of the holder; empty if the Lease is free."""
    return str(_spec(lease).get("holderIdentity") or "")


def may_take(observation: Observation, identity: str, now: float) -> bool:
    """Return whether the Lease is free, has expired, or is held by `identity`."""
    if holder_of(observation.lease) in ("", identity):
        return True
    return now >= observation.since + float(_spec(observation.lease).get("leaseDurationSeconds") or 0)


def claim(lease: Object | None, identity: str, duration: int, now: datetime) -> Object:
    """Return the Lease as held by `identity`: renewed if `identity` already holds it, else acquired."""
    old, time = _spec(lease), _micro_time(now)
    spec = {**old, "holderIdentity": identity, "leaseDurationSeconds": duration, "renewTime": time}
    if lease is None or holder_of(lease) != identity:
        transitions = 0 if lease is None else int(old.get("leaseTransitions") or 0) + 1
        spec |= {"acquireTime": time, "leaseTransitions": transitions}
    return {**(lease or {}), "spec": spec}


def released(lease: Object, now: datetime) -> Object:
    """Return the Lease without a holder, so that another candidate acquires it before it expires."""
    return {**lease, "spec": {**lease["spec"], "holderIdentity": "", "renewTime": _micro_time(now)}}


def _spec(lease: Object | None) -> dict[str, Any]:
    return dict(lease.get("spec") or {}) if lease else {}


def _micro_time(now: datetime) -> str:
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

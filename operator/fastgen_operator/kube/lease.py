"""Reads and writes the leader election's Lease."""

from __future__ import annotations

from dataclasses import dataclass

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
        """Create the Lease, or replace the version that was read. Raises KubeError, with 409 if it changed."""
        metadata = {**lease.get("metadata", {}), "namespace": self.namespace, "name": self.name}
        body = {"apiVersion": LEASE.api_version, "kind": LEASE.name, **lease, "metadata": metadata}
        method, name = ("PUT", self.name) if "resourceVersion" in metadata else ("POST", None)
        path = LEASE.path(self.namespace, name)
        stored: Object = self.server.request(method, path, body=body, content_type="application/json")
        return stored

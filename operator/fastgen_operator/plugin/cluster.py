"""Requests to a cluster with a kubeconfig. Each error is one line."""

from __future__ import annotations

import difflib
import http.client
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from kubernetes.client import ApiClient, ApiException, Configuration, CoreV1Api
from kubernetes.config import ConfigException, list_kube_config_contexts, load_incluster_config, load_kube_config
from kubernetes.stream import portforward
from urllib3.exceptions import HTTPError

from fastgen_operator.kinds import FASTGEN, POD, Object
from fastgen_operator.kube.transport import ApiServer, KubeError
from fastgen_operator.labels_and_annotations import CANARY_LABEL_SUFFIX, OWNER_LABEL
from fastgen_operator.metrics import Metrics
from fastgen_operator.objects.pod import Pod

_REQUEST_SECONDS: Final = 30.0
_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class PluginError(Exception):
    """The command fails; the message has one line."""

    exit_code = 1


class UsageError(PluginError):
    """The command line or the kubeconfig is wrong."""

    exit_code = 2


@dataclass(frozen=True)
class Cluster:
    """A cluster and the namespace in use. Methods raise PluginError if their request fails.

    Attributes:
        context: name of the kubeconfig's context, for messages; in-cluster without a kubeconfig.
    """

    configuration: Configuration
    context: str
    namespace: str
    server: ApiServer

    def resources(self, namespace: str | None) -> list[Object]:
        """Return the FastGenDeployments of a namespace, or of all if it is None."""
        try:
            _, objects = self.server.list(FASTGEN.path(namespace), [])
            return [_without_template(each) for each in objects]
        except KubeError as error:
            if error.status != 404:
                raise self._failure(error) from error
            raise PluginError(
                f"{self._place} has no resource {FASTGEN.plural}.{FASTGEN.group}: install the chart charts/fastgen"
            ) from error

    def resource(self, name: str) -> Object:
        """Return a FastGenDeployment of the namespace in use; raise PluginError if there is none."""
        try:
            found: Object = self._request("GET", FASTGEN.path(self.namespace, name), expected=(404,))
            return found
        except KubeError:
            raise PluginError(self._missing(name)) from None

    def pods(self, name: str) -> list[Pod]:
        """Return the engine pods of a FastGenDeployment without those of a canary, oldest first."""
        return self.pods_with(self.namespace, f"{OWNER_LABEL}={name}")

    def pods_and_canary(self, name: str) -> list[Pod]:
        """Return the engine pods of a FastGenDeployment, oldest first, and then those of its canary."""
        pods = self.pods_with(self.namespace, f"{OWNER_LABEL} in ({name},{name}{CANARY_LABEL_SUFFIX})")
        return sorted(pods, key=lambda pod: pod.is_canary)

    def pods_with(self, namespace: str, selector: str) -> list[Pod]:
        """Return the pods with these labels, oldest first."""
        items = self._request("GET", POD.path(namespace), [("labelSelector", selector)])["items"]
        return sorted(map(Pod, items), key=lambda pod: (pod.created, pod.name))

    def evict(self, pod: Pod) -> None:
        """Delete a pod as a drain of its node does.

        Raises:
            PluginError: the API server rejected it, for example because of a PodDisruptionBudget.
        """
        metadata = {"name": pod.name, "namespace": pod.namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        try:
            self._request("POST", POD.path(pod.namespace, pod.name, "eviction"), body=body, expected=(404, 409, 429))
        except KubeError as error:
            raise PluginError(f"evicting pod {pod.name}: {error}") from None

    def log(self, pod: Pod, query: list[tuple[str, str]]) -> Iterator[str]:
        """Yield the lines of a container's log; with `follow` in the query, until it ends.

        Raises:
            KubeError: the API server rejected the request, for example because the pod has no such log.
            PluginError: the connection failed or broke.
        """
        client = ApiClient(self.configuration)
        path = POD.path(pod.namespace, pod.name, "log")
        verb, url, headers, _, _ = client.param_serialize(
            "GET", path, query_params=query, auth_settings=["BearerToken"]
        )
        try:
            response = client.call_api(verb, url, headers, _request_timeout=(_REQUEST_SECONDS, None)).response
            if response.status != 200:
                raise KubeError(response.status, _message_of(response.read()) or f"HTTP status {response.status}")
            rest = b""
            while data := response.read1(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")
        except HTTPError as error:
            raise PluginError(f"the connection failed: {_one_line(error)}") from error

    def connection(self, namespace: str, pod: str, port: int, timeout: float) -> http.client.HTTPConnection:
        """Return an HTTP connection to a port of a pod, through the API server and the kubelet.

        Unlike the API server's proxy, it reaches servers on the loopback interface, and no NetworkPolicy applies.

        Raises:
            PluginError: there is no connection, for example because the user may not forward ports or the pod does not
                run.
        """
        # Use a new client, because portforward temporarily replaces a method of the client, and threads share others.
        core = CoreV1Api(ApiClient(self.configuration))
        try:
            forward = portforward(core.connect_get_namespaced_pod_portforward, pod, namespace, ports=str(port))
        except ApiException as error:
            reason = _handshake(str(error.reason))
            raise PluginError(f"forwarding port {port} of pod {namespace}/{pod}: {reason}") from None
        made = http.client.HTTPConnection("localhost", port, timeout=timeout)
        made.sock = forward.socket(port)
        made.sock.settimeout(timeout)
        return made

    def _request(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Object | None = None,
        expected: Collection[int] = (),
    ) -> Any:
        """Send a request and return the decoded response.

        Raises:
            KubeError: a status in `expected`, whose meaning depends on the request.
            PluginError: any other error.
        """
        try:
            return self.server.request(method, path, query, body, None if body is None else "application/json")
        except KubeError as error:
            if error.status in expected:
                raise
            raise self._failure(error) from error

    def _missing(self, name: str) -> str:
        """Return an error that there is no such resource, with the names that may be meant."""
        words = f'no FastGenDeployment "{name}" in namespace "{self.namespace}"'
        names = [each["metadata"]["name"] for each in self.resources(self.namespace)]
        near = difflib.get_close_matches(name, names, 3)
        if near:
            return f"{words}: did you mean {' or '.join(near)}?"
        try:
            elsewhere = [each["metadata"] for each in self.resources(None)]
        except PluginError:  # the user may not list all namespaces
            elsewhere = []
        others = [each["namespace"] for each in elsewhere if each["name"] == name]
        if others:
            return f"{words}: there is one in namespace {' and '.join(others[:3])}"
        return f"{words}: it has {', '.join(names[:5])}" if names else f"{words}: it has none"

    def _failure(self, error: KubeError) -> PluginError:
        if error.status == 0:
            # With another cause, or none, a response has come that cannot be used.
            if isinstance(error.__cause__, HTTPError | ApiException):
                return PluginError(f"{self._place} cannot be reached: {_cause(error)}")
            return PluginError(f"{self._place}: {error}: check the server address of the context")
        if error.status == 401:
            return PluginError(f"{self._place} rejects your credentials: renew them, or use another --context")
        return PluginError(f"{self._place}: {error}")

    @property
    def _place(self) -> str:
        return f"the API server {self.configuration.host} of context {self.context}"


def open_cluster(kubeconfig: str | None, context: str | None, namespace: str | None) -> Cluster:
    """Return the cluster of the kubeconfig, found as kubectl does.

    If neither a kubeconfig nor a context is given and no kubeconfig is usable, the pod's service account is used.

    Raises:
        UsageError: there are no credentials, or no such context.
    """
    configuration = Configuration()
    given = kubeconfig or os.environ.get("KUBECONFIG") or None
    try:
        contexts, active = list_kube_config_contexts(given)  # type: ignore[no-untyped-call]
        chosen = active if context is None else _named(contexts, context)
        load_kube_config(given, chosen["name"], client_configuration=configuration)  # type: ignore[no-untyped-call]
        name, default = str(chosen["name"]), chosen["context"].get("namespace") or "default"
    except (ConfigException, yaml.YAMLError, OSError) as error:
        inside = _in_pod(configuration) if given is None and context is None else None
        if inside is None:
            raise UsageError(f"no usable kubeconfig: {_one_line(error)}: set --kubeconfig or KUBECONFIG") from error
        name, default = inside
    # Do not retry, because a person waits.
    configuration.retries = 0
    server = ApiServer(ApiClient(configuration), Metrics(), _REQUEST_SECONDS)
    return Cluster(configuration, name, namespace or default, server)


def _without_template(resource: Object) -> Object:
    """Return a resource without the parts that can be large and that no command reads."""
    spec = {name: value for name, value in resource["spec"].items() if name != "podTemplate"}
    metadata = {
        name: value for name, value in resource["metadata"].items() if name not in ("managedFields", "annotations")
    }
    return {**resource, "metadata": metadata, "spec": spec}


def _named(contexts: list[Any], name: str) -> Any:
    by_name = {str(context["name"]): context for context in contexts}
    if name not in by_name:
        raise UsageError(f'no context "{name}" in the kubeconfig: it has {", ".join(by_name)}')
    return by_name[name]


def _in_pod(configuration: Configuration) -> tuple[str, str] | None:
    try:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException:
        return None
    return "in-cluster", _NAMESPACE_FILE.read_text().strip()


def _cause(error: KubeError) -> str:
    """Return the innermost reason of a failed connection."""
    reason = getattr(error.__cause__, "reason", None) or error.__cause__ or error
    return re.sub(r"^\[Errno -?\d+\] ", "", _one_line(reason).rpartition(": ")[2])


def _one_line(error: object) -> str:
    return " ".join(str(error).split()).rstrip(".")


def _message_of(body: bytes) -> str:
    """Return the message of an error response."""
    try:
        return str(yaml.safe_load(body)["message"])
    except (yaml.YAMLError, TypeError, KeyError):
        return body.decode(errors="replace").strip()


def _handshake(reason: str) -> str:
    """Return why a port-forward was rejected: the message in the response's body, or else its status line."""
    status = reason.partition(" -+-+- ")[0]
    start, end = reason.find('{"kind"'), reason.rfind("}")
    if 0 <= start < end:
        return _message_of(reason[start : end + 1].encode().decode("unicode_escape").encode())
    return _one_line(status)

"""Check a pod template against the restricted Pod Security Standard. Pure.

Source: kubernetes.io, "Pod Security Standards", baseline and restricted, as in k8s.io/pod-security-admission 0.34.
Windows pods and pods in user namespaces get no exemptions. Why this is not left to the API server: docs/decisions/013.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from fastgen_operator.kinds import Object

_VOLUMES: Final = (
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"),
    "secret",
)
_SYSCTLS: Final = (
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout"),
    *("net.ipv4.tcp_keepalive_intvl", "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time"),
    *("net.ipv4.tcp_rmem", "net.ipv4.tcp_syncookies", "net.ipv4.tcp_wmem"),
)
_SELINUX_TYPES: Final = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_APPARMOR_ANNOTATION: Final = "container.apparmor.security.beta.kubernetes.io/"
_PROFILES: Final = ("RuntimeDefault", "Localhost")


def broken_rules(template: Object) -> tuple[str, ...]:
    """Return one message for each violation, naming the field; the template has the form that the API server stores."""
    pod = template["spec"]
    containers = [*pod.get("initContainers", ()), *pod.get("containers", ()), *pod.get("ephemeralContainers", ())]
    broken = [*_annotations(template), *_pod(pod)]
    for container in containers:
        broken += [f"container {container['name']}: {words}" for words in _container(container, pod)]
    return tuple(broken)


def _annotations(template: Object) -> Iterator[str]:
    for name, value in template.get("metadata", {}).get("annotations", {}).items():
        allowed = value in ("", "runtime/default") or value.startswith("localhost/")
        if name.startswith(_APPARMOR_ANNOTATION) and not allowed:
            yield f"annotation {name} must not be {value}"


def _pod(pod: Object) -> Iterator[str]:
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(name):
            yield f"{name} must be false"
    for volume in pod.get("volumes", ()):
        for source in volume.keys() - {"name", *_VOLUMES}:
            yield f"volume {volume['name']}: {source} is not an allowed volume type"
    context = pod.get("securityContext", {})
    if context.get("runAsNonRoot") is False:
        yield "securityContext.runAsNonRoot must be true"
    for sysctl in context.get("sysctls", ()):
        if sysctl["name"] not in _SYSCTLS:
            yield f"securityContext.sysctls: {sysctl['name']} is not allowed"
    if "seccompProfile" in context and context["seccompProfile"].get("type") not in _PROFILES:
        yield "securityContext.seccompProfile.type must be RuntimeDefault or Localhost"
    yield from _identity(context)


def _container(container: Object, pod: Object) -> Iterator[str]:
    context, of_pod = container.get("securityContext", {}), pod.get("securityContext", {})
    if context.get("privileged"):
        yield "securityContext.privileged must be false"
    if context.get("allowPrivilegeEscalation") is not False:
        yield "securityContext.allowPrivilegeEscalation must be false"
    capabilities = context.get("capabilities", {})
    if "ALL" not in capabilities.get("drop", ()):
        yield "securityContext.capabilities.drop must contain ALL"
    for name in capabilities.get("add", ()):
        if name != "NET_BIND_SERVICE":
            yield f"securityContext.capabilities.add must not contain {name}"
    if context.get("runAsNonRoot", of_pod.get("runAsNonRoot")) is not True:
        yield "securityContext.runAsNonRoot must be true"
    if context.get("seccompProfile", of_pod.get("seccompProfile", {})).get("type") not in _PROFILES:
        yield "securityContext.seccompProfile.type must be RuntimeDefault or Localhost"
    if context.get("procMount", "Default") != "Default":
        yield "securityContext.procMount must be Default"
    for port in container.get("ports", ()):
        if port.get("hostPort"):
            yield f"ports: hostPort {port['hostPort']} is not allowed"
    for name, handler in _handlers(container):
        if any(handler.get(action, {}).get("host") for action in ("httpGet", "tcpSocket")):
            yield f"{name} must not set host"
    yield from _identity(context)


def _identity(context: Object) -> Iterator[str]:
    """Yield violations of the rules that pod and container security contexts share."""
    if context.get("runAsUser") == 0:
        yield "securityContext.runAsUser must not be 0"
    if context.get("windowsOptions", {}).get("hostProcess"):
        yield "securityContext.windowsOptions.hostProcess must be false"
    selinux = context.get("seLinuxOptions", {})
    if selinux.get("type", "") not in _SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield "securityContext.seLinuxOptions must only set a container type, no user and no role"
    if context.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in _PROFILES:
        yield "securityContext.appArmorProfile.type must be RuntimeDefault or Localhost"


def _handlers(container: Object) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        yield name, container.get(name, {})
    for name in ("postStart", "preStop"):
        yield f"lifecycle.{name}", container.get("lifecycle", {}).get(name, {})

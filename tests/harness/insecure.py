"""Patches of a pod that violate the restricted Pod Security Standard."""

from __future__ import annotations

from typing import Any

from support.namespace import Object


def of_engine(**fields: Any) -> Object:
    return {"containers": [{"name": "engine", **fields}]}


def context(**fields: Any) -> Object:
    return of_engine(securityContext=fields)


# Patches that violate the restricted standard, and part of the expected message.
INSECURE: dict[str, tuple[Object, str]] = {
    "host network": ({"hostNetwork": True}, "hostNetwork must be false"),
    "host processes": ({"hostPID": True}, "hostPID must be false"),
    "a host path volume": ({"volumes": [{"name": "n", "hostPath": {"path": "/"}}]}, "volume n: hostPath"),
    "a pod that runs as root": ({"securityContext": {"runAsUser": 0}}, "securityContext.runAsUser must not be 0"),
    "a pod that can run as root": ({"securityContext": {"runAsNonRoot": None}}, "runAsNonRoot must be true"),
    "an unconfined seccomp profile": (
        {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
        "seccompProfile.type must be",
    ),
    "no seccomp profile": ({"securityContext": {"seccompProfile": None}}, "container engine: securityContext.seccomp"),
    "a sysctl": (
        {"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
        "kernel.msgmax is not allowed",
    ),
    "a privileged engine": (
        context(privileged=True, allowPrivilegeEscalation=True),
        "container engine: securityContext.privileged",
    ),
    "privilege escalation": (context(allowPrivilegeEscalation=True), "allowPrivilegeEscalation must be false"),
    "a capability": (context(capabilities={"add": ["IPC_LOCK"]}), "capabilities.add must not contain IPC_LOCK"),
    "all capabilities": (context(capabilities={"drop": []}), "capabilities.drop must contain ALL"),
    "a container that runs as root": (context(runAsUser=0), "container engine: securityContext.runAsUser"),
    "an unconfined seccomp profile of the engine": (
        context(seccompProfile={"type": "Unconfined"}),
        "container engine: securityContext.seccomp",
    ),
    "a process of a Windows host": (
        context(windowsOptions={"hostProcess": True}),
        "windowsOptions.hostProcess must be false",
    ),
    "an SELinux role": (context(seLinuxOptions={"role": "x"}), "seLinuxOptions must only set"),
    "an unconfined AppArmor profile": (context(appArmorProfile={"type": "Unconfined"}), "appArmorProfile.type must be"),
    "a host port": (of_engine(ports=[{"containerPort": 9, "hostPort": 9}]), "hostPort 9 is not allowed"),
    "a probe of another host": (
        of_engine(livenessProbe={"httpGet": {"host": "a", "path": "/", "port": 1}}),
        "must not set host",
    ),
    "a plain sidecar": ({"containers": [{"name": "proxy", "image": "p"}]}, "container proxy: securityContext.allow"),
    "a plain init container": ({"initContainers": [{"name": "i", "image": "p"}]}, "container i: securityContext.allow"),
}

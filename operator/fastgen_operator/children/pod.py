"""The pod of one replica: command line, environment, probes, shutdown and security context of the engine."""

from __future__ import annotations

from math import ceil
from typing import Any, Final

from fastgen_operator.api import Scheduling, Spec
from fastgen_operator.children.metadata import (
    CONTAINER_SECURITY,
    HTTP_PORT,
    resources,
    scratch_volume,
    selector,
    without_empty,
)
from fastgen_operator.children.model_source import (
    downloads_in_pods,
    fetch_container,
    model_mounts,
    model_path,
    model_volumes,
)
from fastgen_operator.children.platform import PLAIN_PODS, PodSettings
from fastgen_operator.pods import ENGINE_CONTAINER

# Time for EndpointSlices and proxies to stop routing to a terminating pod, which serves new requests until then.
ENDPOINT_SECONDS: Final = 15
# Time after the drain deadline to write the last responses and exit.
SHUTDOWN_SECONDS: Final = 15
PROBE_SECONDS: Final = 2
# Mount path of the API keys, and their key in the Secret.
API_KEY_FOLDER: Final = "/etc/fastgen"
API_KEY_FILE: Final = "api-keys"


def build_pod_spec(name: str, spec: Spec, engine_image: str, settings: PodSettings = PLAIN_PODS) -> dict[str, Any]:
    """Build the pod spec for a replica of the resource `name`, by the restricted Pod Security Standard."""
    image = spec.engine.image or engine_image
    return {
        "serviceAccountName": name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": ENDPOINT_SECONDS + spec.drain_seconds + SHUTDOWN_SECONDS,
        "securityContext": settings.security_context,
        **({"initContainers": [fetch_container(spec, image, settings)]} if downloads_in_pods(spec) else {}),
        "containers": [_container(name, spec, image, settings)],
        "volumes": [
            scratch_volume(),
            {"name": "cache", "emptyDir": {"sizeLimit": "10Gi"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}},
            *model_volumes(name, spec),
            *_api_key_volume(spec),
            *settings.volumes,
        ],
        **without_empty({"imagePullSecrets": [{"name": secret} for secret in settings.image_pull_secrets]}),
        **_placement(name, spec.scheduling),
    }


def _container(name: str, spec: Spec, image: str, settings: PodSettings) -> dict[str, Any]:
    return {
        "name": ENGINE_CONTAINER,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": engine_arguments(name, spec),
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "XDG_CACHE_HOME", "value": "/cache"},
            {"name": "NUMBA_CACHE_DIR", "value": "/cache/numba"},
            *settings.environment,
        ],
        "ports": [{"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"}],
        **_resources(spec),
        **_probes(spec),
        # The kubelet implements this sleep, so the image needs no shell.
        "lifecycle": {"preStop": {"sleep": {"seconds": ENDPOINT_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "cache", "mountPath": "/cache"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *model_mounts(spec),
            *_api_key_mount(spec),
            *settings.mounts,
        ],
    }


def _api_key_volume(spec: Spec) -> list[dict[str, Any]]:
    if spec.api_key_secret_name is None:
        return []
    items = [{"key": API_KEY_FILE, "path": API_KEY_FILE}]
    return [{"name": "api-keys", "secret": {"secretName": spec.api_key_secret_name, "items": items}}]


def _api_key_mount(spec: Spec) -> list[dict[str, Any]]:
    # Mount the folder: the kubelet does not update Secret files that are mounted with subPath.
    mount = {"name": "api-keys", "mountPath": API_KEY_FOLDER, "readOnly": True}
    return [] if spec.api_key_secret_name is None else [mount]


def engine_arguments(name: str, spec: Spec) -> list[str]:
    """Return the arguments of the image's entry point; `api.OPERATOR_FLAGS` lists the flags."""
    engine = spec.engine
    flags: dict[str, str | int | None] = {
        # Not --host: by default, the engine listens on all addresses of both families.
        "--port": HTTP_PORT,
        "--served-model-name": spec.model.served_name or name,
        "--device": engine.device,
        "--dtype": engine.dtype,
        "--token-budget": engine.token_budget,
        "--max-sequences": engine.max_sequences,
        "--max-model-length": engine.max_model_length,
        "--block-size": engine.kv_cache.block_size,
        "--memory-percent": engine.kv_cache.memory_percent,
        "--swap-space": engine.kv_cache.swap_space,
        "--max-queued-requests": engine.max_queued_requests,
        "--drain-seconds": spec.drain_seconds,
        # Nothing of spec.autoscaling: turning it on or off must not replace the pods. auto is the engine's default.
        "--inter-token-target": None if engine.inter_token_target == "auto" else engine.inter_token_target,
        "--api-key-file": f"{API_KEY_FOLDER}/{API_KEY_FILE}" if spec.api_key_secret_name else None,
    }
    given = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    prefix_caching = "--prefix-caching" if engine.kv_cache.prefix_caching else "--no-prefix-caching"
    return ["serve", model_path(spec), *given, prefix_caching, *engine.extra_args]


def _resources(spec: Spec) -> dict[str, Any]:
    gpu = spec.resources.gpu
    # The request of an extended resource defaults to its limit.
    gpus = {gpu.resource_name: gpu.count} if gpu.count > 0 else {}
    return resources(spec.resources.requests, {**spec.resources.limits, **gpus})


def _probes(spec: Spec) -> dict[str, Any]:
    ready = {"httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": PROBE_SECONDS, "timeoutSeconds": 5}
    return {
        # Covers loading the model. The other two probes start when it has passed.
        "startupProbe": {**ready, "failureThreshold": ceil(spec.startup_deadline_seconds / PROBE_SECONDS)},
        "readinessProbe": {**ready, "failureThreshold": 2},
        "livenessProbe": {
            "httpGet": {"path": "/health", "port": "http"},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }


def _placement(name: str, scheduling: Scheduling) -> dict[str, Any]:
    return without_empty(
        {
            "nodeSelector": {"kubernetes.io/os": "linux", **scheduling.node_selector},
            "tolerations": [
                toleration.model_dump(by_alias=True, exclude_none=True) for toleration in scheduling.tolerations
            ],
            "affinity": scheduling.affinity,
            "priorityClassName": scheduling.priority_class_name,
            "runtimeClassName": scheduling.runtime_class_name,
            "topologySpreadConstraints": [
                {
                    **constraint.model_dump(by_alias=True),
                    "labelSelector": {"matchLabels": selector(name)},
                    # Count the pods of one revision only, so that old pods do not skew a rollout.
                    "matchLabelKeys": ["pod-template-hash"],
                }
                for constraint in scheduling.topology_spread_constraints
            ],
        }
    )

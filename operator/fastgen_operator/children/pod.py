"""The pod of one replica: command line, environment, probes, shutdown and security context of the engine."""

from __future__ import annotations

from math import ceil
from typing import Any, Final

from fastgen_operator.api import Spec
from fastgen_operator.api.engine import PASSED_SETTINGS
from fastgen_operator.children.desired import Desired
from fastgen_operator.children.model_volume import (
    CONTAINER_SECURITY,
    SCRATCH_VOLUME,
    ModelFiles,
    disposable_volumes,
    fetch_container,
    model_files,
    resources,
)
from fastgen_operator.kinds import Object
from fastgen_operator.labels_and_annotations import MODEL_ANNOTATION
from fastgen_operator.objects.container import ENGINE_CONTAINER, HTTP_PORT

# Time for EndpointSlices and proxies to stop routing to a terminating pod, which serves new requests until then.
ENDPOINT_SECONDS: Final = 15
# Time after the drain deadline to write the last responses and exit.
SHUTDOWN_SECONDS: Final = 15
PROBE_SECONDS: Final = 2
# Mount path of the API keys, and their key in the Secret.
API_KEY_FOLDER: Final = "/etc/fastgen"
API_KEY_FILE: Final = "api-keys"


def build_pod(desired: Desired) -> Object:
    """Build the pod template of a replica. It complies with the restricted Pod Security Standard."""
    spec, settings = desired.spec, desired.platform.pods
    files = model_files(desired)
    downloads = spec.model.is_downloaded and not spec.is_preloaded
    # NCCL puts its buffers into /dev/shm if the GPUs cannot access each other's memory. NVIDIA recommends 1 GiB.
    has_ranks_on_gpus = spec.engine.device == "cuda" and spec.num_ranks > 1
    keys = {"secretName": spec.api_key_secret_name, "items": [{"key": API_KEY_FILE, "path": API_KEY_FILE}]}
    pod = {
        "serviceAccountName": desired.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": ENDPOINT_SECONDS + spec.drain_seconds + SHUTDOWN_SECONDS,
        "securityContext": settings.security_context,
        "initContainers": [fetch_container(desired, desired.image)] if downloads else [],
        "containers": [_container(desired, files)],
        "volumes": [
            SCRATCH_VOLUME,
            {"name": "cache", "emptyDir": {"sizeLimit": "10Gi"}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi" if has_ranks_on_gpus else "256Mi"}},
            *files.volumes,
            *([{"name": "api-keys", "secret": keys}] if spec.api_key_secret_name else []),
            *settings.volumes,
        ],
        "imagePullSecrets": [{"name": secret} for secret in settings.image_pull_secrets],
        **_placement(desired),
    }
    # The API server drops empty lists, maps and nulls.
    pod = {name: value for name, value in pod.items() if value not in (None, [], {}, "")}
    in_use = {MODEL_ANNOTATION: spec.model.address} if spec.model.is_downloaded else {}
    metadata = {"labels": desired.labels, "annotations": {**disposable_volumes(pod), **in_use}}
    return {"metadata": metadata, "spec": pod}


def _container(desired: Desired, files: ModelFiles) -> dict[str, Any]:
    spec, settings, gpu = desired.spec, desired.platform.pods, desired.spec.resources.gpu
    # The request of an extended resource defaults to its limit.
    limits = {**spec.resources.limits, **({gpu.resource_name: gpu.count} if gpu.count > 0 else {})}
    # Mount the folder: the kubelet does not update Secret files that are mounted with subPath.
    keys = {"name": "api-keys", "mountPath": API_KEY_FOLDER, "readOnly": True}
    return {
        "name": ENGINE_CONTAINER,
        "image": desired.image,
        "imagePullPolicy": "IfNotPresent",
        "args": engine_arguments(desired, files.path),
        "env": [
            {"name": "HOME", "value": "/tmp"},
            {"name": "XDG_CACHE_HOME", "value": "/cache"},
            {"name": "NUMBA_CACHE_DIR", "value": "/cache/numba"},
            *settings.environment,
        ],
        "ports": [{"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"}],
        **resources(spec.resources.requests, limits),
        **_probes(spec),
        # The kubelet implements this sleep, so the image needs no shell.
        "lifecycle": {"preStop": {"sleep": {"seconds": ENDPOINT_SECONDS}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": CONTAINER_SECURITY,
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "cache", "mountPath": "/cache"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *files.mounts,
            *([keys] if spec.api_key_secret_name else []),
            *settings.mounts,
        ],
    }


def engine_arguments(desired: Desired, model_path: str) -> list[str]:
    """Return the arguments of the image's entry point."""
    spec, engine = desired.spec, desired.spec.engine
    values: dict[str, Any] = {
        **dict(engine),
        **dict(engine.kv_cache),
        # Not --host: by default, the engine listens on all addresses of both families.
        "port": HTTP_PORT,
        "served_model_name": spec.model.served_name or desired.name,
        "drain_seconds": spec.drain_seconds,
        # Nothing of spec.autoscaling: turning it on or off must not replace the pods. auto is the engine's default.
        "inter_token_target": None if engine.inter_token_target == "auto" else engine.inter_token_target,
        # Engines of earlier versions, in spec.engine.image, have no such flag.
        "tensor_parallel": None if spec.num_ranks == 1 else spec.num_ranks,
        "api_key_file": f"{API_KEY_FOLDER}/{API_KEY_FILE}" if spec.api_key_secret_name else None,
    }
    words: list[str] = []
    for flag, name in PASSED_SETTINGS.items():
        match values[name]:
            case None:
                pass
            case bool(is_on):
                words.append(flag if is_on else flag.replace("--", "--no-", 1))
            case value:
                words += [flag, str(value)]
    return ["serve", model_path, *words, *engine.extra_args]


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


def _placement(desired: Desired) -> dict[str, Any]:
    scheduling = desired.spec.scheduling
    return {
        "nodeSelector": {"kubernetes.io/os": "linux", **scheduling.node_selector},
        "tolerations": [each.model_dump(by_alias=True, exclude_none=True) for each in scheduling.tolerations],
        "affinity": scheduling.affinity,
        "priorityClassName": scheduling.priority_class_name,
        "runtimeClassName": scheduling.runtime_class_name,
        "topologySpreadConstraints": [
            {
                **constraint.model_dump(by_alias=True),
                "labelSelector": {"matchLabels": desired.selector},
                # Count the pods of one revision only, so that old pods do not skew a rollout.
                "matchLabelKeys": ["pod-template-hash"],
            }
            for constraint in scheduling.topology_spread_constraints
        ],
    }

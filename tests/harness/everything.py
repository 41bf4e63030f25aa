"""A spec that sets every field, for tests that cover all fields."""

from __future__ import annotations

from typing import Any

SOME_ZONES = {"key": "zone", "operator": "In", "values": ["a", "b"]}

# Most values differ from the defaults, and many are not in the form that the API server returns.
EVERYTHING: dict[str, Any] = {
    "model": {
        "source": "hf://owner/tiny",
        "revision": "v1",
        "servedName": "tiny",
        "secretName": "hub-token",
        "download": {
            "resources": {"requests": {"cpu": "0.2", "memory": "512Mi"}, "limits": {"cpu": 1, "memory": "1024Mi"}}
        },
    },
    "engine": {
        "image": "engine:other",
        "device": "cuda",
        "dtype": "float32",
        "tensorParallel": 1,
        "tokenBudget": 128,
        "interTokenTarget": 100,
        "maxSequences": 64,
        "maxModelLength": 4096,
        "maxQueuedRequests": 7,
        "kvCache": {"memoryPercent": 50, "blockSize": 32, "swapSpace": "1024Mi", "prefixCaching": False},
        "extraArgs": ["--chunking", "greedy"],
    },
    "resources": {
        "gpu": {"count": 1, "resourceName": "example.com/gpu"},
        "requests": {"cpu": "0.5", "memory": "1024Mi", "ephemeral-storage": 1000000000},
        "limits": {"cpu": 2, "memory": "2048Mi"},
    },
    "replicas": 2,
    "apiKeySecretName": "keys",
    "podTemplate": {
        "metadata": {"labels": {"team": "search"}, "annotations": {"note": "yes"}},
        # Many fields have no effect, or are not in the form that the API server returns.
        "spec": {
            "hostNetwork": False,
            "nodeSelector": {},
            "hostAliases": [],
            "resourceClaims": [{"name": "device", "resourceClaimName": "device"}],
            "imagePullSecrets": [{"name": "registry"}],
            "volumes": [{"name": "scratch", "emptyDir": {"sizeLimit": "1024Mi"}}],
            "containers": [
                {
                    "name": "proxy",
                    "image": "proxy:1",
                    "tty": False,
                    "command": [],
                    "env": [{"name": "EMPTY", "value": ""}],
                    "resources": {"requests": {"cpu": "0.1"}},
                    "readinessProbe": {"tcpSocket": {"port": 1}, "initialDelaySeconds": 0},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                    "volumeMounts": [{"name": "scratch", "mountPath": "/scratch", "readOnly": False, "subPath": ""}],
                }
            ],
        },
    },
    # Without preload the pods download the model, so they are created immediately.
    "cache": {"size": "10240Mi", "storageClassName": "fast", "accessMode": "ReadWriteMany", "preload": False},
    "rollout": {
        "maxSurge": 1,
        "maxUnavailable": 0,
        "progressDeadlineSeconds": 900,
        "canary": {
            "steps": [{"percent": 10, "minutes": 5}, {"percent": 50, "minutes": 30}],
            "analysis": {
                "maxErrorPercent": 2,
                "maxFirstTokenMilliseconds": 500,
                "maxInterTokenMilliseconds": 60,
                "compareWithStable": False,
            },
        },
    },
    "disruption": {"minAvailable": 1},
    "network": {
        "allowFrom": [
            {"podSelector": {}},
            {
                "podSelector": {"matchLabels": {"app": "web"}, "matchExpressions": [SOME_ZONES]},
                "namespaceSelector": {
                    "matchLabels": {"team": "search"},
                    "matchExpressions": [{"key": "a", "operator": "Exists"}, SOME_ZONES],
                },
            },
            {"podSelector": {"matchLabels": {}}},
            {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
            {"ipBlock": {"cidr": "192.168.0.0/16", "except": []}},
        ]
    },
    "gateway": {"expose": True},
    "drainSeconds": 30,
    "startupDeadlineSeconds": 333,
    "scheduling": {
        "nodeSelector": {"disk": "fast"},
        "tolerations": [
            {"key": "gpu", "operator": "Equal", "value": "x", "effect": "NoExecute", "tolerationSeconds": 5},
            {"key": "a"},
        ],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a", "b"]}]}
                    ]
                }
            }
        },
        "priorityClassName": "system-cluster-critical",
        "runtimeClassName": "confined",
        "topologySpreadConstraints": [
            {"topologyKey": "zone"},
            {"topologyKey": "host", "maxSkew": 2, "whenUnsatisfiable": "ScheduleAnyway"},
        ],
    },
}

# The same spec, but with autoscaling instead of fixed replicas, and without claims, which exclude placeholder pods.
_POD = {name: value for name, value in EVERYTHING["podTemplate"]["spec"].items() if name != "resourceClaims"}
AUTOSCALED: dict[str, Any] = {
    **{name: value for name, value in EVERYTHING.items() if name != "replicas"},
    "podTemplate": {**EVERYTHING["podTemplate"], "spec": _POD},
    "autoscaling": {
        "minReplicas": 2,
        "maxReplicas": 5,
        "nodeHeadroom": 1,
        "idleSeconds": 60,
        "targets": {
            "timeToFirstTokenMilliseconds": 500,
            "interTokenLatencyMilliseconds": 80,
            "utilizationPercent": 70,
            "attainmentPercent": 95,
        },
        "mode": "Auto",
        "learning": "Apply",
        "scaleUp": {
            "stabilizationSeconds": 10,
            "policies": [{"type": "Pods", "value": 2, "periodSeconds": 600}],
            "selectPolicy": "Min",
        },
        "scaleDown": {
            "stabilizationSeconds": 100,
            "maxStepPercent": 50,
            "policies": [{"type": "Percent", "value": 20, "periodSeconds": 600}],
            "selectPolicy": "Min",
        },
        # Active on leap days only, so that the replicas do not depend on the time of a test.
        "schedules": [
            {
                "name": "office",
                "start": "0 8 29 feb *",
                "end": "0 18 29 feb *",
                "timeZone": "Europe/Berlin",
                "minReplicas": 3,
            },
            {"name": "report", "start": "0 2 29 feb *", "durationSeconds": 3600, "timeZone": "UTC", "minReplicas": 3},
        ],
    },
}

# The same spec, but with a volume that one node has at a time; all replicas are then evicted together, and there is no
# canary.
BLOCK_STORAGE: dict[str, Any] = {
    **{name: value for name, value in EVERYTHING.items() if name != "disruption"},
    "rollout": {name: value for name, value in EVERYTHING["rollout"].items() if name != "canary"},
    "cache": {**EVERYTHING["cache"], "accessMode": "ReadWriteOnce"},
}

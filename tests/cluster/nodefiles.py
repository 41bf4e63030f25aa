"""Configuration files of a node's programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.families import V4, V6, Families

BRIDGE = "fastgen0"
PAUSE_IMAGE = "localhost/fastgen-bed/pause:1"
CNI_PROGRAMS = Path("/usr/lib/cni")


@dataclass(frozen=True, slots=True)
class Mount:
    """A folder or file of this machine, mounted read-only in every container of the node."""

    source: Path
    target: Path


def containerd(folder: Path, images: Path) -> str:
    """Return containerd's configuration. Its own root, state and socket isolate it from any other containerd."""
    return f"""\
version = 2
root = "{images}"
state = "{folder}/containerd/state"
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
  address = "{folder}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "{folder}/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  max_container_log_line_size = 262144
  # Without CAP_SYS_RESOURCE the kernel rejects an OOM score below containerd's own, so no pod would start.
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{CNI_PROGRAMS}"
    conf_dir = "{folder}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      base_runtime_spec = "{folder}/base-spec.json"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"""


def base_spec(default: str, mounts: Iterable[Mount]) -> str:
    """Return the base runtime specification of every container: containerd's default plus the mounts."""
    spec: dict[str, Any] = json.loads(default)
    for mount in mounts:
        spec["mounts"].append(
            {
                "destination": str(mount.target),
                "type": "bind",
                "source": str(mount.source),
                "options": ["rbind", "ro", "nosuid"],
            }
        )
    return json.dumps(spec)


def network(folder: Path, families: Families = (V4,)) -> str:
    """Return the CNI configuration of the pods: a bridge, host-local addresses and host ports."""
    ipam = {
        "type": "host-local",
        "dataDir": f"{folder}/addresses",
        "ranges": [[{"subnet": each.pods}] for each in families],
        "routes": [{"dst": each.everywhere} for each in families],
    }
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": True,
        "hairpinMode": True,  # a pod reaches itself through its Service
        "ipam": ipam,
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "0.4.0", "name": BRIDGE, "plugins": [bridge, ports]}, indent=1)


def kubelet(folder: Path, pki: Path, families: Families = (V4,)) -> str:
    """Return the kubelet's configuration."""
    settings = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/kubelet.crt",
        "tlsPrivateKeyFile": f"{pki}/kubelet.key",
        "containerRuntimeEndpoint": f"unix://{folder}/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,
        "clusterDNS": [families[0].dns],
        "clusterDomain": "cluster.local",
        "maxPods": 200,
        "podLogsDir": f"{folder}/pods",
        "volumePluginDir": f"{folder}/kubelet/volume-plugins",
        "serializeImagePulls": False,
        # Images are loaded, never pulled: a garbage-collected one would be lost.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "syncFrequency": "10s",
        "nodeStatusUpdateFrequency": "5s",
        # By default, the second restart of a container waits 10 s, and each later one twice as long.
        "featureGates": {"KubeletCrashLoopBackOffMax": True},
        "crashLoopBackOff": {"maxContainerRestartPeriod": "3s"},
    }
    if V6 in families:
        settings["address"] = V6.listen
    return yaml.safe_dump(settings)


def proxy(folder: Path, node: str, families: Families = (V4,)) -> str:
    """Return kube-proxy's configuration. It detects the node's address."""
    settings = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": f"{folder}/proxy.kubeconfig"},
        "mode": "iptables",
        "clusterCIDR": ",".join(each.pods for each in families),
        "hostnameOverride": node,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0, "min": 0},  # keep the machine's own limits
        "oomScoreAdj": 0,
        "iptables": {"minSyncPeriod": "0s"},
    }
    return yaml.safe_dump(settings)


def api_server_flags(pki: Path, families: Families = (V4,)) -> Sequence[str]:
    """Return the flags that an API server needs only if there is a kubelet."""
    return (
        f"--bind-address={(V6 if V6 in families else V4).listen}",  # pods reach it at the machine's address
        "--allow-privileged=true",
        "--enable-admission-plugins=NodeRestriction",
        f"--kubelet-client-certificate={pki}/kubelet-client.crt",
        f"--kubelet-client-key={pki}/kubelet-client.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP,Hostname",
    )

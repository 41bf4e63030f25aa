"""Settings of the operator for every pod that it creates.

Pull secrets, user ids, proxy and certificate authorities.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

# Unprivileged user of the engine image.
USER_ID: Final = 65532
_CA_VOLUME: Final = "ca-bundle"
_CA_FOLDER: Final = "/etc/fastgen-ca"
_CA_FILE: Final = f"{_CA_FOLDER}/ca.crt"
# Python's ssl with httpx, requests, and boto3 read one of these each.
_CA_VARIABLES: Final = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE")
_PORTS: Final = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class PodSettings:
    """What the pods of all resources have in common.

    Attributes:
        http_proxy, https_proxy: URLs of the proxies for outgoing connections; empty for none.
        no_proxy: names and addresses that are reached without a proxy, separated by commas.
        ca_config_map: ConfigMap in each resource's namespace with the certificate authorities to trust; empty for
            those of the image.
        ca_key: its key with the certificates, in PEM.
        image_pull_secrets: names of Secrets in each resource's namespace, with which the kubelet pulls the images.
        fixed_user: run as `USER_ID`. False leaves user and groups to the cluster, as OpenShift requires.
    """

    http_proxy: str = ""
    https_proxy: str = ""
    no_proxy: str = ""
    ca_config_map: str = ""
    ca_key: str = "ca.crt"
    image_pull_secrets: tuple[str, ...] = ()
    fixed_user: bool = True

    @property
    def environment(self) -> list[dict[str, str]]:
        """Variables of every container that makes outgoing connections."""
        proxies = {"HTTP_PROXY": self.http_proxy, "HTTPS_PROXY": self.https_proxy}
        values = {name: url for name, url in proxies.items() if url}
        if values and self.no_proxy:
            values["NO_PROXY"] = self.no_proxy
        if self.ca_config_map:
            values |= dict.fromkeys(_CA_VARIABLES, _CA_FILE)
        return [{"name": name, "value": value} for name, value in values.items()]

    @property
    def volumes(self) -> list[dict[str, Any]]:
        """Volumes of every pod."""
        if not self.ca_config_map:
            return []
        items = [{"key": self.ca_key, "path": "ca.crt"}]
        return [{"name": _CA_VOLUME, "configMap": {"name": self.ca_config_map, "items": items}}]

    @property
    def mounts(self) -> list[dict[str, Any]]:
        """Mounts of every container that makes outgoing connections."""
        return [{"name": _CA_VOLUME, "mountPath": _CA_FOLDER, "readOnly": True}] if self.ca_config_map else []

    @property
    def security_context(self) -> dict[str, Any]:
        """Security context of every pod."""
        user = {"runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID} if self.fixed_user else {}
        return {"runAsNonRoot": True, **user, "seccompProfile": {"type": "RuntimeDefault"}}

    @property
    def egress(self) -> list[dict[str, Any]]:
        """NetworkPolicy egress rules to the proxies.

        A name can have any address, so only its port is restricted.
        """
        rules = []
        for url in dict.fromkeys((self.http_proxy, self.https_proxy)):
            if not url:
                continue
            parts = urlsplit(url)
            rule: dict[str, Any] = {"ports": [{"port": parts.port or _PORTS[parts.scheme], "protocol": "TCP"}]}
            if (block := _as_block(parts.hostname or "")) is not None:
                rule["to"] = [{"ipBlock": {"cidr": block}}]
            rules.append(rule)
        return rules


PLAIN_PODS: Final = PodSettings()


def _as_block(host: str) -> str | None:
    try:
        return str(ipaddress.ip_network(host))
    except ValueError:
        return None

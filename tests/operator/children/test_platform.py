"""Settings of all pods: proxy, certificate authorities and user ids reach engines and downloads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fastgen_operator.children.model_cache import build_fetch_job
from fastgen_operator.children.platform import Platform, PodSettings
from fastgen_operator.children.pod_security import broken_rules
from fastgen_operator.kinds import NETWORK_POLICY, Object
from harness.objects import desired_of, manifests, pod_template, stored

HUB = {"source": "hf://tests/tiny"}
PROXIED = PodSettings(
    http_proxy="http://proxy:3128", https_proxy="http://10.0.0.1:3129", no_proxy=".svc", ca_config_map="authorities"
)
ASSIGNED = PodSettings(fixed_user=False)


def pods(settings: PodSettings) -> dict[str, Object]:
    """Return the specs of all pods that the operator creates, by what they are for."""
    found = {}
    for name, more in (("init", {}), ("cached", {"cache": {"size": "1Gi"}})):
        owner = stored(model=HUB, **more)
        platform = Platform("engine:test", pods=settings)
        found[name] = pod_template(owner, platform)["spec"]
        if more:
            job = build_fetch_job(desired_of(owner, platform), found[name], "uid-of-claim", ())
            found["job"] = job["spec"]["template"]["spec"]
    return found


def test_the_kubelet_pulls_every_image_with_the_secrets() -> None:
    for what, pod in pods(PodSettings(image_pull_secrets=("one", "two"))).items():
        assert pod["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}], what
    assert not any("imagePullSecrets" in pod for pod in pods(PodSettings()).values())


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def test_every_container_has_the_proxies_and_the_authorities() -> None:
    expected: Object = {
        **{"HTTP_PROXY": "http://proxy:3128", "HTTPS_PROXY": "http://10.0.0.1:3129", "NO_PROXY": ".svc"},
        **dict.fromkeys(("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"), "/etc/fastgen-ca/ca.crt"),
    }
    for what, pod in pods(PROXIED).items():
        (volume,) = [each for each in pod["volumes"] if each["name"] == "ca-bundle"]
        assert volume["configMap"] == {"name": "authorities", "items": [{"key": "ca.crt", "path": "ca.crt"}]}
        for container in containers(pod):
            variables = {each["name"]: each["value"] for each in container["env"]}
            assert expected.items() <= variables.items(), (what, container["name"])
            assert {"name": "ca-bundle", "mountPath": "/etc/fastgen-ca", "readOnly": True} in container["volumeMounts"]
    for pod in pods(PodSettings(no_proxy=".svc")).values():
        assert "ca-bundle" not in [each["name"] for each in pod["volumes"]]
        assert not {"NO_PROXY", "SSL_CERT_FILE"} & {each["name"] for c in containers(pod) for each in c["env"]}


def test_downloads_may_connect_to_the_proxies_and_engines_without_downloads_may_not() -> None:
    by_address = {"ports": [{"port": 3129, "protocol": "TCP"}], "to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]}
    by_name = {"ports": [{"port": 3128, "protocol": "TCP"}]}
    for more, serving in (({}, True), ({"cache": {"size": "1Gi"}}, False)):
        owner = stored(model=HUB, **more)
        children = manifests(owner, Platform("engine:test", pods=PROXIED))
        rules = {
            child["metadata"]["name"]: child["spec"]["egress"] for kind, child in children if kind == NETWORK_POLICY
        }
        assert (by_address in rules["chat"] and by_name in rules["chat"]) is serving
        if not serving:
            assert by_address in rules["chat.fetch"]
            assert by_name in rules["chat.fetch"]
    ports = [rule["ports"][0]["port"] for rule in PodSettings(http_proxy="http://a", https_proxy="https://b").egress]
    assert ports == [80, 443]


def test_the_cluster_assigns_the_user_if_none_is_fixed() -> None:
    for settings, users in ((PROXIED, 65532), (ASSIGNED, None)):
        for pod in pods(settings).values():
            context = pod["securityContext"]
            assert [context.get(name) for name in ("runAsUser", "runAsGroup", "fsGroup")] == [users] * 3
            assert context["runAsNonRoot"] is True
            assert broken_rules({"spec": pod}) == ()


def image_environment() -> dict[str, str]:
    """Return the variables that the Dockerfile sets for both images."""
    text = (Path(__file__).parents[3] / "Dockerfile").read_text()
    (line,) = re.findall(r"^ENV (PATH=.*)$", text, re.MULTILINE)
    return dict(pair.split("=", 1) for pair in line.split())


# As OpenShift runs a container: a user id without a name, the group 0, and the volumes' group. The capability only lets
# it read this machine's Python, wherever that is.
AS_ANYONE = (
    *("setpriv", "--reuid=1000680000", "--regid=0", "--groups=1000680000"),
    *("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"),
)
PROGRAM = """
import getpass, os, pathlib, kopf
from kopf._core.engines import peering
assert (os.getuid(), os.getgid()) == (1000680000, 0)
assert peering.detect_own_id(manual=True).startswith("fastgen@")
import fastgen.commands.main, fastgen_operator.main
assert str(pathlib.Path.home()) == os.environ["HOME"]
from fastgen.kernels.cpu import environment
environment.prepare()
folder = pathlib.Path(os.environ["NUMBA_CACHE_DIR"])
assert folder.is_relative_to(os.environ["HOME"]), folder
assert (folder / "built-matmul-x").exists(), "the image's kernels"
"""


@pytest.mark.parametrize("has_variables", [True, False])
def test_the_images_run_under_any_user_id_in_the_group_zero(has_variables: bool, tmp_path: Path) -> None:
    home, kernels = tmp_path / "tmp", tmp_path / "kernels"
    for folder, mode in ((home, 0o1777), (kernels, 0o755)):
        folder.mkdir()
        folder.chmod(mode)
    (kernels / "built-matmul-x").touch(0o644)
    kept = ("PATH", "PYTHONPATH")
    environment: dict[str, Any] = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "FASTGEN_KERNEL_CACHE": str(kernels), "TMPDIR": str(home)}
    if has_variables:
        variables = image_environment()
        assert variables["HOME"] == "/tmp", "a volume of every pod"
        environment |= {"USER": variables["USER"], "HOME": str(home)}
    command = [*AS_ANYONE, sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) is has_variables, done.stderr


def test_the_images_name_their_user_by_its_number_and_keep_the_permissions_of_their_files() -> None:
    """The kubelet cannot check runAsNonRoot of a name. What root installs is readable by everyone by default."""
    text = (Path(__file__).parents[3] / "Dockerfile").read_text()
    instructions = [line for line in text.splitlines() if not line.startswith("#")]
    assert [line for line in instructions if line.startswith("USER")] == ["USER 65532:65532"] * 3
    assert not [line for line in instructions if re.search(r"umask|chmod|chown|VOLUME", line)]

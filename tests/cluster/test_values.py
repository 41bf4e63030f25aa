"""Pure functions of the test bed: command lines, configurations, image names, the choice of the cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from cluster import bed, dns, flags, images, nodefiles, packages, standin
from cluster.base import base_name
from cluster.commands import CommandError, run
from cluster.demo import ready_condition
from cluster.families import V4
from cluster.mounts import mounted_below
from cluster.node import Node
from cluster.traces import without_marks

SITE = flags.Site(Path("/bin"), Path("/s"), "192.0.2.7", 1, 2, 3, 4, 5)
DEFAULT_SPEC = json.dumps({"mounts": [{"destination": "/proc"}]})


@pytest.mark.parametrize(
    ("environment", "docker", "kind"),
    [
        ({"FASTGEN_KUBECONFIG": "/k"}, True, "external"),
        ({"FASTGEN_KUBECONFIG": ""}, True, "kind"),
        ({}, False, "native"),
    ],
)
def test_the_cluster_is_external_if_set_then_kind_then_native(
    environment: dict[str, str], docker: bool, kind: str
) -> None:
    assert bed.choose(environment, lambda: docker) == kind


def test_every_command_line_names_the_state_folder() -> None:
    config = Path("/s/x.kubeconfig")
    for command in (
        flags.etcd(SITE),
        flags.api_server(SITE, authorization="RBAC"),
        flags.controller_manager(SITE, config),
        flags.scheduler(SITE, config),
    ):
        assert any("/s/" in str(word) for word in command[1:])


def test_the_api_servers_hosts_include_those_used_by_pods() -> None:
    assert {"127.0.0.1", "192.0.2.7", "10.96.0.1", "kubernetes.default.svc"} <= set(flags.hosts(SITE))


def test_mounts_are_added_read_only_to_the_default_specification() -> None:
    spec = json.loads(nodefiles.base_spec(DEFAULT_SPEC, [nodefiles.Mount(Path("/usr"), Path("/host/usr"))]))
    assert [m["destination"] for m in spec["mounts"]] == ["/proc", "/host/usr"]
    assert "ro" in spec["mounts"][1]["options"]


def test_the_dns_service_has_the_address_in_the_kubelets_configuration() -> None:
    (address,) = yaml.safe_load(nodefiles.kubelet(Path("/s"), Path("/s/pki")))["clusterDNS"]
    services = [each for each in yaml.safe_load_all(dns.manifests(V4.dns)) if each["kind"] == "Service"]
    assert [service["spec"]["clusterIP"] for service in services] == [address]


def test_a_state_folder_too_long_for_sockets_is_rejected() -> None:
    with pytest.raises(ValueError, match="FASTGEN_BED_FOLDER"):
        Node(Path("/bin"), Path("/" + "x" * 80))


def test_the_substitute_image_hides_no_path_of_real_images() -> None:
    for mount in standin.mounts():
        taken = {Path(path) for path in ("/usr", "/bin", "/lib", "/lib64", "/etc", "/opt/venv", "/models", "/tmp")}
        assert not taken & {mount.target, *mount.target.parents}
    sources = {str(mount.source) for mount in standin.mounts()}
    assert {"/usr", sys.prefix, str(images.REPOSITORY / "engine")} <= sources  # what the unit tests run


def test_the_substitute_image_has_the_model_at_the_real_path() -> None:
    link = Path(standin.image().links[f"/models/{standin.MODEL}"])
    assert (sys.prefix / link.relative_to(standin.HOST / "venv")).is_file()


def test_the_substitute_image_mounts_nothing_below_tmp() -> None:
    # A clone may be below /tmp, where every pod has its own volume.
    assert all(not mount.target.is_relative_to("/tmp") for mount in standin.mounts())
    assert standin.image().entrypoint[0].startswith(f"{standin.HOST}/")


def test_an_image_tag_depends_on_all_inputs(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "a.py").write_text("1")
    for name in ("Dockerfile", ".dockerignore", "LICENSE", "README.md", "pyproject.toml", "requirements", "operator"):
        (tmp_path / name).write_text(name)
    tree = images.Tree(tmp_path)
    names = [images.image_name("engine", {}, tree), images.image_name("engine", {"DEMO": "1"}, tree)]
    (tmp_path / "engine" / "__pycache__").mkdir()
    (tmp_path / "engine" / "__pycache__" / "a.pyc").write_text("x")
    assert images.image_name("engine", {}, tree) == names[0]
    (tmp_path / "engine" / "a.py").write_text("2")
    names.append(images.image_name("engine", {}, tree))
    assert len(set(names)) == 3
    assert all(name.startswith("docker.io/library/fastgen-engine:") for name in names)


@pytest.mark.parametrize(
    ("other", "older"),
    [
        ("fastgen-engine:old", True),
        ("fastgen-engine:new", False),
        ("fastgen-engine:host", False),
        ("fastgen-engine:previous-old", False),
        ("x:old", False),
    ],
)
def test_only_images_of_the_same_target_and_tree_are_older_builds(other: str, older: bool) -> None:
    prefix = "docker.io/library"
    assert images.is_older_build(f"{prefix}/{other}", f"{prefix}/fastgen-engine:new") is older
    assert images.is_older_build(f"{prefix}/fastgen-engine:previous-1", f"{prefix}/fastgen-engine:previous-2")


def test_the_build_context_is_exactly_what_the_tag_hashes() -> None:
    lines = (images.REPOSITORY / ".dockerignore").read_text().splitlines()
    assert sorted(line[1:] for line in lines if line.startswith("!")) == sorted(images.CONTEXT)
    assert "*" in lines


def test_the_base_name_changes_with_the_package_source() -> None:
    assert base_name({}) != base_name({"PIP_INDEX_URL": "https://packages.example"})


def test_packet_filter_rules_of_other_programs_are_kept() -> None:
    rules = "*nat\n:KUBE-SERVICES - [0:0]\n-A PREROUTING -j KUBE-SERVICES\n-A PREROUTING -j MINE\nCOMMIT\n"
    assert without_marks(rules) == "*nat\n-A PREROUTING -j MINE\nCOMMIT\n"


def test_only_mounts_below_the_folder_are_returned_deepest_first() -> None:
    table = "a /s x rw 0 0\nb /s/a\\040b/c x rw 0 0\nc /s/a\\040b x rw 0 0\nd /sx x rw 0 0\n"
    assert mounted_below(Path("/s"), table) == [Path("/s/a b/c"), Path("/s/a b"), Path("/s")]


def test_a_missing_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "PACKAGES", {"there": "sh", "not-there": "no-such-program"})
    assert packages.missing_packages() == ["not-there"]


def test_the_error_of_a_failed_program_contains_its_stderr() -> None:
    with pytest.raises(CommandError, match="no-such-file") as caught:
        run(["ls", "no-such-file"])
    assert "status" in str(caught.value)


def test_a_condition_of_an_older_generation_is_unknown() -> None:
    condition = {"type": "Ready", "status": "True", "reason": "R", "message": "m", "observedGeneration": 1}
    resource = {"metadata": {"generation": 1}, "status": {"conditions": [condition]}}
    assert ready_condition(resource) == ("True", "R: m")
    assert ready_condition({**resource, "metadata": {"generation": 2}})[0] == "Unknown"

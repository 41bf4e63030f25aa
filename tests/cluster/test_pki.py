"""Certificates and kubeconfigs."""

from __future__ import annotations

import base64
import json
import stat
from pathlib import Path

from cryptography import x509
from cryptography.x509.oid import NameOID

from cluster.pki import Authority, write_token_key


def test_reopening_an_authority_returns_the_same_certificate(tmp_path: Path) -> None:
    first, second = Authority.open(tmp_path / "pki"), Authority.open(tmp_path / "pki")
    assert first.certificate == second.certificate


def test_a_kubeconfigs_certificate_contains_user_and_groups(tmp_path: Path) -> None:
    authority = Authority.open(tmp_path / "pki")
    path = authority.kubeconfig(tmp_path / "bob.kubeconfig", "https://127.0.0.1:1", "bob", ["dev", "ops"])
    (user,) = json.loads(path.read_text())["users"]
    certificate = x509.load_pem_x509_certificate(base64.b64decode(user["user"]["client-certificate-data"]))
    certificate.verify_directly_issued_by(authority.certificate)
    assert [a.value for a in certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)] == ["bob"]
    groups = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    assert sorted(str(a.value) for a in groups) == ["dev", "ops"]


def test_dns_names_and_ip_addresses_are_distinguished(tmp_path: Path) -> None:
    Authority.open(tmp_path).issue("server", "server", hosts=["localhost", "127.0.0.1"])
    certificate = x509.load_pem_x509_certificate((tmp_path / "server.crt").read_bytes())
    hosts = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert hosts.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(a) for a in hosts.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]


def test_keys_are_readable_by_their_owner_only_and_the_token_key_is_sec1(tmp_path: Path) -> None:
    Authority.open(tmp_path)
    write_token_key(tmp_path / "tokens.key")
    for name in ("ca.key", "tokens.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert (tmp_path / "tokens.key").read_text().startswith("-----BEGIN EC PRIVATE KEY-----")

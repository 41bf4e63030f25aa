"""A certificate authority in a folder, and kubeconfigs with its certificates."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=365)
# New certificates stay valid if the clock is set back a little.
ALLOWED_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Authority:
    """An EC P-256 authority. Its certificates are valid for both clients and servers."""

    folder: Path
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate

    @classmethod
    def open(cls, folder: Path) -> Authority:
        """Return the authority in the folder; create it if there is none."""
        certificate, key = folder / "ca.crt", folder / "ca.key"
        if certificate.exists() and key.exists():
            loaded = serialization.load_pem_private_key(key.read_bytes(), password=None)
            if isinstance(loaded, ec.EllipticCurvePrivateKey):
                return cls(folder, loaded, x509.load_pem_x509_certificate(certificate.read_bytes()))
        return cls._make(folder)

    @classmethod
    def _make(cls, folder: Path) -> Authority:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            _builder(name, name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        _write_key(folder / "ca.key", key)
        (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return cls(folder, key, certificate)

    def issue(self, file: str, user: str, groups: Sequence[str] = (), hosts: Sequence[str] = ()) -> None:
        """Write FILE.crt and FILE.key.

        Kubernetes takes the user from the common name and the groups from the organizations. `hosts` are the names and
        addresses of a server with this certificate.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        subject = x509.Name([*attributes, x509.NameAttribute(NameOID.COMMON_NAME, user)])
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH])
        builder = (
            _builder(subject, self.certificate.subject, key.public_key())
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
            .add_extension(both, critical=False)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
        certificate = builder.sign(self.key, hashes.SHA256())
        _write_key(self.folder / f"{file}.key", key)
        (self.folder / f"{file}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def kubeconfig(self, path: Path, server: str, user: str, groups: Sequence[str] = ()) -> Path:
        """Write a kubeconfig with a new client certificate to `path`, and return `path`."""
        file = f"client-{path.stem}"
        self.issue(file, user, groups)
        encoded = {name: _base64(self.folder / name) for name in ("ca.crt", f"{file}.crt", f"{file}.key")}
        cluster = {"server": server, "certificate-authority-data": encoded["ca.crt"]}
        client = {
            "client-certificate-data": encoded[f"{file}.crt"],
            "client-key-data": encoded[f"{file}.key"],
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "bed",
            "clusters": [{"name": "bed", "cluster": cluster}],
            "users": [{"name": user, "user": client}],
            "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": user}}],
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(config, indent=1))
        return path


def write_token_key(path: Path) -> None:
    """Write the key that signs service account tokens, in SEC1: the API server rejects an EC key in PKCS#8."""
    key = ec.generate_private_key(ec.SECP256R1())
    form = serialization.PrivateFormat.TraditionalOpenSSL
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - ALLOWED_SKEW)
        .not_valid_after(now + LIFETIME)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    form = serialization.PrivateFormat.PKCS8
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()

"""A certificate and its key, as the kubelet mounts them, and as it replaces them."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


class MountedSecret:
    """A folder as the kubelet mounts a Secret of type kubernetes.io/tls: each content has a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = 0
        folder.mkdir()

    def renew(self, *, matching: bool = True) -> x509.Certificate:
        """Replace the content by a new certificate and its key, or another key."""
        key, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
            .sign(key, hashes.SHA256())
        )
        self._number += 1
        data = self.folder / f"..{self._number}"
        data.mkdir()
        (data / "tls.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (data / "tls.key").write_bytes(
            (key if matching else other).private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        (self.folder / "..data_tmp").symlink_to(data.name)
        os.rename(self.folder / "..data_tmp", self.folder / "..data")
        for file in ("tls.crt", "tls.key"):
            if not (self.folder / file).is_symlink():
                (self.folder / file).symlink_to(Path("..data") / file)
        return certificate

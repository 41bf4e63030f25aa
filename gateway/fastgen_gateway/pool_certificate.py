"""The certificate that Envoy shows to Gateways in front of InferencePools, which do not verify it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

# Longer than any pod lives: Envoy reads it at its start only.
_VALIDITY: Final = timedelta(days=3650)
_CERTIFICATE, _KEY = "tls.crt", "tls.key"


def write_certificate(folder: Path) -> None:
    """Write a self-signed certificate and its key to a folder, unless it has them. Raises OSError if it cannot."""
    if (folder / _CERTIFICATE).exists():
        return  # the container was restarted, and Envoy has read it
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fastgen-gateway")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + _VALIDITY)
        .sign(key, hashes.SHA256())
    )
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / _KEY).write_bytes(text)
    (folder / _KEY).chmod(0o444)  # where the cluster assigns users, Envoy may have another one
    # Last: with it, both are complete.
    (folder / _CERTIFICATE).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

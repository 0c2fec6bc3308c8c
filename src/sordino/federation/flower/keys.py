"""Keys, secrets and certificates of a Flower federation."""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from sordino import files

LOOPBACK = "127.0.0.1"


class Tls(NamedTuple):
    """TLS files of the link. Sites get only `authority`."""

    authority: Path
    certificate: Path
    key: Path


def private(path: Path, content: bytes) -> Path:
    """Create a file that only its owner can read."""
    files.create(path, content)
    return path


def secret(path: Path) -> Path:
    """Write 32 random bytes. A process that can read them may take tasks."""
    return private(path, secrets.token_bytes(32))


def certificates(folder: Path, *, hosts: Iterable[str] = (), days: int = 30) -> Tls:
    """Create a certificate authority and the link's certificate for localhost and `hosts`, both valid `days` days.

    The authority's key is not stored: a new certificate needs a new authority.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as as_bytes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def called(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def usage(*allowed: str) -> x509.KeyUsage:
        every = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
        every += ["key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]
        return x509.KeyUsage(**{name: name in allowed for name in every})

    now = datetime.datetime.now(datetime.UTC)
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    signer = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(["localhost", LOOPBACK, *hosts]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))

    def signed(subject: str, key: ec.EllipticCurvePrivateKey, *extensions: tuple[x509.ExtensionType, bool]) -> bytes:
        builder = x509.CertificateBuilder().subject_name(called(subject)).issuer_name(called("sordino authority"))
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        builder = builder.not_valid_after(now + datetime.timedelta(days=days))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(authority, hashes.SHA256()).public_bytes(as_bytes.Encoding.PEM)

    folder.mkdir(parents=True, exist_ok=True)
    tls = Tls(folder / "authority.pem", folder / "link.pem", folder / "link.key")
    tls.authority.write_bytes(
        signed(
            "sordino authority",
            authority,
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (usage("key_cert_sign", "crl_sign"), True),
            (signer, False),
        )
    )
    tls.certificate.write_bytes(
        signed(
            "sordino link",
            server,
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (usage("digital_signature"), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
            (x509.SubjectAlternativeName(names), False),
            (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), False),
            (x509.SubjectKeyIdentifier.from_public_key(server.public_key()), False),
        )
    )
    form = (as_bytes.Encoding.PEM, as_bytes.PrivateFormat.PKCS8, as_bytes.NoEncryption())
    private(tls.key, server.private_bytes(*form))
    return tls


def node_key(path: Path) -> Path:
    """Create a site's key for the link (EC P-384, OpenSSH format).

    Returns:
      The file of the public key, `path`.pub, which the coordinator registers.
    """
    from cryptography.hazmat.primitives import serialization as as_bytes
    from cryptography.hazmat.primitives.asymmetric import ec

    key, openssh = ec.generate_private_key(ec.SECP384R1()), as_bytes.PrivateFormat.OpenSSH
    private(path, key.private_bytes(as_bytes.Encoding.PEM, openssh, as_bytes.NoEncryption()))
    public = path.with_name(path.name + ".pub")
    public.write_bytes(key.public_key().public_bytes(as_bytes.Encoding.OpenSSH, as_bytes.PublicFormat.OpenSSH))
    return public


def ensure_node_key(path: Path) -> None:
    """Create a site's key for the link, unless it exists."""
    if not path.exists():
        node_key(path)

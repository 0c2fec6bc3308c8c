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
    """Files of the link: sites get `authority` alone."""

    authority: Path
    certificate: Path
    key: Path


def private(path: Path, content: bytes) -> Path:
    """A new file that only its owner can read."""
    files.create(path, content)
    return path


def secret(path: Path) -> Path:
    """32 random bytes: who can read them may take tasks."""
    return private(path, secrets.token_bytes(32))


def certificates(folder: Path, *, hosts: Iterable[str] = (), days: int = 30) -> Tls:
    """An authority of its own and the link's certificate for localhost and `hosts`, both for `days` days.

    The authority's key is not kept: a new certificate means a new authority.
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
        return x509.KeyUsage(**{word: word in allowed for word in every})

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
        paper = x509.CertificateBuilder().subject_name(called(subject)).issuer_name(called("sordino authority"))
        paper = paper.public_key(key.public_key()).serial_number(x509.random_serial_number())
        paper = paper.not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
        paper = paper.not_valid_after(now + datetime.timedelta(days=days))
        for extension, critical in extensions:
            paper = paper.add_extension(extension, critical)
        return paper.sign(authority, hashes.SHA256()).public_bytes(as_bytes.Encoding.PEM)

    folder.mkdir(parents=True, exist_ok=True)
    made = Tls(folder / "authority.pem", folder / "link.pem", folder / "link.key")
    made.authority.write_bytes(
        signed(
            "sordino authority",
            authority,
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (usage("key_cert_sign", "crl_sign"), True),
            (signer, False),
        )
    )
    made.certificate.write_bytes(
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
    private(made.key, server.private_bytes(*form))
    return made


def node_key(path: Path) -> Path:
    """A site's key (EC P-384, OpenSSH form) at `path`; returned is `path`.pub, its public half, to be registered."""
    from cryptography.hazmat.primitives import serialization as as_bytes
    from cryptography.hazmat.primitives.asymmetric import ec

    key, openssh = ec.generate_private_key(ec.SECP384R1()), as_bytes.PrivateFormat.OpenSSH
    private(path, key.private_bytes(as_bytes.Encoding.PEM, openssh, as_bytes.NoEncryption()))
    public = path.with_name(path.name + ".pub")
    public.write_bytes(key.public_key().public_bytes(as_bytes.Encoding.OpenSSH, as_bytes.PublicFormat.OpenSSH))
    return public

"""Certificates of a link: an authority that the sites trust, and the link's own certificate, which it renews."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sordino import files
from sordino.errors import SordinoError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

LOOPBACK = "127.0.0.1"
AUTHORITY, AUTHORITY_KEY = "sordino authority", "authority.key"
AUTHORITY_DAYS, LINK_DAYS = 3650, 365
RENEW_DAYS = 30  # before its end, from which on `coordinate` renews the link's certificate
NEW_AUTHORITY = (
    "run `sordino federate renew DIR --new-authority` and send its new tls/authority.pem to the sites, which need "
    "nothing else."
)


class Tls(NamedTuple):
    """TLS files of the link. Sites get only `authority`."""

    authority: Path
    certificate: Path
    key: Path

    @staticmethod
    def of(folder: Path) -> Tls:
        """The files in a folder."""
        return Tls(folder / "authority.pem", folder / "link.pem", folder / "link.key")


def certificates(
    folder: Path, *, hosts: Iterable[str] = (), days: int = LINK_DAYS, authority_days: int = AUTHORITY_DAYS
) -> Tls:
    """Create a certificate authority, and the link's certificate for localhost and `hosts`.

    The authority's key stays in `folder`, so that `renew` can make another certificate which the sites accept. Whoever
    reads that folder has the link's key too, and could pretend to be the link without it.

    Args:
      folder: where the files go.
      hosts: names and addresses by which sites reach the link.
      days: how long the link's certificate is valid.
      authority_days: how long the authority is valid.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    signer = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    folder.mkdir(parents=True, exist_ok=True)
    tls = Tls.of(folder)
    pem = _signed(
        AUTHORITY,
        key.public_key(),
        key,
        authority_days,
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (_usage("key_cert_sign", "crl_sign"), True),
        (signer, False),
    )
    _replace_key(folder / AUTHORITY_KEY, key)
    _replace_key(tls.key, ec.generate_private_key(ec.SECP256R1()))
    files.write(tls.authority, pem)
    tls.authority.chmod(0o644)  # public
    return renew(folder, hosts=hosts, days=days)


def renew(folder: Path, *, hosts: Iterable[str] = (), days: int = LINK_DAYS) -> Tls:
    """Make another certificate of the link by the same authority. The link keeps its key and the names that it has.

    Sites need nothing new. A link that is running has to be started again.

    Raises:
      SordinoError: the authority's key is missing, or the authority has ended.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization as as_bytes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    tls = Tls.of(folder)
    if not (folder / AUTHORITY_KEY).exists():
        raise SordinoError(f"tls: '{folder / AUTHORITY_KEY}' is missing; {NEW_AUTHORITY}")
    if days_left(tls.authority) <= 0:
        raise SordinoError(
            f"tls: the authority '{tls.authority}' ended on {end_of(tls.authority):%d %b %Y}; {NEW_AUTHORITY}"
        )
    authority = as_bytes.load_pem_private_key((folder / AUTHORITY_KEY).read_bytes(), None)
    link = as_bytes.load_pem_private_key(tls.key.read_bytes(), None)
    if not isinstance(authority, ec.EllipticCurvePrivateKey) or not isinstance(link, ec.EllipticCurvePrivateKey):
        raise SordinoError(f"tls: the keys in '{folder}' are not of this program; {NEW_AUTHORITY}")
    known = hosts_of(tls.certificate) if tls.certificate.exists() else []
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(["localhost", LOOPBACK, *known, *hosts]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    signer = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    pem = _signed(
        "sordino link",
        link.public_key(),
        authority,
        days,
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage("digital_signature"), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(names), False),
        (x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), False),
        (x509.SubjectKeyIdentifier.from_public_key(link.public_key()), False),
    )
    files.write(tls.certificate, pem)
    return tls


def valid(folder: Path, hosts: Iterable[str] = ()) -> Tls:
    """The files of a link: made if there are none, and renewed if the certificate ends soon or lacks a host.

    Raises:
      SordinoError: the certificate or the authority has ended, and nothing here can renew it.
    """
    tls = Tls.of(folder)
    if not tls.authority.exists():
        return certificates(folder, hosts=hosts)
    if days_left(tls.authority) <= 0:
        raise SordinoError(
            f"tls: the authority '{tls.authority}' ended on {end_of(tls.authority):%d %b %Y}; {NEW_AUTHORITY}"
        )
    lacking = set(hosts) - set(hosts_of(tls.certificate))
    soon = days_left(tls.certificate) < RENEW_DAYS
    if (lacking or soon) and (folder / AUTHORITY_KEY).exists():
        return renew(folder, hosts=hosts)
    if days_left(tls.certificate) <= 0:
        raise SordinoError(f"tls: '{tls.certificate}' ended on {end_of(tls.certificate):%d %b %Y}; {NEW_AUTHORITY}")
    return tls


def end_of(path: Path) -> datetime.datetime:
    """When a certificate ends; of several in one file, the last.

    Raises:
      SordinoError: the file is no certificate.
    """
    from cryptography import x509

    try:
        return max(one.not_valid_after_utc for one in x509.load_pem_x509_certificates(path.read_bytes()))
    except (ValueError, OSError) as error:
        raise SordinoError(f"'{path}' is not a certificate ({error}); copy it again.") from None


def days_left(path: Path) -> float:
    """Days until a certificate ends, by this machine's clock; negative if it has ended."""
    return (end_of(path) - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400


def hosts_of(path: Path) -> list[str]:
    """Names and addresses that a certificate is valid for."""
    from cryptography import x509

    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def _usage(*allowed: str) -> x509.KeyUsage:
    from cryptography import x509

    every = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
    every += ["key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]
    return x509.KeyUsage(**{name: name in allowed for name in every})


def _signed(
    subject: str,
    public: ec.EllipticCurvePublicKey,
    authority: ec.EllipticCurvePrivateKey,
    days: int,
    *extensions: tuple[x509.ExtensionType, bool],
    since: datetime.datetime | None = None,
) -> bytes:
    """A certificate that is valid for `days` from `since` (default: now)."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as as_bytes
    from cryptography.x509.oid import NameOID

    def called(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    now = since or datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(called(subject)).issuer_name(called(AUTHORITY))
    builder = builder.public_key(public).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - datetime.timedelta(minutes=5))  # clocks differ
    builder = builder.not_valid_after(now + datetime.timedelta(days=days))
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    return builder.sign(authority, hashes.SHA256()).public_bytes(as_bytes.Encoding.PEM)


def _replace_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    """Write a private key, readable by its owner alone, in place of an older one."""
    from cryptography.hazmat.primitives import serialization as as_bytes

    form = (as_bytes.Encoding.PEM, as_bytes.PrivateFormat.PKCS8, as_bytes.NoEncryption())
    files.write(path, key.private_bytes(*form))

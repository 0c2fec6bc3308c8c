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
    from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes

LOOPBACK = "127.0.0.1"
AUTHORITY, AUTHORITY_KEY = "sordino authority", "authority.key"
AUTHORITY_DAYS, LINK_DAYS = 3650, 365
RENEW_DAYS = 30  # before its end, from which on `coordinate` renews the link's certificate


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
    link = ec.generate_private_key(ec.SECP256R1())
    _replace_key(folder / AUTHORITY_KEY, key)
    _replace_key(tls.key, link)
    files.write(tls.authority, pem)
    tls.authority.chmod(0o644)  # public
    return _certify_link(tls, key, link, hosts, days)


def renew(folder: Path, *, hosts: Iterable[str] = (), days: int = LINK_DAYS) -> Tls:
    """Make another certificate of the link by the same authority. The link keeps its key and the names that it has.

    A key of the link that is missing or damaged is made anew. Sites need nothing new. A link that is running has to be
    started again.

    Raises:
      SordinoError: the authority or its key is missing, damaged or over, or nobody says the names of the link.
    """
    from cryptography.hazmat.primitives.asymmetric import ec

    tls = Tls.of(folder)
    if why := _authority_problem(folder):
        raise SordinoError(why)
    if not (folder / AUTHORITY_KEY).exists():
        raise SordinoError(f"tls: '{folder / AUTHORITY_KEY}' is missing; {restore(folder)}")
    if days_left(tls.authority) <= 0:
        raise SordinoError(
            f"tls: the authority '{tls.authority}' ended on {end_of(tls.authority):%d %b %Y}; {new_authority(folder)}"
        )
    authority, link = _key(folder / AUTHORITY_KEY), _key(tls.key)
    if authority is None or authority.public_key() != read(tls.authority)[0].public_key():
        raise SordinoError(f"tls: '{folder / AUTHORITY_KEY}' is not the key of '{tls.authority}'; {restore(folder)}")
    if not isinstance(authority, ec.EllipticCurvePrivateKey) or not isinstance(link, ec.EllipticCurvePrivateKey | None):
        raise SordinoError(f"tls: the keys in '{folder}' are not of this program; {new_authority(folder)}")
    names = list(hosts)
    names = [*known_hosts(folder, names), *names]
    if link is None:
        link = ec.generate_private_key(ec.SECP256R1())
        _replace_key(tls.key, link)
    return _certify_link(tls, authority, link, names, days)


def known_hosts(folder: Path, hosts: Iterable[str] = ()) -> list[str]:
    """The names of the link by its certificate; none if it cannot be read and `hosts` are given in its place.

    Raises:
      SordinoError: the certificate cannot be read, and no hosts are given.
    """
    path = Tls.of(folder).certificate
    try:
        return hosts_of(path)
    except SordinoError:
        if list(hosts):
            return []
        raise SordinoError(
            f"--host: '{path}', which has the names of the link, cannot be read; give each name by which sites reach "
            "the link (--host localhost if all sites are on this machine)."
        ) from None


def _certify_link(
    tls: Tls,
    authority: ec.EllipticCurvePrivateKey,
    link: ec.EllipticCurvePrivateKey,
    hosts: Iterable[str],
    days: int,
) -> Tls:
    """Write the link's certificate."""
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(["localhost", LOOPBACK, *hosts]):
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
      SordinoError: a file is missing or damaged, the files do not fit together, or the certificate or the authority has
        ended and nothing here can renew it.
    """
    tls = Tls.of(folder)
    if is_empty(folder):
        return certificates(folder, hosts=hosts)
    if why := incomplete(folder):
        raise SordinoError(why)
    if days_left(tls.authority) <= 0:
        raise SordinoError(
            f"tls: the authority '{tls.authority}' ended on {end_of(tls.authority):%d %b %Y}; {new_authority(folder)}"
        )
    if why := misfit(folder):
        raise SordinoError(why)
    lacking = set(hosts) - set(hosts_of(tls.certificate))
    soon = days_left(tls.certificate) < RENEW_DAYS
    if (lacking or soon) and (folder / AUTHORITY_KEY).exists():
        return renew(folder, hosts=hosts)
    if days_left(tls.certificate) <= 0:
        raise SordinoError(
            f"tls: '{tls.certificate}' ended on {end_of(tls.certificate):%d %b %Y}; {new_authority(folder)}"
        )
    return tls


# ------------------------------------------------------------------------------------------------------------ problems


def is_empty(folder: Path) -> bool:
    """Whether no file of a link is there."""
    return not any(path.exists() for path in (*Tls.of(folder), folder / AUTHORITY_KEY))


def new_authority(folder: Path) -> str:
    """The remedy for an authority that is lost or over."""
    return (
        f"run `sordino federate renew {folder.parent} --new-authority` and send the new authority.pem to all sites, "
        "which need nothing else."
    )


def restore(folder: Path) -> str:
    """The remedies for a file that nothing here can make again."""
    return f"restore it from a backup, or {new_authority(folder)}"


def incomplete(folder: Path) -> str:
    """Which file of a link is missing or damaged, with the remedy; an empty text if none is.

    The authority's key may be elsewhere: a link works without it until its certificate ends.
    """
    if why := _authority_problem(folder):
        return why
    tls = Tls.of(folder)
    for path, parsed in ((tls.certificate, _parsed), (tls.key, _key)):
        if not path.exists() or not parsed(path):
            return f"tls: '{path}' is {_state(path)}; {_renewal(folder)}"
    return ""


def misfit(folder: Path) -> str:
    """Why the files of a link, each of which can be read, do not fit together; an empty text if they do."""
    tls = Tls.of(folder)
    link = read(tls.certificate)
    if not _signed_by(link[0], link[1:], read(tls.authority)):
        return f"tls: '{tls.authority}' did not sign '{tls.certificate}', so no site could connect; {_renewal(folder)}"
    key = _key(tls.key)
    if key is None or key.public_key() != link[0].public_key():
        return f"tls: '{tls.key}' is not the key of '{tls.certificate}'; {_renewal(folder)}"
    return ""


def _authority_problem(folder: Path) -> str:
    path = Tls.of(folder).authority
    if path.exists() and _parsed(path):
        return ""
    return (
        f"tls: '{path}' is {_state(path)}; restore it from a backup or from a site, which has a copy, or "
        f"{new_authority(folder)}"
    )


def _state(path: Path) -> str:
    return "damaged" if path.exists() else "missing"


def _renewal(folder: Path) -> str:
    """The remedy for the link's own files: the authority can make them again, if its key is here."""
    key = _key(folder / AUTHORITY_KEY)
    if key is None or key.public_key() != read(Tls.of(folder).authority)[0].public_key():
        return restore(folder)
    return f"run `sordino federate renew {folder.parent}`, after which the sites need nothing new."


def _signed_by(
    one: x509.Certificate, others: list[x509.Certificate], authorities: list[x509.Certificate], most: int = 8
) -> bool:
    """Whether one of the authorities signed a certificate, or one of the others, which an authority signed, did."""
    if any(_issued(one, by) for by in authorities):
        return True
    return most > 0 and any(_issued(one, by) and _signed_by(by, others, authorities, most - 1) for by in others)


def _issued(one: x509.Certificate, by: x509.Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        one.verify_directly_issued_by(by)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


# ------------------------------------------------------------------------------------------------------------- reading


def read(path: Path) -> list[x509.Certificate]:
    """The certificates in a file, at least one.

    Raises:
      SordinoError: the file cannot be read, or is not a certificate.
    """
    if not (found := _parsed(path)):
        raise SordinoError(f"'{path}' is not a certificate in PEM form; copy it from the coordinator again.")
    return found


def _parsed(path: Path) -> list[x509.Certificate]:
    """The certificates in a file; none if it is not a certificate."""
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificates(_content(path))
    except ValueError:
        return []


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SordinoError(f"'{path}' cannot be read ({error.strerror}); check the path and who may read it.") from None


def _key(path: Path) -> PrivateKeyTypes | None:
    """The private key in a file; None if the file is missing or holds none."""
    from cryptography.hazmat.primitives import serialization as as_bytes

    try:
        return as_bytes.load_pem_private_key(_content(path), None) if path.exists() else None
    except ValueError:
        return None
    except TypeError:
        raise SordinoError(f"tls: '{path}' has a password; store the key without one.") from None


def end_of(path: Path) -> datetime.datetime:
    """When a certificate ends; of several in one file, the last.

    Raises:
      SordinoError: the file is not a certificate.
    """
    return max(one.not_valid_after_utc for one in read(path))


def days_left(path: Path) -> float:
    """Days until a certificate ends, by this machine's clock; negative if it has ended."""
    return (end_of(path) - datetime.datetime.now(datetime.UTC)).total_seconds() / 86400


def hosts_of(path: Path) -> list[str]:
    """Names and addresses that a certificate is valid for.

    Raises:
      SordinoError: the file is not a certificate.
    """
    from cryptography import x509

    certificate = read(path)[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
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

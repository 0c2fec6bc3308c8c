"""Signatures of certificates (ed25519), and the hashes that bind a certificate to its files and to the code.

A signature shows that the holder of a key wrote these numbers. The reader must know from elsewhere whose key it is:
`sordino verify --key` compares it with a public key that the reader already has.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sordino.errors import SordinoError

ALGORITHM = "ed25519"
PURPOSE = (
    b"sordino certificate, format 2\0"  # a site's key also signs other messages; none of them starts with these bytes
)
_PUBLIC, _SHORT = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{32}")
CARD = re.compile(r"""^\s*sign\s*=\s*["']([0-9a-f]{64})["']""", re.MULTILINE)


class Signer(Protocol):
    """Whoever signs: the key of a run (`RunKey`), or a site (`of_site`)."""

    @property
    def name(self) -> str: ...
    @property
    def public(self) -> str: ...
    def sign(self, data: bytes) -> bytes: ...


class RunKey(NamedTuple):
    """An ed25519 key.

    Attributes:
      secret: the 32 secret bytes.
      name: the name of the signer in the certificate.
    """

    secret: bytes
    name: str = "run key"

    @property
    def public(self) -> str:
        return self._key().public_key().public_bytes_raw().hex()  # type: ignore[no-any-return]

    def sign(self, data: bytes) -> bytes:
        return self._key().sign(data)  # type: ignore[no-any-return]

    def _key(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self.secret)


class _Site(NamedTuple):
    identity: Any

    @property
    def name(self) -> str:
        return f"site {self.identity.name}"

    @property
    def public(self) -> str:
        return str(self.identity.card.sign)

    def sign(self, data: bytes) -> bytes:
        return bytes(self.identity.sign(data))


def of_site(identity: Any) -> Signer:
    """The signer for a site. It uses the long-term key (`secagg.Identity`) whose public half is in the roster."""
    return _Site(identity)


# ------------------------------------------------------------------------------------------------------- certificates


def canonical(document: Mapping[str, Any]) -> bytes:
    """The canonical bytes of a JSON document: sorted keys, no spaces, shortest floats."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def announced(cert: Mapping[str, Any], signer: Signer | None) -> dict[str, Any]:
    """The certificate as it is shown in the texts beside it: it names who will sign it, and has no signature yet.

    Args:
      cert: the certificate.
      signer: who will sign it; None for nobody.

    Returns:
      A copy.
    """
    return dict(cert) if signer is None else {**cert, "signature": {"key": signer.public, "signer": signer.name}}


def signed(cert: Mapping[str, Any], signer: Signer) -> dict[str, Any]:
    """The certificate with a signature over all of its other fields. Any later change breaks the signature.

    Args:
      cert: the certificate.
      signer: who signs it.

    Returns:
      A copy with the field `signature`.
    """
    about = {"algorithm": ALGORITHM, "key": signer.public, "signer": signer.name}
    value = signer.sign(PURPOSE + canonical({**cert, "signature": about}))
    return {**cert, "signature": {**about, "value": value.hex()}}


def broken(cert: Mapping[str, Any]) -> str:
    """Why the signature is not valid; empty if it is. The certificate must have a signature."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    about = dict(cert["signature"])
    value = about.pop("value", "")
    if about.get("algorithm") != ALGORITHM:
        return f"the signature's algorithm is {about.get('algorithm')!r}; this version knows only {ALGORITHM}"
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(about["key"]))
        key.verify(bytes.fromhex(value), PURPOSE + canonical({**cert, "signature": about}))
    except (InvalidSignature, ValueError, TypeError, KeyError):
        return "the signature does not match the certificate: it was changed after it was signed"
    return ""


def fingerprint(public: str) -> str:
    """The fingerprint of a public key: 32 hex digits that people can compare."""
    return hashlib.sha256(bytes.fromhex(public)).hexdigest()[:32]


def known_keys(text_or_path: str) -> list[str]:
    """The keys that `--key` names.

    Args:
      text_or_path: a public key (64 hex digits), its fingerprint (32), or a file with keys, fingerprints or cards.

    Returns:
      Public keys or fingerprints.

    Raises:
      SordinoError: the argument names no public key, or a file with a secret key.
    """
    digits = text_or_path.strip().lower()
    if _PUBLIC.fullmatch(digits) or _SHORT.fullmatch(digits):
        return [digits]
    try:
        text = Path(text_or_path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise SordinoError(
            f"--key: '{text_or_path}' is no public key (64 hex digits), no fingerprint (32) and no file with one."
        ) from None
    if "secret" in text.partition("\n")[0]:
        raise SordinoError(
            f"--key: '{text_or_path}' holds a secret key; give the public one (a card, or 64 hex digits)."
        )
    keys = CARD.findall(text) or re.findall(r"\b(?:[0-9a-f]{64}|[0-9a-f]{32})\b", text)
    if not keys:
        raise SordinoError(f"--key: '{text_or_path}' holds no public key; a card has a line sign = \"64 hex digits\".")
    return list(keys)


# -------------------------------------------------------------------------------------------------------------- hashes


def sha256(path: Path, suffixes: Sequence[str] = ()) -> str:
    """The hash of a file, or of the names and contents of all files in a folder.

    With suffixes, of the files that have one of them and lie directly in the folder.
    """
    if path.is_dir():
        inside = (each for each in path.iterdir() if each.suffix in suffixes) if suffixes else path.rglob("*")
        return _listing(path, [each for each in inside if each.is_file()])
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def code_sha256() -> str:
    """The hash of the installed sources of the package: names and contents of every .py and .c file."""
    root = Path(__file__).parents[1]
    return _listing(root, [*root.rglob("*.py"), *root.rglob("*.c")])


def _listing(root: Path, paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for name, path in sorted((path.relative_to(root).as_posix(), path) for path in paths):
        digest.update(f"{name} {sha256(path)}\n".encode())
    return digest.hexdigest()

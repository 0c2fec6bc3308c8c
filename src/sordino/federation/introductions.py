"""How a site proves its name: it signs what it says at its hello, together with random digits of the coordinator.

The roster of the coordinator's folder holds every site's key. Whoever is registered at the link under another key, and
says the name of a site, is not believed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sordino.errors import Refused
from sordino.evidence.signing import Signer, canonical

PURPOSE = b"sordino hello, format 1\0"  # none of the other messages that a site signs starts with these bytes
SIGNED = ("name", "records", "epsilon", "tests")
NONCE = re.compile(r"[0-9a-f]{64}", re.ASCII)


def _content(fields: Mapping[str, Any], nonce: str) -> bytes:
    return PURPOSE + canonical({"nonce": nonce} | {key: fields[key] for key in SIGNED if key in fields})


def signed(fields: Mapping[str, Any], nonce: Any, signer: Signer) -> str:
    """The signature over a hello.

    Args:
      fields: what the site says about itself.
      nonce: the coordinator's random digits.
      signer: the site's key.

    Raises:
      Refused: the nonce is not 64 hex digits.
    """
    if not (isinstance(nonce, str) and NONCE.fullmatch(nonce)):
        raise Refused("malformed", "nonce")
    return signer.sign(_content(fields, nonce)).hex()


def proves(fields: Mapping[str, Any], nonce: str, public: str) -> bool:
    """Whether the holder of this public key said these fields in reply to this nonce."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(fields["signature"]), _content(fields, nonce))
    except (InvalidSignature, ValueError, TypeError, KeyError):
        return False
    return True

"""Keys and secrets of a Flower federation."""

from __future__ import annotations

import secrets
from pathlib import Path

from sordino import files


def private(path: Path, content: bytes) -> Path:
    """Create a file that only its owner can read."""
    files.create(path, content)
    return path


def secret(path: Path) -> Path:
    """Write 32 random bytes. A process that can read them may take tasks."""
    return private(path, secrets.token_bytes(32))


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

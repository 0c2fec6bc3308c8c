"""The identity of a site: two long-term keys, and the roster with the public keys of all sites.

Sites take keys only from the roster, and do not exchange the roster through the server: a server that chose the keys
could read the messages between any two sites.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from sordino import files
from sordino.errors import SordinoError, nearest
from sordino.evidence import signing
from sordino.privacy.mechanisms.mask_graph import MOST_SITES
from sordino.secagg.derive import EIGHTH, FIELD, agree, low_order, public

SITES = MOST_SITES
LONGEST = 2**20  # most bytes of a roster file

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)
_LINE = re.compile(r"""\s*([a-z]+)\s*=\s*(?:"([^"\\]*)"|'([^']*)')\s*(?:\#.*)?""", re.ASCII)
_EDWARDS = -121665 * pow(121666, -1, FIELD) % FIELD


class Card(NamedTuple):
    """A site's public part: its name, its Ed25519 key (signatures) and its X25519 key (boxes), as hex."""

    name: str
    sign: str
    box: str


@dataclass(frozen=True)
class Identity:
    """A site's long-term keys. The file that holds them never leaves the site."""

    name: str
    sign_key: bytes = field(repr=False)
    box_key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check_name(self.name)
        for key, value in (("sign", self.sign_key), ("box", self.box_key)):
            if not isinstance(value, bytes) or len(value) != 32:
                raise SordinoError(f"{key}: a secret key has 32 bytes; Identity.make draws them.")

    @staticmethod
    def make(name: str) -> Identity:
        """An identity with new keys."""
        return Identity(
            name, Ed25519PrivateKey.generate().private_bytes_raw(), X25519PrivateKey.generate().private_bytes_raw()
        )

    @cached_property
    def card(self) -> Card:
        """The public part."""
        signs = Ed25519PrivateKey.from_private_bytes(self.sign_key).public_key().public_bytes_raw()
        return Card(self.name, signs.hex(), public(self.box_key).hex())

    def sign(self, data: bytes) -> bytes:
        """Sign data. Ed25519 is deterministic: the same data gives the same signature."""
        return Ed25519PrivateKey.from_private_bytes(self.sign_key).sign(data)

    def agree(self, box: bytes) -> bytes:
        """The secret that the box keys of this site and of a peer agree on. It serves all boxes between them, so it is
        kept.

        Raises:
          SordinoError: the peer's key is of low order.
        """
        if box not in self._agreed:
            self._agreed[box] = agree(self.box_key, box)
        return self._agreed[box]

    @cached_property
    def _agreed(self) -> dict[bytes, bytes]:
        return {}

    def save(self, path: str | Path) -> None:
        """Write a new file that only its owner may read. An existing file is never overwritten."""
        text = f"# secret: it stays with '{self.name}'\n" + _lines(
            Card(self.name, self.sign_key.hex(), self.box_key.hex())
        )
        try:
            files.create(Path(path), text.encode())
        except FileExistsError:
            raise SordinoError(f"identity: '{path}' exists; keep it, or choose another path.") from None
        except OSError as error:
            raise SordinoError(f"identity: '{path}' cannot be written ({error.strerror}).") from None

    @staticmethod
    def load(path: str | Path) -> Identity:
        """Read an identity from its file.

        Raises:
          SordinoError: the file is missing, readable by others, or malformed.
        """
        data = _file(path, "identity")
        if not files.is_private(Path(path)):
            raise SordinoError(
                f"identity: others may read '{path}'; run chmod 600 on it, and make new keys if others have read it."
            )
        tables = _tables(data, "identity")
        if len(tables) != 1 or tables[0].keys() != set(Card._fields):
            raise SordinoError(f"identity: '{path}' does not hold name, sign and box; restore it from a copy.")
        keys = Card(**tables[0])
        for key in ("sign", "box"):
            _check_hex(getattr(keys, key), f"identity: {key}")
        return Identity(keys.name, bytes.fromhex(keys.sign), bytes.fromhex(keys.box))


@dataclass(frozen=True)
class Roster:
    """The sites in an order that all parties share: it numbers the shares and determines the signs of masks."""

    sites: tuple[Card, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", tuple(self.sites))
        if not 1 <= len(self.sites) <= SITES:
            raise SordinoError(f"roster: it has {len(self.sites)} sites; 1 to {SITES} are allowed.")
        for card in self.sites:
            _check_card(card)
        for key in Card._fields:
            counts = Counter(getattr(card, key) for card in self.sites)
            for card in self.sites:
                if counts[getattr(card, key)] > 1:
                    raise SordinoError(f"roster: two sites have the {key} of '{card.name}'; each needs its own.")

    def __len__(self) -> int:
        return len(self.sites)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(card.name for card in self.sites)

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def position(self, name: str) -> int:
        if name not in self._positions:
            raise SordinoError(f"site: '{_shown(name)}' is not in the roster.{nearest(_shown(name), self.names)}")
        return self._positions[name]

    def card(self, name: str) -> Card:
        return self.sites[self.position(name)]

    def sha256(self) -> str:
        """The hash of names, keys and order. Sites compare it before a run."""
        return self._sha256

    @cached_property
    def _sha256(self) -> str:
        return hashlib.sha256(json.dumps([list(card) for card in self.sites]).encode()).hexdigest()

    @staticmethod
    def lines(card: Card) -> str:
        """One site's section of the file."""
        return f"[[site]]\n{_lines(card)}"

    def toml(self) -> str:
        return "\n".join(map(self.lines, self.sites))

    def write(self, path: str | Path) -> None:
        Path(path).write_text(self.toml())

    @staticmethod
    def read(path: str | Path) -> Roster:
        if not Path(path).exists():
            raise SordinoError(
                f"roster: there is no file '{path}'. It lists the name and the public keys of every site, which "
                "`sordino federate keys` prints: the coordinator collects them in it and sends it to all sites, which "
                "compare its hash."
            )
        return Roster.parse(_file(path, "roster"))

    @staticmethod
    def parse(data: bytes) -> Roster:
        """Read a subset of TOML in linear time: `[[site]]`, `key = "text"` and comments."""
        cards = []
        for number, table in enumerate(_tables(data, "roster", header="[[site]]"), 1):
            if table.keys() != set(Card._fields):
                raise SordinoError(f"roster: site {number} needs name, sign and box, and nothing else.")
            cards.append(Card(**table))
        return Roster(tuple(cards))


# ------------------------------------------------------------------------------------------------------------- files


def _lines(card: Card) -> str:
    return "".join(f'{key} = "{value}"\n' for key, value in card._asdict().items())


def _file(path: str | Path, what: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(LONGEST + 1)
    except OSError as error:
        raise SordinoError(f"{what}: '{path}' cannot be read ({error.strerror}); check the path.") from None


def _tables(data: bytes, what: str, header: str = "") -> list[dict[str, str]]:
    """One table per header, or a single table without a header."""
    if len(data) > LONGEST:
        raise SordinoError(f"{what}: the file must have at most {LONGEST:,} bytes.")
    try:
        text = data.decode()
    except UnicodeDecodeError:
        raise SordinoError(f"{what}: it is not text in UTF-8.") from None
    tables = list[dict[str, str]]() if header else [{}]
    for number, line in enumerate(text.split("\n"), 1):
        bare = line.strip()
        if not bare or bare.startswith("#"):
            continue
        if header and bare.partition("#")[0].rstrip() == header:
            tables.append({})
            continue
        setting = _LINE.fullmatch(bare)
        if setting is None or not tables or setting[1] in tables[-1]:
            raise SordinoError(f'{what}: line {number} should be {header or "a setting"}, or a new key = "text".')
        tables[-1][setting[1]] = setting[2] if setting[2] is not None else setting[3]
    return tables


# -------------------------------------------------------------------------------------------------------- valid keys


def _shown(name: object) -> str:
    return ascii(str(name)[:64])[1:-1]


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SordinoError(f"name: '{_shown(name)}' must be 1 to 64 letters, digits, '-', '_' or '.'.")


def _check_hex(value: object, what: str) -> None:
    if not isinstance(value, str) or not _HEX.fullmatch(value):
        raise SordinoError(f"{what} must be 64 hexadecimal digits, in small letters.")


def _check_card(card: Card) -> None:
    _check_name(card.name)
    for key in ("sign", "box"):
        _check_hex(getattr(card, key), f"{key} of '{card.name}'")
    if not _signs(bytes.fromhex(card.sign)):
        raise SordinoError(f"sign of '{card.name}': it is not an Ed25519 key; copy it from the site's card again.")
    box = bytes.fromhex(card.box)
    if int.from_bytes(box, "little") >= FIELD or low_order(box):
        raise SordinoError(f"box of '{card.name}': it is not an X25519 key; copy it from the site's card again.")


def _signs(key: bytes) -> bool:
    """Whether it is a canonical point of the curve of large order. Anyone can sign under a key of low order."""
    y = int.from_bytes(key, "little") % 2**255
    if y >= FIELD or y in (0, 1, FIELD - 1, EIGHTH, FIELD - EIGHTH):
        return False
    u, v = y * y - 1, _EDWARDS * y * y + 1  # x² = u / v
    return pow(u * v, (FIELD - 1) // 2, FIELD) == 1


def read_signer(path: str | Path) -> signing.Signer:
    """The key in a file: a site's identity.key, or a run.key.

    Raises:
      SordinoError: the file is missing, readable by others, or holds no ed25519 key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SordinoError(
            f"--sign-with: '{path}' cannot be read ({error}); name an identity.key or run.key."
        ) from None
    if re.search(r"^\s*box\s*=", text, re.MULTILINE):
        return signing.of_site(Identity.load(Path(path)))
    match = signing.CARD.search(text)
    if match is None:
        raise SordinoError(
            f"--sign-with: '{path}' holds no signing key (sign = \"64 hex digits\"); name an identity.key."
        )
    if not files.is_private(Path(path)):
        raise SordinoError(
            f"--sign-with: others may read '{path}'; run chmod 600 on it, and make new keys if others have read it."
        )
    return signing.RunKey(bytes.fromhex(match[1]))

"""Identities on disk, and rosters."""

import contextlib
import os
import tomllib

import pytest
from hypothesis import strategies as st

from sordino.errors import SordinoError
from sordino.secagg.derive import EIGHTH
from sordino.secagg.keys import LONGEST, SITES, Card, Identity, Roster, _signs
from tests.support import fuzzed

A, B = Identity("a", bytes(32), b"\1" * 32), Identity("b-2.x_Y", b"\2" * 32, b"\3" * 32)
ROSTER = Roster((A.card, B.card))
P = 2**255 - 19


def test_an_identity_comes_back_from_its_file(tmp_path):
    mine = Identity.make("clinic-1")
    mine.save(tmp_path / "id")
    assert os.stat(tmp_path / "id").st_mode & 0o777 == 0o600
    assert Identity.load(tmp_path / "id") == mine
    assert Identity.load(tmp_path / "id").card == mine.card
    assert mine.sign_key.hex() not in repr(mine)
    assert mine.box_key.hex() not in repr(mine)
    assert Identity.make("clinic-1") != mine


def test_a_file_is_never_overwritten(tmp_path):
    A.save(tmp_path / "id")
    with pytest.raises(SordinoError, match="exists"):
        B.save(tmp_path / "id")
    assert Identity.load(tmp_path / "id") == A


def test_a_file_that_others_may_read_is_refused(tmp_path):
    A.save(tmp_path / "id")
    os.chmod(tmp_path / "id", 0o640)
    with pytest.raises(SordinoError, match="chmod 600"):
        Identity.load(tmp_path / "id")


@pytest.mark.parametrize("text", ["", 'name = "a"\n', 'name = "a"\nsign = "00"\nbox = "00"\n', "[[site]]\n"])
def test_a_damaged_identity_is_refused(tmp_path, text):
    with open(os.open(tmp_path / "id", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(text)
    with pytest.raises(SordinoError):
        Identity.load(tmp_path / "id")


def test_a_missing_file_is_named(tmp_path):
    for read in (Identity.load, Roster.read):
        with pytest.raises(SordinoError, match="nowhere"):
            read(tmp_path / "nowhere")


def test_a_roster_comes_back_from_its_file(tmp_path):
    ROSTER.write(tmp_path / "roster.toml")
    assert Roster.read(tmp_path / "roster.toml") == ROSTER
    with open(tmp_path / "roster.toml", "rb") as file:
        assert [Card(**site) for site in tomllib.load(file)["site"]] == list(ROSTER.sites)  # it is TOML
    assert Roster.parse("\n".join(map(Roster.lines, ROSTER.sites)).encode()) == ROSTER
    loose = f'# sites\n\n [[site]] # one\r\nbox=\'{A.card.box}\'\n\tname = "a" # hers\nsign="{A.card.sign}"\n'
    assert Roster.parse(loose.encode()) == Roster((A.card,))


def test_the_hash_tells_rosters_apart():
    others = [Roster((B.card, A.card)), Roster((A.card,)), Roster((A.card._replace(name="c"), B.card))]
    assert len({each.sha256() for each in [ROSTER, *others]}) == 4
    assert ROSTER.sha256() == Roster((A.card, B.card)).sha256()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": ""}, "name"),
        ({"name": "x" * 65}, "name"),
        ({"name": "a b"}, "name"),
        ({"name": "a\n"}, "name"),
        ({"name": "é"}, "name"),
        ({"name": "a"}, "two sites have the name"),
        ({"sign": A.card.sign}, "two sites have the sign"),
        ({"box": A.card.box}, "two sites have the box"),
        ({"sign": A.card.sign.upper()}, "sign"),
        ({"sign": "00"}, "sign"),
        ({"sign": (2).to_bytes(32, "little").hex()}, "Ed25519"),  # not on the curve
        ({"sign": (1).to_bytes(32, "little").hex()}, "Ed25519"),  # the neutral point
        ({"sign": (P + 3).to_bytes(32, "little").hex()}, "Ed25519"),  # 3, written otherwise
        ({"sign": EIGHTH.to_bytes(32, "little").hex()}, "Ed25519"),
        ({"box": bytes(32).hex()}, "X25519"),
        ({"box": (1).to_bytes(32, "little").hex()}, "X25519"),
        ({"box": "e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"}, "X25519"),
        ({"box": (P + 9).to_bytes(32, "little").hex()}, "X25519"),
        ({"box": (2**255 + 9).to_bytes(32, "little").hex()}, "X25519"),
    ],
)
def test_bad_cards_are_refused(change, match):
    with pytest.raises(SordinoError, match=match):
        Roster((A.card, B.card._replace(**change)))


def test_points_of_low_order_are_those_named():
    """On the Edwards curve, doubling takes y to (y² + x²) / (1 - d x² y²), and x² follows from y: four points of order
    8 share |y|, and doubled they have y = 0, which is of order 4."""
    d = -121665 * pow(121666, -1, P) % P
    for y in (EIGHTH, P - EIGHTH):
        xx = (y * y - 1) * pow(d * y * y + 1, -1, P) % P
        assert (y * y + xx) * pow(1 - d * xx * y * y, -1, P) % P == 0
        assert pow(xx, (P - 1) // 2, P) == 1  # on the curve, so only the list keeps it out
        assert not _signs(y.to_bytes(32, "little"))
    assert all(_signs(bytes.fromhex(Identity.make("x").card.sign)) for _ in range(20))


def test_rosters_are_bounded():
    with pytest.raises(SordinoError, match="sites"):
        Roster(())
    with pytest.raises(SordinoError, match="sites"):
        Roster((A.card,) * (SITES + 1))
    with pytest.raises(SordinoError, match="most"):
        Roster.parse(b"#" * (LONGEST + 1))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[[site]]",
        "[site]",
        'name = "a"',
        "[[site]]\nname = 3",
        '[[site]]\nname = "a\nb"',
        '[[site]]\nname = "a"\nname = "a"',
        ROSTER.toml() + 'more = "x"\n',
        ROSTER.toml() + "\xff",
    ],
)
def test_other_files_are_refused(text):
    with pytest.raises(SordinoError):
        Roster.parse(text.encode("latin-1"))


def test_who_is_not_in_the_roster_is_named():
    with pytest.raises(SordinoError, match="'bb' is not in the roster"):
        ROSTER.card("bb")


lines = st.sampled_from([b"[[site]]", b"#", b"\n", b'name = "a"', b"sign='", b"=", b'"', ROSTER.toml().encode()])


@fuzzed(300, 2000, st.lists(st.one_of(lines, st.binary(max_size=20)), max_size=8).map(b"".join))
def test_any_bytes_are_a_roster_or_refused(data):
    with contextlib.suppress(SordinoError):
        assert isinstance(Roster.parse(data), Roster)

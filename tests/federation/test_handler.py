"""A site's worker reads its settings again when a file of them changes."""

import os

from sordino import wire
from sordino.federation import handler

NORTH = "north"


def test_a_repaired_roster_is_read_without_a_restart(tiny, monkeypatch):
    federation = tiny(trust="secure-aggregation", rounds=2)
    folder = federation.place(NORTH)
    monkeypatch.setenv("SORDINO_SITE_FILE", str(folder / "site.toml"))
    right = (folder / "roster.toml").read_text()
    request = wire.encode("terms", {"terms": federation.terms().json()})
    (folder / "roster.toml").write_text(right.replace("south", "else"))
    assert wire.decode(handler.handle(request)).fields["code"] == "policy"
    (folder / "roster.toml").write_text(right)
    os.utime(folder / "roster.toml", ns=(1, 1))  # whatever the clock's resolution is
    assert wire.decode(handler.handle(request)).kind == "agreed"

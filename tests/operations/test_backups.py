"""Backups of a site: whole, without records and open secrets, and never a way to release a round twice."""

import shutil
import stat
import tarfile

import pytest

from sordino import wire
from sordino.cli import main
from sordino.errors import RolledBackError, SordinoError
from sordino.operations.backups import backup, restore

NORTH = "north"


@pytest.fixture
def federation(tiny):
    made = tiny(rounds=3)
    made.configure(NORTH, witness="../witness-of-north.json")
    return made


def code(reply):
    return reply.fields.get("code", reply.kind)


def test_a_backup_has_all_but_records_and_open_secrets(federation, talk, tmp_path):
    site = talk(federation.site(NORTH), federation.terms())
    site.propose()
    site.round(0)
    for table in ("older.npz", "runs/predicted.csv", "table.tsv.GZ"):
        (federation.place(NORTH) / table).write_text("93,rare")
    names = backup(federation.place(NORTH), tmp_path / "north.tar")
    run = f"runs/{site.terms.run}"
    assert {"ledger.db", "site.toml", f"{run}/terms.json"} <= set(names)
    assert not any(name.lower().endswith((".npz", ".csv", ".gz")) for name in names)
    assert not any(name.endswith(("/secret", "-wal", "-shm")) for name in names)
    assert stat.S_IMODE((tmp_path / "north.tar").stat().st_mode) == 0o600
    with tarfile.open(tmp_path / "north.tar") as archive:
        assert sorted(archive.getnames()) == sorted(names)


def test_the_newest_backup_is_accepted_and_its_open_run_is_over(federation, talk, tmp_path, capsys):
    site = talk(federation.site(NORTH), federation.terms())
    site.propose()
    site.round(0)
    here, out = federation.place(NORTH), tmp_path / "north.tar"
    assert main(["federate", "backup", str(here), "--out", str(out)]) == 0
    replaced(here, out)
    site.site = federation.site(NORTH)
    assert code(site.round(1)) == "order"  # its masks and noise are gone
    assert len(federation.charged(NORTH)) == 1
    assert main(["federate", "restore", str(out), str(tmp_path / "elsewhere")]) == 0
    assert "takes part in new runs" in capsys.readouterr().out


def replaced(here, out):
    """The folder from the backup, with the same records."""
    data = (here / "data.npz").read_bytes()
    shutil.rmtree(here)
    assert restore(out, here) == ""
    (here / "data.npz").write_bytes(data)


def test_an_older_backup_is_refused(federation, talk, tmp_path, capsys):
    site = talk(federation.site(NORTH), federation.terms())
    site.propose()
    site.round(0)
    here, out = federation.place(NORTH), tmp_path / "old.tar"
    backup(here, out)
    site.round(1)
    shutil.rmtree(here)
    assert main(["federate", "restore", str(out), str(here)]) == 1
    assert "older state" in capsys.readouterr().out
    with pytest.raises(SordinoError, match="older state"):
        federation.site(NORTH)


def test_nothing_is_overwritten_and_what_is_no_backup_is_refused(federation, tmp_path):
    here, out = federation.place(NORTH), tmp_path / "north.tar"
    with pytest.raises(SordinoError, match="does not exist yet"):
        backup(here, out)
    federation.run()
    backup(here, out)
    for wrong, where in ((lambda: backup(here, out), "exists"), (lambda: restore(out, here), "not empty")):
        with pytest.raises(SordinoError, match=where):
            wrong()
    (tmp_path / "text").write_text("no archive")
    with pytest.raises(SordinoError, match="not a backup"):
        restore(tmp_path / "text", tmp_path / "new")


@pytest.mark.parametrize("method", ["dp-fedsofim", "dp-ftrl"])
def test_a_site_that_was_put_back_in_the_middle_of_a_run_releases_nothing_twice(tiny, tmp_path, method):
    """Before round 1 a backup is taken, after it the backup is restored, and in round 2 the newest files are."""
    made = tiny(method, "secure-aggregation", rounds=4, names=("north", "south", "west", "east"), dropouts=1)
    made.configure(NORTH, witness="../witness-of-north.json")
    here, newest, out = made.place(NORTH), tmp_path / "newest", tmp_path / "north.tar"
    updates, refused = [], []

    def north(request):
        """A site that is started for this message; None if it refuses to start."""
        try:
            return made.site(NORTH).answer(request)
        except RolledBackError:
            return None

    def fault(node, request, answer):
        message = wire.decode(request)
        at = (message.kind, message.fields.get("t")) if node == 100 else None
        if at == ("round", 1):
            backup(here, out)
        reply = north(request) if node == 100 else answer(request)
        if at is not None and reply is None:
            refused.append(at)
        elif at is not None and wire.decode(reply).kind == "update":
            updates.append((message.fields["run"], message.fields["t"]))
        if at == ("round", 1):
            shutil.copytree(here, newest)
            shutil.rmtree(here)
            assert "put back to an older state" in restore(out, here)
            shutil.copy(newest / "data.npz", here / "data.npz")
        if at == ("offer", 2):
            shutil.rmtree(here)
            shutil.copytree(newest, here)
        return reply

    made.run(fault)
    assert [len(line["came"]) for line in made.progress("round")] == [4, 4, 3, 4]
    assert ("offer", 2) in refused
    assert updates == made.charged(NORTH)
    assert [t for _, t in updates] == [0, 1, 3]
    assert made.certificate(NORTH)["site"]["rounds"] == 3

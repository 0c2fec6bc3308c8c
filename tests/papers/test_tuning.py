"""A table has the committed settings if its data are theirs, and otherwise those of a search on its own data."""

import json

import numpy as np
import pytest

from papers import catalog, sofim, tables, tuning
from papers.__main__ import main
from sordino.data.sources import load
from sordino.errors import SordinoError
from sordino.studies import compare, grids
from sordino.studies.tune import validated

SMALL, LARGE = 1e-4, 0.3  # LARGE is what CIFAR-10 has at epsilon 10
TABLES = catalog.tables()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Features a hundred times as long as those of CIFAR-10: a large step loses what rounds add up. Grids are small."""
    monkeypatch.delenv("SORDINO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "pathmnist_resnet20.npz")
    few = {name: {"lr": (SMALL, LARGE)} for name in grids.FINE}
    monkeypatch.setitem(grids.PRESETS, "paper-fine", few)
    return tmp_path


@pytest.fixture
def short(folder, monkeypatch):
    """Runs of two rounds."""
    monkeypatch.setattr(sofim, "ROUNDS", 2)
    monkeypatch.setitem(sofim.BASE, "rounds", 2)
    return folder


def write(path, *, turned=0, seed=0):
    rng = np.random.default_rng(seed)
    y = np.arange(300) % 5
    x = 1000 * (np.eye(5)[y] + 0.3 * rng.standard_normal((300, 5)))
    np.savez(path, x_train=x.astype("f"), y_train=y, x_test=x[:50].astype("f"), y_test=(y[:50] + turned) % 5)


def request(folder, name="sofim-4", epsilons=(10.0,), **more):
    return tables.TableRequest(TABLES[name], str(folder), epsilons=epsilons, **more)


def settled(asked, methods=("dp-fedgd",)):
    return tuning.settle(asked, sofim.ALONE, methods, sofim.BASE, ())


def no_search(*arguments, **options):
    raise AssertionError("searched again")


def call(folder, *words):
    return main([*words, "--data-dir", str(folder), "--out", str(folder / "out"), "--seeds", "1"])


def written(folder, name):
    return json.loads((folder / "out" / f"{name}.json").read_text())


def test_a_table_of_other_data_chooses_on_its_own_validation_records(folder):
    found = settled(request(folder))
    (committed,) = [
        each["options"]
        for each in request(folder, "sofim-3").tuning("settings_client-mean")["settings"]
        if (each["method"], each["epsilon"]) == ("dp-fedgd", 10.0)
    ]
    assert committed == {"lr": LARGE}
    chosen = tables.chosen(found.parts[0][1])["dp-fedgd", 10.0]
    assert chosen["lr"] <= SMALL
    base = {**sofim.BASE, **sofim.SEEN, "data": request(folder).source, "method": "dp-fedgd", "epsilon": 10.0}
    base.pop("covariance_clip")
    wants = [tables.Want({}, {**base, **options}, {}) for options in (chosen, committed)]
    held = request(folder)
    held.__dict__["dataset"] = validated(load(held.source))
    own, foreign = (run.scores[70] for run in tables.attempt(held, wants, [0], split=0))
    assert own > foreign + 0.2
    assert found.parts[0][1]["settings"][0]["score"] == own, "the score is that on validation records"


def test_the_search_reads_no_test_record(folder):
    found = settled(request(folder))
    write(folder / "pathmnist_resnet20.npz", turned=1)
    assert settled(request(folder)).tuning == found.tuning


def test_rounds_and_noises_are_tuned_for_separately(short):
    found = tuning.settle(request(short), sofim.BOTH, ["dp-fedgd"], sofim.BASE, ())
    marks = [(each["noise"], each["round"]) for each in found.tuning["settings"]]
    assert marks == [(part.world["trust"], part.round) for part in sofim.BOTH]
    assert len(set(marks)) == 4
    for part, one in found.parts:
        assert [(each["noise"], each["round"]) for each in one["settings"]] == [(part.world["trust"], part.round)]


def test_the_early_round_decides_for_the_early_settings(folder, monkeypatch):
    asked = []
    real = compare.settle
    monkeypatch.setattr(compare, "settle", lambda *a, **o: asked.append(o["tune_round"]) or real(*a, **o))
    found = settled(request(folder))
    assert asked == [None, sofim.EARLY]
    assert "after round 10" not in found.grids[0]
    assert "by the metric after round 10" in found.grids[1]


def test_a_second_call_on_the_same_data_does_not_search(folder, monkeypatch):
    asked = request(folder, keep=folder / "settings")
    found = settled(asked)
    with monkeypatch.context() as patched:
        patched.setattr(compare, "settle", no_search)
        assert settled(asked).tuning == found.tuning
        assert settled(request(folder, "sofim-16", keep=folder / "settings")).tuning == found.tuning
        for other in (
            request(folder, keep=folder / "settings", epsilons=(1.0,)),
            request(folder, keep=folder / "settings", rounds=3),
            request(folder, keep=folder / "settings", most_settings=1),
        ):
            with pytest.raises(AssertionError, match="searched again"):
                settled(other)
        write(folder / "pathmnist_resnet20.npz", seed=1)
        with pytest.raises(AssertionError, match="searched again"):
            settled(asked)


def test_a_search_adds_what_is_lacking_and_keeps_the_rest(folder, monkeypatch):
    settled(request(folder, keep=folder / "settings"))
    asked = []
    real = compare.settle

    def recorded(who, base, epsilons, **options):
        asked.append(([each.label for each in who], list(epsilons)))
        return real(who, base, epsilons, **options)

    monkeypatch.setattr(compare, "settle", recorded)
    found = settled(request(folder, keep=folder / "settings", epsilons=(1.0, 10.0)), ("dp-fedgd", "dp-ftrl"))
    assert asked == [(["dp-fedgd"], [1.0]), (["dp-ftrl"], [1.0, 10.0])] * 2
    assert len(found.tuning["settings"]) == 8
    (path,) = (folder / "settings").iterdir()
    assert len(compare.frozen(path)["settings"]) == 8


def test_a_table_writes_its_search_and_takes_it_back(short, monkeypatch, capsys):
    assert call(short, "sofim-4", "--epsilons", "1") == 0
    first = written(short, "sofim-4")
    assert tuning.TUNED in first["notes"]
    (kept,) = (short / "out" / "settings").iterdir()
    own = tuning.OWN_DATA.format(data="pathmnist_resnet20.npz", where=f"settings/{kept.name} beside it")
    assert own in first["notes"]
    assert str(short) not in json.dumps(first), "where data lie is nobody's business"
    assert any("extended where the best value lay on an edge: dp-fedgd (lr)" in note for note in first["notes"])
    groups = {(each["labels"]["noise"], each["labels"]["tuned for"]) for each in first["lines"]}
    assert groups == {(part.world["trust"], f"round {part.round}") for part in sofim.BOTH}
    options = {
        (each["noise"], f"round {each['round']}", sofim.title(each["method"]), each["epsilon"]): each["options"]
        for each in first["tuning"]["settings"]
    }
    for each in first["lines"]:
        key = tuple(each["labels"][name] for name in ("noise", "tuned for", "method", "epsilon"))
        assert options[key].items() <= each["settings"].items()
    monkeypatch.setattr(compare, "settle", no_search)
    for file in (kept, short / "out" / "sofim-4.json"):
        assert call(short, "sofim-4", "--epsilons", "1", "--settings", str(file)) == 0
        again = written(short, "sofim-4")
        assert [each["rounds"] for each in again["lines"]] == [each["rounds"] for each in first["lines"]]
        assert f"settings: those of {file.name}, not tuned again" in again["notes"]
    assert call(short, "sofim-16", "--epsilons", "1") == 0, "another table of the same data"


def test_settings_of_one_noise_leave_the_other_out(short, capsys):
    assert call(short, "sofim-16", "--epsilons", "1") == 0
    file = short / "out" / "sofim-16.json"
    assert call(short, "sofim-4", "--epsilons", "1", "--settings", str(file)) == 0
    found = written(short, "sofim-4")
    assert {each["labels"]["noise"] for each in found["lines"]} == {"untrusted-server"}
    assert any(
        note.startswith("left out, because sofim-16.json has no settings for them: secure-aggregation and round 70")
        for note in found["notes"]
    )


def test_a_file_for_other_parts_is_refused(folder):
    setting = {"method": "dp-fedgd", "epsilon": 1.0, "options": {}, "noise": "trusted-server", "round": 70}
    document = {"how": "", "paid": "", "validation": "", "settings": [setting]}
    (folder / "settings.json").write_text(json.dumps(document))
    with pytest.raises(SordinoError, match=r"has none for untrusted-server and round 70 or .*leave out --settings"):
        settled(request(folder, settings=str(folder / "settings.json")))


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if table.needs == tuning.COMMITTED])
def test_tables_of_cifar_keep_their_settings(name, folder, monkeypatch):
    monkeypatch.setattr(compare, "settle", no_search)
    assert [one for _, one in settled(request(folder, name)).parts] == [
        request(folder, name).tuning(part.committed) for part in sofim.ALONE
    ]

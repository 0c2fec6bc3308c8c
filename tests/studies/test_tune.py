"""Choosing settings: on validation records alone, by every search; and what it costs."""

import math

import numpy as np
import pytest

from sordino.data.sources import load
from sordino.errors import OverspentError, SordinoError
from sordino.evidence.ledger import Ledger
from sordino.methods import REGISTRY
from sordino.privacy import spending
from sordino.privacy.accounting import gaussian
from sordino.studies import grids, private_tuning, sweep
from sordino.studies.tune import TuningCase, _study_name, tune, validated
from sordino.training.resolved import resolve
from sordino.training.spec import Spec


@pytest.fixture(scope="module")
def digits():
    return load("digits", normalize="l2")


BASE = {"data": "digits", "clients": 4, "rounds": 9, "method": "dp-fedgd", "epsilon": 8.0, "seed": 1}


def test_a_record_trains_or_validates_never_both(digits):
    marked = digits._replace(x_train=np.arange(len(digits.y_train), dtype=np.float32)[:, None])
    halved = validated(marked, 0.1)
    train, held = set(halved.x_train[:, 0]), set(halved.x_test[:, 0])
    assert not train & held
    assert train | held == set(marked.x_train[:, 0])
    assert len(held) == pytest.approx(0.1 * len(marked.y_train), abs=1)


def test_persons_train_or_validate_as_a_whole(digits):
    """Persons and weights are cut along with the records."""
    records = np.arange(len(digits.y_train))
    marked = digits._replace(x_train=records[:, None], person=records // 3, weight=records / len(records))
    held = validated(marked, 0.1)
    assert (held.person == held.x_train[:, 0] // 3).all()
    assert (held.person_test == held.x_test[:, 0] // 3).all()
    assert not set(held.person) & set(held.person_test)
    assert (held.weight == held.x_train[:, 0] / len(records)).all()
    assert len(held.y_test) == pytest.approx(0.1 * len(records), abs=3)


def test_a_paid_search_holds_out_by_position_alone(digits):
    """At record level one record may name another person: that must not move other records."""
    base, (one, other) = resolve(Spec.of(BASE)), np.random.default_rng(0).integers(0, 99, (2, len(digits.y_train)))
    sites = digits._replace(site=np.arange(len(digits.y_train)))
    first, second = (private_tuning.scoring(base, sites._replace(person=who), None) for who in (one, other))
    assert (first.site == second.site).all()


def test_who_validates_does_not_depend_on_what_records_say(digits):
    other = digits._replace(y_train=np.roll(digits.y_train, 1), x_train=digits.x_train[::-1])
    first = validated(digits._replace(site=np.arange(len(digits.y_train))), 0.2)
    second = validated(other._replace(site=np.arange(len(digits.y_train))), 0.2)
    assert (first.site == second.site).all()


def test_test_records_are_not_looked_at(digits):
    """Any search finds the same, whatever the test records are."""
    spoilt = digits._replace(x_test=digits.x_test * np.nan, y_test=digits.y_test * 0)
    grid = {"lr": (0.1, 1.0, 4.0)}
    for how in ("grid", "halving"):
        (a,), (b,) = (tune([TuningCase(BASE, grid)], validated(each), how=how) for each in (digits, spoilt))
        assert a == b


def test_the_grid_finds_the_best_of_all(digits):
    from sordino.training.batch import run_many

    held = validated(digits)
    grid = {"lr": (0.05, 0.5, 2.0, 40.0)}
    (best,) = tune([TuningCase(BASE, grid)], held)
    alone = {lr: run_many([Spec.of({**BASE, "lr": lr})], held)[0].scores[9] for lr in grid["lr"]}
    assert best.score == pytest.approx(max(alone.values()))
    assert alone[best.options["lr"]] == max(alone.values())
    assert best.tried == 4
    assert best.values["lr"] == best.options["lr"]


def test_halving_trains_few_to_the_end_and_loses_little(digits):
    ticks, held = [], validated(digits)
    grid = {"lr": (0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 50.0)}
    case = TuningCase({**BASE, "rounds": 27}, grid)
    (best,), (whole,) = tune([case], held, how="halving", tick=ticks.append), tune([case], held)
    assert sum(ticks) == 9 + 3 + 1
    assert best.tried == 9
    assert whole.score - 0.1 <= best.score <= whole.score
    with pytest.raises(SordinoError, match="same number of rounds"):
        tune([TuningCase(BASE, grid), TuningCase({**BASE, "rounds": 5}, grid)], validated(digits), how="halving")


def test_optuna_goes_on_where_its_storage_stands(digits, tmp_path):
    pytest.importorskip("optuna")
    storage, ticks = f"sqlite:///{tmp_path}/o.db", []
    case = TuningCase(BASE, {"lr": (0.05, 5.0), "tail": (0.0, 0.5)})
    (first,) = tune([case], validated(digits), how="optuna", trials=5, storage=storage, tick=ticks.append)
    (second,) = tune([case], validated(digits), how="optuna", trials=8, storage=storage, tick=ticks.append)
    assert sum(ticks) == 5 + 8, "the second search counts the trials that it found"
    assert (first.tried, second.tried) == (5, 8)
    assert 0.05 <= second.options["lr"] <= 5.0
    assert second.score >= first.score


def test_other_runs_are_another_study(digits):
    """Also in one storage: scores of other rounds, records, ranges or metrics must not be mixed."""
    grid, held = {"lr": (0.05, 5.0)}, validated(digits)
    same = (TuningCase(BASE, grid), held, "accuracy", None)
    others = [
        (TuningCase({**BASE, "rounds": 10}, grid), *same[1:]),
        (TuningCase(BASE, {"lr": (0.05, 6.0)}), *same[1:]),
        (same[0], validated(digits, 0.2), "accuracy", None),
        (same[0], held, "log_loss", None),
        (same[0], held, "accuracy", 3),
    ]
    names = [_study_name(*facts) for facts in (same, *others)]
    assert len(set(names)) == 6
    assert names[0] == _study_name(TuningCase(dict(BASE), dict(grid)), *same[1:])
    assert all(name.startswith("dp-fedgd 8.0 ") for name in names)


def test_an_unknown_search_is_named(digits):
    with pytest.raises(SordinoError, match="halving"):
        tune([], digits, how="halvin")
    with pytest.raises(SordinoError, match="between 0 and 1"):
        validated(digits, 1.0)


# -------------------------------------------------------------------------------------------------------------- grids


@pytest.mark.parametrize("name", grids.PRESETS)
@pytest.mark.parametrize("method", REGISTRY)
def test_every_preset_names_options_that_the_method_has(name, method):
    grid = grids.preset(name, method)
    assert bool(grid) == (method not in grids.UNTUNED)
    base = {"method": method, "epsilon": math.inf}
    for setting in [next(grids.product(grid)), *list(grids.product(grid))[-1:]]:
        resolve(Spec.of({**base, **setting})).plan((5, 5))


def test_the_fine_grids_are_as_large_as_the_paper_s():
    """But for DP-FedGD, which also has the steps between 0.1 and 0.3, and DP-FTRL, which also has DP-FedGD's."""
    sizes = {name: grids.size(grid) for name, grid in grids.FINE.items()}
    paper = {
        "dp-fedgd": 5 + 3,
        "dp-fedavg": 25,
        "dp-fedfc": 30,
        "dp-scaffold": 100,
        "dp-fedadam": 144,
        "dp-fedyogi": 180,
    }
    assert paper | {"dp-adafedprox": 240, "dp-fedsofim": 120, "dp-ftrl": 6 + 5} == sizes


def test_a_method_that_no_paper_has_tuned_has_a_grid_of_its_own():
    grid = grids.preset("paper-fine", "dp-fedadam-scaled")
    assert grid == grids.preset("paper-coarse", "dp-fedadam-scaled")
    assert set(grid) == {"lr", "w", "tau"}
    assert set(grids.preset("steps", "dp-fedadam-scaled")) == {"lr"}


def test_dp_fedsofim_has_the_parts_of_its_paper_at_small_budgets():
    small, one, large = (grids.preset("paper-fine", "dp-fedsofim", epsilon) for epsilon in (0.5, 1.0, 5.0))
    assert small["bias_correction"] == one["bias_correction"] == (False, True)
    assert 20 in small["ema_rounds"]
    assert 20 in small["warm_start"]
    assert "ema_rounds" not in one
    assert large == grids.FINE["dp-fedsofim"]
    assert grids.preset("paper-fine", "dp-fedgd", 0.5) == grids.FINE["dp-fedgd"]


@pytest.mark.parametrize(
    ("key", "values", "best", "expected"),
    [
        ("lr", (0.1, 0.3), 0.3, 0.6),
        ("lr", (0.3, 0.1), 0.1, 0.05),
        ("lr", (0.1, 0.2, 0.3), 0.2, None),
        ("lr", (0.1,), 0.1, None),
        ("beta", (0.8, 0.95), 0.95, 0.975),
        ("beta", (0.8, 0.95), 0.8, 0.6),
        ("beta1", (0.0, 0.9), 0.0, None),
        ("w", (0.5, 0.9), 0.9, 0.95),
        ("tau", (0.0, 0.1), 0.0, None),
        ("steps", (1, 10), 10, 20),
        ("steps", (1, 20), 20, None),
        ("steps", (1, 10), 1, None),
        ("ema_rounds", (0, 20), 20, None),
        ("bias_correction", (False, True), True, None),
        ("apply_to", ("gradient", "momentum"), "momentum", None),
    ],
)
def test_a_value_beyond_the_edge_is_valid_or_none(key, values, best, expected):
    assert grids.beyond(key, values, best) == expected


def test_a_grid_is_extended_where_its_best_value_lies_on_an_edge(digits):
    """A grid far below the good steps ends where a grid around them ends, and says so."""
    held, how = validated(digits), {"metric": "log_loss"}
    bare = {**BASE, "epsilon": math.inf}
    low = TuningCase(bare, {"lr": (0.01, 0.02)})
    (left,), (moved,), (once,) = (tune([low], held, extensions=n, **how) for n in (0, 12, 1))
    assert (left.options["lr"], left.added, left.edge) == (0.02, {}, ("lr",))
    assert (once.added, once.edge, once.tried) == ({"lr": [0.04]}, ("lr",), 3)
    assert moved.options["lr"] > 0.3
    assert moved.edge == ()
    assert moved.score < left.score
    inside = TuningCase(bare, {"lr": (moved.options["lr"] / 8, moved.options["lr"], moved.options["lr"] * 8)})
    assert tune([inside], held, extensions=9, **how)[0].added == {}


def test_settings_may_be_chosen_for_an_early_round(digits):
    """By the score after that round, under the noise of the whole run."""
    from sordino.training.batch import run_many

    held, grid = validated(digits), {"lr": (0.02, 0.5, 2.0, 40.0)}
    (best,) = tune([TuningCase(BASE, grid)], held, tune_round=2)
    scores = {lr: run_many([Spec.of({**BASE, "lr": lr})], held)[0].scores[2] for lr in grid["lr"]}
    assert best.score == pytest.approx(max(scores.values()))
    assert scores[best.options["lr"]] == max(scores.values())
    with pytest.raises(SordinoError, match="tune_round: 0"):
        tune([], held, tune_round=0)


# -------------------------------------------------------------------------------------------------------------- paying

GRID = {"lr": (0.5, 1.0, 2.0, 4.0)}


@pytest.mark.parametrize("how", ["public", "count"])
def test_k_runs_share_one_budget(how, digits):
    found = private_tuning.search(BASE, GRID, validated(digits), how)
    whole = gaussian.mu(8.0, 1e-5)
    runs = found.account["runs"]
    assert runs == 4
    assert math.sqrt(runs) * spending.mu(found.trained.plan) <= whole * (1 + 1e-9)
    assert math.sqrt(runs) * spending.mu(found.trained.plan) == pytest.approx(whole, rel=1e-4)
    assert found.account["epsilon"] == 8.0
    assert found.options in [{"lr": lr} for lr in GRID["lr"]]


def test_the_settings_of_a_paid_search_are_drawn_without_the_data(digits):
    settings = [{"lr": lr} for lr in range(40)]
    drawn = [private_tuning._drawn(settings, 5, seed) for seed in (1, 1, 2, None)]
    assert drawn[0] == drawn[1] != drawn[2]
    for each in drawn:
        assert len({setting["lr"] for setting in each}) == 5
        assert each == sorted(each, key=lambda setting: setting["lr"])
    assert private_tuning._drawn(settings, 50, 1) == private_tuning._drawn(settings, None, 1) == settings
    found = private_tuning.search(BASE, GRID, validated(digits), "count", runs=2)
    assert math.sqrt(2) * spending.mu(found.trained.plan) == pytest.approx(gaussian.mu(8.0, 1e-5), rel=1e-4)
    assert "2 of 4 settings" in found.account["sentence"]
    with pytest.raises(SordinoError, match="--paid-runs"):
        private_tuning.search(BASE, GRID, validated(digits), "count", runs=0)


def test_a_count_is_noised_as_much_as_it_moves(digits):
    """std = 1 / mu of a run; where messages are seen, each client's own count carries that."""
    seen = private_tuning.search(BASE, GRID, validated(digits), "count").account
    hidden = private_tuning.search({**BASE, "trust": "secure-aggregation"}, GRID, validated(digits), "count").account
    assert hidden["score_std"] == pytest.approx(1 / hidden["mu_of_a_run"])
    assert seen["score_std"] == pytest.approx(math.sqrt(4) / seen["mu_of_a_run"])
    assert "score_std" not in private_tuning.search(BASE, GRID, validated(digits), "public").account


def test_the_noise_of_scores_decides(digits):
    """With next to no budget the choice is close to blind: a choice that never errs was not noised."""
    low = {**BASE, "epsilon": 0.01, "rounds": 2, "clients": 10}
    chosen = {
        private_tuning.search({**low, "seed": s}, GRID, validated(digits), "count").options["lr"] for s in range(12)
    }
    assert len(chosen) > 1


def test_random_stopping_tells_neither_how_many_nor_how_well(digits):
    with pytest.raises(SordinoError, match="random stopping"):
        private_tuning.search(BASE, GRID, validated(digits), "stopping")
    found = private_tuning.search({**BASE, "trust": "trusted-server"}, GRID, validated(digits), "stopping", runs=3)
    assert "runs" not in found.account
    assert spending.mu(found.trained.plan) < gaussian.mu(8.0, 1e-5)
    assert "trusted" in found.account["assumes"]


def test_runs_of_a_paid_search_have_their_own_noise(digits):
    from sordino.studies.private_tuning import _seed

    assert len({_seed(7, i) for i in range(50)}) == 50
    assert _seed(None, 3) is None


def test_what_cannot_be_paid_is_refused(digits):
    with pytest.raises(SordinoError, match="budget"):
        private_tuning.search({**BASE, "epsilon": math.inf}, GRID, validated(digits), "count")
    with pytest.raises(SordinoError, match="--charge-tuning public"):
        private_tuning.search({**BASE, "unit": "client"}, GRID, validated(digits), "count")
    with pytest.raises(SordinoError, match="stopping"):
        private_tuning.search(BASE, GRID, validated(digits), "stoping")


@pytest.mark.parametrize(
    "grid",
    [
        {"delta": (1e-5, 1e-2)},
        {"adjacency": ("replace-one", "add-remove")},
        {"unit": ("client",)},
        {"epsilon": (0.1, 0.2)},
        {"trust": ("trusted-server", "untrusted-server")},
        {"clients": (2, 40)},
    ],
    ids=str,
)
def test_a_paid_search_tries_options_only(grid, digits):
    """What changes the promise from run to run would not be paid for by the one budget."""
    with pytest.raises(SordinoError, match="varies only options"):
        private_tuning.search(BASE, grid, validated(digits), "count")


def test_wishes_of_single_clients_are_not_paid_by_halves(digits):
    with pytest.raises(SordinoError, match="one budget for all"):
        private_tuning.search({**BASE, "client_epsilon": {"0": 0.4}}, GRID, validated(digits), "count")


def test_random_stopping_does_not_count_aloud(digits):
    ticks = []
    private_tuning.search(
        {**BASE, "trust": "trusted-server"}, GRID, validated(digits), "stopping", runs=3, tick=ticks.append
    )
    assert ticks == []


def test_the_certificate_of_a_paid_search_doubts_and_assumes_what_that_of_a_run_does(tmp_path):
    rng = np.random.default_rng(0)
    rows = [f"{age:.3f},{'yes' if age > 0 else 'no'}" for age in rng.normal(size=200)]
    (tmp_path / "t.csv").write_text("\n".join(["age,sick", *rows, ""]))
    (tmp_path / "schema.toml").write_text(
        '[target]\ncolumn = "sick"\nlevels = ["no", "yes"]\n[columns.age]\ntype = "number"\nrange = [-4, 4]\n'
    )
    base = {key: value for key, value in BASE.items() if key != "seed"}
    base |= {"data": str(tmp_path / "t.csv"), "schema": str(tmp_path / "schema.toml"), "rounds": 2}
    found = sweep.paid(base, {"lr": (0.5, 1.0)}, "count")["certificate"]
    assert found["certified"]
    assert set(resolve(Spec.of(base)).assumptions) <= set(found["assumes"])
    assert any(text.startswith("The schema of the table") for text in found["assumes"])
    by_label = {**base, "partition": "dirichlet:0.5", "uncertified": True}
    found = sweep.paid(by_label, {"lr": (0.5, 1.0)}, "count")["certificate"]
    assert not found["certified"]
    assert "partition dirichlet reads the labels" in found["reasons"][0]


# --------------------------------------------------------------------------------------------------- paid from a ledger

FRESH = {key: value for key, value in BASE.items() if key != "seed"}


def charged(path):
    """Runs by search, as the ledger counts them."""
    with Ledger(path) as ledger:
        return [row.times for row in ledger.rows()]


def spent(path):
    with Ledger(path) as ledger:
        (who,) = ledger.people()
        return ledger.spent_epsilon(who, 1e-5)


def test_a_paid_search_that_dies_stays_charged(tmp_path, monkeypatch):
    """It is charged before its first run, and one that is started again pays again: it has noise of its own."""
    path = tmp_path / "ledger.db"

    def dies(*given, **keys):
        assert charged(path) == [4], "the charge comes before the first run"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(private_tuning, "run_many", dies)
        with pytest.raises(KeyboardInterrupt):
            sweep.paid(FRESH, GRID, "count", ledger=path, limit=14.0)
    assert charged(path) == [4]
    assert spent(path) == pytest.approx(8.0, rel=1e-6)
    found = sweep.paid(FRESH, GRID, "count", ledger=path, runs=2)
    assert found["certificate"]["certified"]
    assert charged(path) == [4, 2]
    mu = gaussian.mu(8.0, 1e-5)
    assert spent(path) == pytest.approx(gaussian.epsilon(math.sqrt(2) * mu, 1e-5), rel=1e-6)
    with pytest.raises(OverspentError, match="limit"):
        sweep.paid(FRESH, GRID, "count", ledger=path)
    assert charged(path) == [4, 2]


@pytest.mark.parametrize(
    ("values", "how", "message"),
    [
        (BASE, "count", "--seed|seed"),
        ({**FRESH, "trust": "trusted-server"}, "stopping", "random stopping does not add up"),
        ({**FRESH, "trust": "secure-aggregation", "integers": True}, "count", "not Gaussian does not add up"),
    ],
)
def test_a_search_whose_cost_does_not_add_up_is_refused_by_a_ledger(values, how, message, tmp_path):
    with pytest.raises(SordinoError, match=message):
        sweep.paid(values, GRID, how, ledger=tmp_path / "ledger.db")
    assert not (tmp_path / "ledger.db").exists() or not charged(tmp_path / "ledger.db")

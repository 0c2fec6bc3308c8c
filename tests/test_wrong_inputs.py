"""Mistakes that once ended in a traceback: one line on stderr, status 2, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import sordino
from papers import __main__ as papers
from sordino import Linear, Records, SordinoError, settings
from sordino.cli import main
from sordino.cli.federate import _shown
from sordino.data.partition import split
from sordino.data.records import Lazy
from sordino.methods import build
from sordino.models.linear import Loss
from sordino.models.torch_model import TorchModel

ROWS = [f"{k},{k % 5},{'groß' if k % 3 else 'klein'},{'Köln' if k % 2 else 'Bonn'}" for k in range(80)]
PRIVACY = sordino.Privacy(epsilon=4.0)
RECORDS = Records.of(np.ones((3, 2)), np.zeros(3), np.zeros(3, int))
NOT_OURS = {"how": "grid", "paid": "no", "validation": "v"}
NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")


def refused(capsys, *words):
    status = papers.main(words[1:]) if words[0] == "papers" else main(words)
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert (status, captured.out) == (2, "")
    assert lines[-1].startswith("sordino: ")
    assert "Traceback" not in captured.err
    return lines[-1]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------------------------------------------- devices

TAKE_A_DEVICE = [
    ["run", "--rounds", "5"],
    ["sweep", "--method", "dp-fedgd", "--grid", "lr=1,2"],
    ["compare", "--methods", "dp-fedgd"],
    ["papers"],
    ["estimate"],
    ["check", "--sums"],
    ["features", "--data", "mnist", "--network", "resnet20", "--weights", "w.pt", "--out", "f.npz"],
]


@pytest.mark.parametrize("words", TAKE_A_DEVICE, ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("device", "why"),
    [("tpu", "is unknown; use cpu or cuda"), pytest.param("cuda", "is not available, because", marks=NO_CUDA)],
)
def test_a_device_that_is_not_here(capsys, here, words, device, why):
    said = refused(capsys, *words, "--device", device)
    assert f"device: '{device}' {why}" in said
    assert said.endswith(("use cpu.", "use cpu or cuda."))
    assert list(here.iterdir()) == []


def test_every_command_that_takes_a_device_is_tried(capsys):
    for module in sordino.cli.COMMANDS:
        name = module.rpartition(".")[2]
        with pytest.raises(SystemExit):
            main([name, "--help"])
        takes = "--device" in capsys.readouterr().out
        assert takes == (name in [words[0] for words in TAKE_A_DEVICE]), name


@NO_CUDA
@pytest.mark.parametrize("device", ["cuda", "cuda:3", "mps", "meta", "nonsense"])
def test_records_name_the_device_that_is_not_here(device):
    with pytest.raises(SordinoError, match=f"device: '{device}' is"):
        Records.of(np.zeros((4, 2)), np.zeros(4), [0, 0, 1, 1], device=device)


# ------------------------------------------------------------------------------------------------------------ encodings


@pytest.mark.parametrize(
    ("header", "rows", "encoding", "words", "why"),
    [
        ("a,b,label,hospital", ROWS, "latin-1", ["--partition", "by-column:hospital"], "column 'hospital'"),
        ("größe,b,label", ["1,2,x", "2,3,y"] * 20, "latin-1", [], "a column's name"),
        ("a,b,label", ["1,2,groß", "2,3,y"] * 20, "cp1252", [], "column 'label'"),
        ("a,größe,label", ["1,2,x", "2,3,y"] * 20, "utf-16", [], "it begins as UTF-16 does"),
    ],
)
def test_a_table_in_another_encoding(capsys, here, header, rows, encoding, words, why):
    (here / "p.csv").write_bytes("\n".join([header, *rows, ""]).encode(encoding))
    said = refused(capsys, "run", "--data", "p.csv", *words)
    assert "is not UTF-8 text" in said
    assert why in said
    assert "iconv -f latin1 -t utf-8" in said
    (here / "p.csv").write_bytes("\n".join([header, *rows, ""]).encode("utf-8"))
    column = "hospital" if "hospital" in header else None
    assert sordino.load("p.csv", client=column).x_train.shape[1] == 2


def test_a_column_that_is_not_used_may_have_any_encoding(here):
    from sordino.data.sources import read_features

    (here / "p.csv").write_bytes("a,comment\n1,größe\n2,x\n".encode("latin-1"))
    assert read_features("p.csv", ["a"], 1).tolist() == [[1.0], [2.0]]
    with pytest.raises(SordinoError, match="column 'comment' has other bytes"):
        read_features("p.csv", ["comment"], 1)


# --------------------------------------------------------------------------------------------------------------- Python


def records(y, features=4):
    return Records.of(np.ones((len(y), features), np.float32), y, np.zeros(len(y), int))


@pytest.mark.parametrize(
    ("y", "model", "why"),
    [
        ([0, 1, 2, 3], Linear(4, 3), "y: the label 3 is out of range: the model has 3 classes, 0 to 2"),
        ([0, 1, -1], Linear(4, 3), "y: the label -1 is out of range"),
        ([0, -100], TorchModel(nn.Linear(4, 3)), "y: the label -100 is out of range"),
        ([0, 3], TorchModel(nn.Linear(4, 3)), "y: the label 3 is out of range"),
        ([0.0, 0.5], Linear(4, 3), "y: labels of type torch.float64"),
        ([-1, 1], Linear(4, 1, Loss.LOGISTIC), "y: the label -1 is out of range: the model has 2 classes"),
        ([0, 1], Linear(5, 3), "x: 4 features, but the model reads 5"),
    ],
)
def test_labels_and_rows_that_the_model_has_no_place_for(y, model, why):
    with pytest.raises(SordinoError, match=why):
        records(np.array(y)).check_fits(model)


def test_labels_that_fit():
    records(np.array([0, 1, 2])).check_fits(Linear(4, 3))
    records(np.array([0.0, 1.0])).check_fits(Linear(4, 1, Loss.LOGISTIC))
    records(np.array([-3, 4])).check_fits(Linear(4, 1, Loss.SQUARES))
    records(np.array([-3.5, 1e9])).check_fits(Linear(4, 1, Loss.SQUARES))
    Lazy.of([2], lambda i: (torch.ones(2, 4), torch.zeros(2).long())).check_fits(Linear(4, 3))
    with pytest.raises(SordinoError, match="x: 4 features"):
        Lazy.of([2], lambda i: (torch.ones(2, 4), torch.zeros(2))).check_fits(Linear(3, 3))


@pytest.mark.parametrize(
    ("x", "y", "why"),
    [
        (np.zeros((2, 3)), np.array(["a", "b"]), "y: not an array of numbers"),
        (np.array([["a"], ["b"]]), np.zeros(2), "x: not an array of numbers"),
        (np.zeros((2, 3)), np.zeros((2, 1)), r"y: of shape \(2, 1\); give one label per record"),
        (np.zeros(2), np.zeros(2), r"x: of shape \(2,\); give one row of features per record\.$"),
        (np.zeros((2, 3, 16, 16)), np.zeros(2), r"x: of shape \(2, 3, 16, 16\).*: x\.reshape\(len\(x\), -1\)"),
    ],
)
def test_records_are_numbers_in_rows(x, y, why):
    with pytest.raises(SordinoError, match=why):
        Records.of(x, y, [0, 1])


@pytest.mark.parametrize(
    ("module", "options", "why"),
    [
        (nn.Linear(20, 1), {}, "module: it has 1 output; classes need at least 2 outputs"),
        (nn.Linear(20, 2), {"shape": 20}, r"shape: 20 must be a tuple of whole numbers, as in \(20,\)"),
        ("resnet", {}, "module: a str is not a torch.nn.Module"),
    ],
)
def test_modules_that_are_no_classifiers(module, options, why):
    with pytest.raises(SordinoError, match=why):
        TorchModel(module, **options)


def test_split_divides_a_dataset():
    with pytest.raises(SordinoError, match=r"split divides a Dataset, .* not a tuple.* np.arange"):
        split((np.zeros((4, 2)), np.zeros(4)), "iid", 2)


def test_a_number_in_quotes_is_no_option():
    with pytest.raises(SordinoError, match=r"lr: '0\.02' is a text; give a number"):
        build("dp-fedgd", lr="0.02")
    assert build("dp-fedavg", noise_at="final").name == "dp-fedavg"


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.layer, self.wrap = nn.Linear(4, 3), wrap

    def forward(self, x):
        return self.wrap(self.layer(x))


@pytest.mark.parametrize(
    ("wrap", "why"),
    [
        (lambda z: {"logits": z}, "output: the module returns a dict with 'logits'; name .* output='logits'"),
        (lambda z: (z, z), "output: the module returns a tuple with 0, 1; name .* output=0"),
        (lambda z: None, "module: it returns a NoneType; it must return one tensor"),
    ],
)
def test_a_module_that_does_not_give_one_tensor(wrap, why):
    with pytest.raises(SordinoError, match=why):
        TorchModel(Wrapped(wrap), shape=(4,))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"method": "dp-fedgd"}, r"method: a str is not what a plan takes; write method=build\("),
        ({"privacy": 4.0}, r"privacy: a float is not what a plan takes; write privacy=Privacy\("),
        ({"sizes": RECORDS}, r"sizes: a Records is not what a plan takes; write sizes=records\.sizes"),
    ],
)
def test_a_plan_of_something_else(wrong, why):
    with pytest.raises(SordinoError, match=why):
        sordino.Plan(**{"method": build("dp-fedgd"), "rounds": 1, "sizes": (3,), "privacy": PRIVACY, **wrong})


def test_an_engine_takes_records_alone():
    plan = sordino.Plan(build("dp-fedgd"), rounds=1, sizes=(3,), privacy=PRIVACY)
    with pytest.raises(SordinoError, match=r"records: a Dataset is not Records; write Records.of\(x, y, client\)"):
        next(sordino.simulate.run(plan, Linear(64, 10), sordino.load("digits"), sordino.source(None)))


def test_verify_takes_the_contents_of_a_certificate():
    with pytest.raises(SordinoError, match=r"certificate: a str is not the contents of .* sordino verify FILE"):
        sordino.verify("runs/mine")


def test_a_schema_may_be_named_by_its_path(here):
    (here / "t.csv").write_text("age,sick\n" + "".join(f"{k},{k % 2}\n" for k in range(20)))
    schema = {
        "target": {"column": "sick", "levels": ["0", "1"]},
        "columns": {"age": {"type": "number", "range": [0, 90]}},
    }
    (here / "schema.toml").write_text(sordino.Schema.of(schema).toml())
    x = [sordino.load("t.csv", schema=given).x_train for given in (schema, "schema.toml", sordino.Schema.of(schema))]
    assert all(np.array_equal(each, x[0]) for each in x)
    with pytest.raises(SordinoError, match=r"schema: 3 must be the path of a schema\.toml, a dict, or a Schema"):
        sordino.load("t.csv", schema=3)


def test_a_name_of_the_package_that_is_spelt_wrongly_is_told():
    with pytest.raises(AttributeError) as caught:
        sordino.FederatedClassifer  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("FederatedClassifer", sordino)


def test_an_option_of_a_model_of_ones_own_needs_no_annotation():
    def network(features, classes, hidden=32):
        """A module without annotations, as people write it."""

    hidden = settings.declared(network, skip=("features", "classes"))["hidden"]
    assert settings.typed("hidden", 16, hidden.annotation) == 16


# ------------------------------------------------------------------------------------------------------------- commands


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["audit", "dp-fedgd", "--set", "lr=x"], "lr: 'x' must be a number"),
        (["estimate", "--sizes", "x"], "--sizes: 'x' is unknown. Known: equal, lognormal, uniform"),
        (
            ["privacy", "--epsilon", "1", "--clients", "100000000000"],
            "--clients: 100000000000 must be at most 1,000,000",
        ),
        (["sweep", "--grid", "lr=1,2", "--search", "optuna", "--trials", "0"], "--trials: 0 must be at least 1"),
        (
            ["sweep", "--grid", "lr=1,2", "--search", "optuna", "--storage", "x"],
            "--storage: 'x' is not the URL of a database",
        ),
        (["sweep", "--grid", "lr=1,2", "--storage", "sqlite:///x.db"], "--storage: only --search optuna stores"),
        (["sweep", "--grid", "lr=1,2", "--at-once", "2"], "--at-once: only --search optuna stores"),
        (
            ["sweep", "--grid", "lr=1,2", "--search", "optuna", "--charge-tuning", "count"],
            "--search: --charge-tuning count tries the settings of the grid",
        ),
        (["compare", "--search", "optuna", "--tune", "--trials", "0"], "--trials: 0 must be at least 1"),
        (["compare", "--epsilons", "-1"], "epsilon: -1.0 must lie in (0, 10000]"),
        (["papers", "fednew-synthetic", "--epsilons", "-1"], "epsilon: -1.0 must lie in (0, 10000]"),
        (["papers", "fednew-synthetic", "--clients", "inf"], "--clients: 'inf' must be integers"),
        (["papers", "fednew-synthetic", "--clients", "7"], "clients: 7, but the table has 100, 500"),
        (["papers", "fednew-synthetic", "--methods", "sgd"], "methods: sgd, but the table has dp-fedgd, dp-fedfc"),
        (["papers", "sofim-3", "--methods", "dp-fedgd"], "--methods: sofim-3 takes none; only the tables of DP-FedNew"),
        (["federate", "up", "--set", "clip=x"], "clip: 'x' must be a number"),
        (["federate", "up", "--set", "clip=-1"], "clip: -1.0 must be a finite number above 0"),
        (["federate", "up", "--dropouts", "5"], "needs at least 8 sites where 5 may drop out and 1 may collude"),
        (["federate", "up", "--label", "x"], "label: 'digits' has no columns to name"),
        (
            ["federate", "init", "s", "--sites", "a,b,c", "--features", "3", "--classes", "0"],
            "classes: 0; list two or more",
        ),
        (
            ["federate", "init", "s", "--sites", "a,b,c", "--features", "3", "--classes", "0,0"],
            "classes: 0, 0; list two or more different",
        ),
        (["federate", "coordinate", "s", "--port", "99999"], "--port: 99999 must lie between 1 and 65535"),
        (
            ["federate", "join", "s.toml", "--link", "a:1", "--authority", "b", "--port", "0"],
            "--port: 0 must lie between",
        ),
    ],
)
def test_a_wrong_value_is_named(capsys, here, words, message):
    if words[:2] == ["federate", "up"]:
        pytest.importorskip("flwr", reason="needs sordino[flower]")
    assert message in refused(capsys, *words)
    assert list(here.iterdir()) == [], "a refused command leaves nothing behind"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "the file has none at all"),
        (
            [{"method": "dp-fedgd", "epsilon": 1.0, "options": {}}],
            "the file has dp-fedgd. Give the JSON file that this",
        ),
        ([{"method": "dp-fedgd"}], "settings: each needs method, epsilon and options"),
        ([3], "settings: each needs method, epsilon and options"),
    ],
)
def test_settings_of_something_else_are_refused_by_the_fednew_tables(capsys, here, settings, message):
    (here / "s.json").write_text(json.dumps({**NOT_OURS, "settings": settings}))
    words = ["papers", "fednew-synthetic", "--epsilons", "1", "--settings", "s.json"]
    assert message in refused(capsys, *words)


def test_settings_that_were_chosen_at_other_budgets_serve():
    from papers import fednew

    each = fednew.FIRST_ORDER[0]
    key = fednew._key(each, "record")
    settings = {(key, 0.1): {"lr": 1}, (key, 10.0): {"lr": 2}, (key, None): {"lr": 3}}
    for epsilon, lr in ((0.05, 1), (0.9, 1), (1.1, 2), (8, 2), (float("inf"), 2)):
        assert fednew._of_nearest(settings, each, "record", epsilon) == {"lr": lr}


# ----------------------------------------------------------------------------------------------------------- federation


def test_up_reads_the_label_it_is_told(here):
    pytest.importorskip("flwr", reason="needs sordino[flower]")
    from sordino.operations import demonstration

    rows = [f"{k % 7},{k % 5},{'yes' if k % 3 else 'no'}" for k in range(200)]
    (here / "p.csv").write_text("\n".join(["a,b,outcome", *rows, ""]))
    with pytest.raises(SordinoError, match="label: no column is called"):
        demonstration.prepare(here / "none", 3, spec={}, data="p.csv")
    demonstration.prepare(
        here / "up", 3, spec={"method": "dp-fedsofim", "rounds": 2, "lr": 0.5}, data="p.csv", label="outcome"
    )
    with np.load(here / "up" / "sites" / "site1" / "data.npz") as found:
        assert set(found["y"]) == {"yes", "no"}
        assert found["x"].shape[1] == 2
    assert "lr = 0.5" in (here / "up" / "coordinator" / "spec.toml").read_text()


def test_up_divides_quantities_too(here):
    pytest.importorskip("flwr", reason="needs sordino[flower]")
    from sordino.operations import demonstration

    x = np.random.default_rng(0).standard_normal((200, 3))
    rows = [",".join(f"{value:.6f}" for value in row) for row in x]
    (here / "p.csv").write_text("\n".join(["a,b,dose", *rows, ""]))
    demonstration.prepare(here / "up", 3, spec={"rounds": 2, "method": "dp-fedgd"}, data="p.csv", label="dose")
    with np.load(here / "up" / "sites" / "site2" / "data.npz") as found:
        assert found["y"].dtype == np.float32
        assert np.isin(found["y"], x[:, 2].round(6).astype(np.float32)).all()


def test_up_passes_the_label_on(capsys, here, monkeypatch):
    pytest.importorskip("flwr", reason="needs sordino[flower]")
    from sordino.operations import demonstration

    seen = {}
    monkeypatch.setattr(demonstration, "prepare", lambda out, sites, **words: seen.update(words))
    monkeypatch.setattr(demonstration, "up", lambda out: iter([{"what": "failed", "why": "enough"}]))
    assert main(["federate", "up", "--data", "p.csv", "--label", "outcome"]) == 2
    assert (seen["data"], seen["label"]) == ("p.csv", "outcome")


def test_a_redirected_log_has_each_line_as_it_comes(capsys):
    """A bar is drawn on a terminal; a file would have got it at the end."""
    lines = [
        {"what": "waiting", "sites": ["north", "south"]},
        {"what": "begun", "method": "dp-fedgd", "rounds": 3, "start": 0, "run": "ab"},
        {"what": "round", "t": 0, "came": ["north"], "epsilon": 1.25, "accuracy": 0.5},
        {"what": "missing", "site": "south", "kind": "update"},
        {"what": "round", "t": 1, "came": ["north", "south"], "epsilon": 2.5, "mse": 0.5},
        {"what": "finished", "epsilon": 2.5, "sites": ["north"]},
    ]
    texts = ["waiting for north, south", "dp-fedgd, 3 rounds, beginning with round 1"]
    texts += ["round 1 of 3  accuracy 50.0%  ε  1.250  1 site\n", "south did not answer in time (update)"]
    texts += ["round 2 of 3  ε  2.500  2 sites\n", "finished: ε = 2.5, 1 site\n"]
    shown = _shown(iter(lines))
    for line, text in zip(lines, texts, strict=True):
        assert next(shown) == line
        err = capsys.readouterr().err
        assert text in err
        assert err.endswith("\n")
        assert len(err.splitlines()) == 1


# ---------------------------------------------------------------------------------------------------------- broken pipe

HEAD = """
import os, sys
from sordino.cli import main
sys.exit(main(sys.argv[1:]))
"""


def piped(*words):
    """A command whose reader takes nothing and goes away."""
    read, write = os.pipe()
    os.close(read)
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", HEAD, *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=env)
    os.close(write)
    return done


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="pipes of POSIX")
@pytest.mark.parametrize(
    "words",
    [["methods"], ["methods", "--json"], ["privacy", "--epsilon", "1"], ["privacy", "--epsilon", "1", "--json"]],
    ids=" ".join,
)
def test_a_reader_that_went_away_ends_a_command_quietly(words):
    done = piped(*words)
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE


@pytest.mark.skipif(not hasattr(signal, "SIGPIPE"), reason="pipes of POSIX")
def test_predict_into_head_ends_quietly(tmp_path):
    out = tmp_path / "run"
    assert main(["run", "--rounds", "6", "--out", str(out), "--json", str(tmp_path / "r.json")]) == 0
    np.savez(tmp_path / "x.npz", x=np.zeros((20_000, 64), np.float32))
    model = out if (out / "model.safetensors").exists() else out / "public"
    words = [sys.executable, "-m", "sordino.cli", "predict", str(model), str(tmp_path / "x.npz")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("row,prediction")
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 128 + signal.SIGPIPE

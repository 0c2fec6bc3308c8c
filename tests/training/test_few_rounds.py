"""`auto` in runs of one to four rounds: they finish and are certified, for every task."""

import numpy as np
import pytest

from sordino.cli import main
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from sordino.training.verify_run import verify_run

TARGETS = {
    "classes": '[target]\ncolumn = "y"\nlevels = ["0", "1"]\n',
    "quantities": '[target]\ncolumn = "y"\ntask = "quantity"\nrange = [0, 10]\n',
    "counts": '[target]\ncolumn = "y"\ntask = "count"\nmaximum = 10\n',
    "survival": '[target]\ncolumn = "y"\ntask = "survival"\nevent = "died"\nintervals = [0, 2, 5, 10]\n',
}
COLUMNS = '[columns.age]\ntype = "number"\nrange = [20, 90]\n'


@pytest.mark.parametrize(("task", "rounds"), [("classes", 1), ("quantities", 2), ("counts", 3), ("survival", 1)])
def test_a_run_of_few_rounds_is_certified(tmp_path, task, rounds):
    rng = np.random.default_rng(0)
    age = rng.uniform(20, 90, 200)
    label = {"classes": age > 55, "counts": rng.poisson(age / 20).clip(0, 10)}.get(task, age / 10)
    rows = [f"{a:.1f},{float(y):g}" for a, y in zip(age, label, strict=True)]
    if task == "survival":
        rows = [f"{row},{k % 2}" for k, row in enumerate(rows)]
    header = "age,y,died" if task == "survival" else "age,y"
    (tmp_path / "train.csv").write_text("\n".join([header, *rows]) + "\n")
    (tmp_path / "schema.toml").write_text(TARGETS[task] + COLUMNS)
    words = ["--data", str(tmp_path / "train.csv"), "--schema", str(tmp_path / "schema.toml"), "--clients", "3"]
    out = ["--epsilon", "8", "--rounds", str(rounds), "--out", str(tmp_path / "run")]
    assert main(["run", *words, *out, "--set", "test_fraction=0.2"]) == 0
    assert verify_run(tmp_path / "run").problems == []


@pytest.mark.parametrize(
    ("values", "few"),
    [
        ({"rounds": 4}, 4),
        ({"rounds": 5}, 0),
        ({}, 0),
        ({"rounds": 3, "early_share": 0.0}, 0),
        ({"rounds": 6, "calibrate": 0.1}, 4),
        ({"rounds": 2, "calibrate": 0.1}, 0),  # nothing is left for it: the plan refuses that
        ({"rounds": 3, "method": "dp-fedgd"}, None),
    ],
)
def test_a_run_tells_auto_how_few_rounds_there_are(values, few):
    assert resolve(Spec.of(values)).options.get("few_rounds") == few


@pytest.mark.parametrize(("task", "centred"), [("classes", True), *((task, False) for task in list(TARGETS)[1:])])
def test_a_run_tells_auto_whether_records_are_centred(tmp_path, task, centred):
    schema = tmp_path / "schema.toml"
    schema.write_text(TARGETS[task] + COLUMNS)
    resolved = resolve(Spec.of({"data": str(tmp_path / "train.csv"), "schema": str(schema)}))
    assert resolved.options["centred"] is centred
    first = resolved.method.stages[1 if task == "survival" else 0].queries[0]
    assert first.clip == pytest.approx(149.0 if centred else 101.0)
    kept = resolve(Spec.of({"data": str(tmp_path / "train.csv"), "schema": str(schema), "centred": False}))
    assert kept.options["centred"] is False

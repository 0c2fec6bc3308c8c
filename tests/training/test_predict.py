"""`load_run`: the model of a run in Python, by the same path as `sordino predict`."""

import csv
import itertools
import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import sordino
from sordino.cli import main
from sordino.errors import SordinoError
from sordino.training.predict import predict
from tests.support import AGE, DIED, WARD

SCHEMA = f"""
client = "hospital"
{DIED}{AGE}{WARD}
[columns.id]
type = "drop"
"""


def write(path, columns, order=None):
    names = list(order or columns)
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(names)
        out.writerows(zip(*(columns[name] for name in names), strict=True))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A table with its schema, and a run on it."""
    place, rng = tmp_path_factory.mktemp("run"), np.random.default_rng(0)
    age = rng.integers(20, 90, 300)
    ward = rng.choice(["surgery", "medicine", "other"], 300)
    died = np.where(rng.random(300) < (age - 20) / 80, "yes", "no")
    hospital = rng.choice(["north", "south"], 300)
    columns = {"id": range(300), "age": age, "ward": ward, "died": died, "hospital": hospital}
    write(place / "patients.csv", {name: list(values) for name, values in columns.items()})
    (place / "schema.toml").write_text(SCHEMA)
    words = ["--data", str(place / "patients.csv"), "--schema", str(place / "schema.toml"), "--rounds", "5"]
    assert main(["run", *words, "--out", str(place / "run"), "--json", str(place / "run.json")]) == 0
    return place


NEW = {"age": [30, 85, None], "ward": ["surgery", "medicine", "elsewhere"], "shoe": [1, 2, 3]}


def test_it_has_what_a_run_has(place):
    run = sordino.load_run(place / "run")
    assert run.classes == ("no", "yes")
    assert run.features == tuple(run.schema.features)
    assert run.certificate == json.loads((place / "run" / "public" / "certificate.json").read_text())
    assert run.theta.shape == (run.model.size,)
    assert run.predict_proba(NEW).shape == (3, 2)
    assert run.predict_proba(NEW).sum(1) == pytest.approx(1)
    assert run.predict_proba(NEW)[1, 1] > run.predict_proba(NEW)[0, 1], "old patients die more often"
    assert set(run.predict(NEW)) <= {"no", "yes"}


def test_predictions_are_written_to_a_file(place, tmp_path, capsys):
    words = ["predict", str(place / "run"), str(place / "patients.csv")]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert main([*words, "--out", str(tmp_path / "risks.csv")]) == 0
    assert (tmp_path / "risks.csv").read_text() == shown
    assert "risks.csv" in capsys.readouterr().out
    for more, why in (
        (["--out", str(tmp_path / "risks.csv")], "exists; name another file"),
        (["--out", str(tmp_path / "no" / "risks.csv")], "there is no folder for"),
        (["--out", str(tmp_path / "more.csv"), "--json"], "use one of them"),
    ):
        assert main([*words, *more]) == 2
        assert why in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "risks.csv"]


@pytest.mark.parametrize("where", ["run", "run/public", "run/public/model.safetensors"])
def test_every_path_of_a_run_names_it(place, where):
    assert sordino.load_run(str(place / where)).certificate is not None


def test_columns_are_found_by_name(place):
    run = sordino.load_run(place / "run")
    expected = run.predict_proba(NEW)
    backwards = dict(reversed(NEW.items()))
    assert np.array_equal(run.predict_proba(backwards), expected)
    write(place / "new.csv", {k: ["" if v is None else v for v in values] for k, values in NEW.items()}, backwards)
    assert np.array_equal(run.predict_proba(place / "new.csv"), expected)
    pa = pytest.importorskip("pyarrow")
    assert np.array_equal(run.predict_proba(pa.table(backwards)), expected)
    encoded = run.schema.encode(NEW, target=False).x
    assert np.array_equal(run.predict_proba(encoded), expected)


def test_the_command_and_the_object_agree(place):
    write(place / "same.csv", {k: ["" if v is None else v for v in values] for k, values in NEW.items()})
    labels, classes, probabilities = predict(place / "run", str(place / "same.csv"))
    run = sordino.load_run(place / "run")
    assert labels == list(run.predict(NEW))
    assert classes == list(run.classes)
    assert np.array_equal(np.float32(probabilities), run.predict_proba(NEW))
    assert main(["predict", str(place / "run"), str(place / "same.csv"), "--json", str(place / "p.json")]) == 0
    assert json.loads((place / "p.json").read_text())["probabilities"] == probabilities


def test_columns_are_kept_beside_the_predictions(place, tmp_path, capsys):
    columns = {k: ["" if v is None else v for v in values] for k, values in NEW.items()}
    number = len(next(iter(columns.values())))
    ids = ["007", "=1+1", *(f"p{k}" for k in range(number - 2))]
    write(tmp_path / "new.csv", {**columns, "id": ids})
    run = [str(place / "run"), str(tmp_path / "new.csv"), "--keep", "id"]
    assert main(["predict", *run, "--out", str(tmp_path / "risks.csv")]) == 0
    heading, *rows = (tmp_path / "risks.csv").read_text().splitlines()
    assert heading.startswith("row,id,prediction,p(")
    assert [row.split(",")[1] for row in rows] == ["007", "'=1+1", *ids[2:]], "no program computes a cell"
    assert main(["predict", *run, "--json", str(tmp_path / "p.json")]) == 0
    assert json.loads((tmp_path / "p.json").read_text())["kept"] == {"id": ids}
    capsys.readouterr()
    assert main(["predict", *run[:-1], "idd"]) == 2
    assert "lacks the column 'idd'. Did you mean 'id'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("records", "why"),
    [
        ({"age": [30]}, "lacks the column 'ward'"),
        ({"age": ["old"], "ward": ["surgery"]}, "age"),
        (np.zeros((2, 2)), "the model was trained on 6 encoded ones; give a frame"),
        (np.array([["a"]]), "not numeric"),
        ("nowhere.csv", "there is no file"),
    ],
)
def test_wrong_records_are_refused(place, records, why):
    with pytest.raises(SordinoError, match=why):
        sordino.load_run(place / "run").predict(records)


def test_frames_without_a_schema(tmp_path):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 2)).round(4)
    write(tmp_path / "d.csv", {"a": x[:, 0], "b": x[:, 1], "y": x[:, 0].round(3) - x[:, 1].round(3) + 0.0005})
    words = ["--data", str(tmp_path / "d.csv"), "--label", "y", "--rounds", "3", "--method", "dp-fedgd"]
    assert main(["run", *words, "--out", str(tmp_path / "run"), "--json", str(tmp_path / "o.json")]) == 0
    run = sordino.load_run(tmp_path / "run")
    assert (run.schema, run.classes, run.features) == (None, (), ("a", "b"))
    frame = {"b": x[:5, 1], "a": x[:5, 0]}
    assert np.array_equal(run.predict(frame), run.predict(x[:5]))
    with pytest.raises(SordinoError, match="the frame lacks the columns b that"):
        run.predict({"a": [1.0]})
    with pytest.raises(SordinoError, match="predicts numbers"):
        run.predict_proba(frame)


def test_a_swapped_model_is_refused(place, tmp_path):
    import shutil

    shutil.copytree(place / "run", tmp_path / "run")
    model = tmp_path / "run" / "public" / "model.safetensors"
    content = bytearray(model.read_bytes())
    content[-1] ^= 1
    model.write_bytes(content)
    with pytest.raises(SordinoError, match="is not the model that the certificate beside it was made for"):
        sordino.load_run(tmp_path / "run")
    cert = tmp_path / "run" / "public" / "certificate.json"
    cert.write_text(json.dumps(json.loads(cert.read_text()) | {"epsilon": 0.1}))
    with pytest.raises(SordinoError, match="of the certificate beside"):
        sordino.load_run(tmp_path / "run")


def test_the_threshold_of_the_run_decides_between_two_classes(place, tmp_path, capsys):
    words = ["--data", str(place / "patients.csv"), "--schema", str(place / "schema.toml"), "--rounds", "5"]
    assert main(["run", *words, "--set", "threshold=0.2", "--seed", "1", "--out", str(tmp_path / "low")]) == 0
    run = sordino.load_run(tmp_path / "low")
    assert run.threshold == 0.2
    people = {"age": list(range(20, 90)), "ward": ["surgery"] * 70}
    risk = run.predict_proba(people)[:, 1]
    assert ((risk > 0.2) & (risk < 0.5)).any()
    assert (run.predict(people) == np.where(risk > 0.2, "yes", "no")).all()
    write(tmp_path / "people.csv", people)
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "low"), str(tmp_path / "people.csv"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"] == run.predict(people).tolist()


def test_public_files_name_no_folder_of_this_machine(place):
    run = place / "run"
    assert all(str(place).encode() not in path.read_bytes() for path in (run / "public").rglob("*") if path.is_file())
    assert f'data = "{place / "patients.csv"}"' in (run / "private" / "secret.toml").read_text()


def test_a_model_without_a_folder_of_weights_takes_none(place, tmp_path):
    with pytest.raises(SordinoError, match="weights: the model was trained without a folder of weights"):
        sordino.load_run(place / "run", weights=tmp_path)


def test_a_model_without_a_certificate_is_told(place, tmp_path, capsys):
    import shutil

    shutil.copytree(place / "run", tmp_path / "run")
    write(tmp_path / "people.csv", {"age": [30], "ward": ["surgery"]})
    for expected in (False, True):
        assert main(["predict", str(tmp_path / "run"), str(tmp_path / "people.csv")]) == 0
        assert ("no certificate beside the model" in capsys.readouterr().err) is expected
        (tmp_path / "run" / "public" / "certificate.json").unlink(missing_ok=True)


def foreign(run, path, change, theta=None):
    """The model of a run, without a certificate, with another description or other parameters."""
    with safe_open(run / "public" / "model.safetensors", framework="pt") as archive:
        about = json.loads(archive.metadata()["sordino"])
        tensors = {name: archive.get_tensor(name) for name in archive.keys()}  # noqa: SIM118
    change(about)
    save_file(tensors if theta is None else {"theta": theta}, path, metadata={"sordino": json.dumps(about)})
    return path


@pytest.mark.parametrize(
    ("change", "theta"),
    [
        (lambda about: about.update(features=10**12), None),
        (lambda about: about.update(features=5.5), None),
        (lambda about: about.update(features="5"), None),
        (lambda about: about.update(features=-1), None),
        (lambda about: about.update(classes=None), None),
        (lambda about: about.update(kind=["logistic"]), None),
        (lambda about: about.update(kind="mlp"), None),
        (lambda about: about.update(spec="[["), None),
        (lambda about: about.pop("normalize"), None),
        (lambda about: about["model"].update(options="[1]"), None),
        (lambda about: about["model"].update(seed="x"), None),
        (lambda about: None, torch.ones(5)),
    ],
)
def test_a_model_of_somebody_else_that_describes_none_is_refused(place, tmp_path, change, theta):
    """And ends in no traceback, and takes no memory for features that it only claims."""
    with pytest.raises(SordinoError, match="model: "):
        sordino.load_run(foreign(place / "run", tmp_path / "model.safetensors", change, theta))
    assert sordino.load_run(foreign(place / "run", tmp_path / "same.safetensors", lambda about: None)).features


def test_a_name_of_somebody_else_is_no_formula_in_a_table(place, tmp_path, capsys):
    """Programs of tables compute what begins with an equals sign: it may start programs and send other cells."""

    def change(about):
        about["classes"][-1] = "=HYPERLINK(A1)\n=1,=2"
        about["columns"][0] = "@SUM(A1)"

    model = foreign(place / "run", tmp_path / "model.safetensors", change)
    (tmp_path / "new.csv").write_text("age,ward\n89,surgery\n20,medicine\n")
    out, weights = tmp_path / "risks.csv", tmp_path / "weights.csv"
    assert main(["predict", str(model), str(tmp_path / "new.csv"), "--out", str(out)]) == 0
    assert main(["export", str(model), "--to", "coefficients", "--out", str(weights)]) == 0
    texts = [path.read_text() for path in (out, weights)]
    cells = [cell for text in texts for row in csv.reader(text.splitlines(keepends=True)) for cell in row]
    assert any("HYPERLINK" in cell for cell in cells)
    assert any("SUM" in cell for cell in cells)
    assert not [cell for cell in cells if cell[:1] in ("=", "@")]
    lines = itertools.dropwhile(lambda line: line.startswith("# "), texts[1].splitlines())
    assert next(lines).startswith("feature,")  # no label begins a line of a comment

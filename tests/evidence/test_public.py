"""What a run publishes: every field of every file, of `--json` and of the console is listed with a reason."""

import importlib.util
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from sordino.cli import main
from sordino.cli.run import slope_note
from sordino.evidence import public
from sordino.evidence.statement import statement
from sordino.training.spec import RUN_KEYS
from sordino.training.survival import BY_CHANCE
from tests.support import language

COHORT = ["--unit", "client", "--participation", "poisson:0.5", "--trust", "trusted-server"]
ADADPS = ["--method", "dp-adadps"]
TABLE = ["--data", "FILE", "--schema", "SCHEMA", "--partition", "iid"]
DRAWN = ["--clients", "3", "--participation", "fixed:2", "--rounds", "30"]  # every client takes part
RUNS = {
    "record": ["--data", "FILE", "--label", "label", "--partition", "by-column:site"],
    "client": ["--data", "FILE", "--label", "label", "--partition", "by-column:site", "--unit", "client"],
    "person": ["--data", "FILE", "--label", "label", "--partition", "iid", "--person", "weight", "--clients", "3"],
    "amplified": ["--data", "FILE", "--label", "label", "--partition", "by-column:site", *COHORT],
    "sampled": ["--data", "FILE", "--label", "label", "--partition", "iid", "--batch", "poisson:60", "--clients", "3"],
    "stream": [*TABLE, "--method", "dp-ftrl", "--set", "mechanism=banded", *DRAWN],
    "long stream": [*TABLE, "--method", "dp-ftrl", "--set", "mechanism=inverse-root"],
    "secure": ["--data", "FILE", "--label", "label", "--partition", "iid", "--trust", "secure-aggregation"],
    "statistics": ["--data", "FILE", "--label", "label", "--partition", "iid", "--public-stats", "STATS"],
    "side": ["--data", "FILE", "--label", "label", "--partition", "iid", "--set", "public=STATS", *ADADPS],
    "counts": ["--data", "FILE", "--label", "label", "--partition", "counts:SPLIT", "--set", "uncertified=true"],
    "quantity": ["--data", "QUANTITY", "--label", "y", "--partition", "iid", "--participation", "fixed:1"],
    "seeded": ["--data", "FILE", "--label", "label", "--seed", "1", "--set", "client_epsilon={ 1 = 0.5 }"],
    "benchmark": ["--data", "digits", "--clients", "5"],
    "network": ["--data", "digits", "--clients", "5", "--model", "mlp", "--set", "clipping=automatic"],
    "table": TABLE,
    "found": [*TABLE, "--private-statistics", "0.1"],
    "intervals": [*TABLE, "--method", "auto", "--rounds", "8", "--set", "uncertainty=0.2"],
    "count": ["--data", "COUNT", "--schema", "COUNTS", "--partition", "iid", "--set", "public_data=true"],
    "survival": ["--data", "TIME", "--schema", "TIMES", "--partition", "iid", "--method", "auto", "--rounds", "8"],
    "open survival": ["--data", "TIME", "--schema", "TIMES", "--partition", "iid", "--set", "public_data=true"],
    "declared": ["--data", "FILE", "--label", "label", "--set", "public_data=true"],
    "open quantity": ["--data", "QUANTITY", "--label", "y", "--partition", "iid", "--set", "public_data=true"],
}
TEXTS = importlib.util.find_spec("transformers") is not None
TEXT = ["--data", "TEXT", "--text", "answer", "--model", "causal-lora", "--set", "weights=FOLDER", "--set", "length=8"]
if TEXTS:
    RUNS["text"] = [*TEXT, "--prompt", "question", "--clients", "3"]
    RUNS["open text"] = [*TEXT, "--clients", "3", "--set", "public_data=true"]
OPEN = ("benchmark", "network", "declared", "open quantity", "count", "open survival", "open text")
SURVIVAL = 'task = "survival"\nevent = "died"\nintervals = [0, 1, 2]'


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    place, rng = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    x = rng.normal(size=(400, 3))
    rows = [
        f"{a:.4f},{b:.4f},{c:.4f},{'ill' if a + b > 0 else 'well'},clinic-{chr(97 + k % 8)}"
        for k, (a, b, c) in enumerate(x)
    ]
    (place / "patients.csv").write_text("\n".join(["age,dose,weight,label,site", *rows]) + "\n")
    (place / "free.csv").write_text(
        "\n".join(["age,dose,weight,label", *(row.rpartition(",")[0] for row in rows)]) + "\n"
    )
    (place / "dose.csv").write_text("\n".join(["a,b,y", *(f"{a:.4f},{b:.4f},{a - b:.5f}" for a, b, _ in x)]) + "\n")
    columns = "".join(f'[columns.{name}]\ntype = "number"\nrange = [-3, 3]\n' for name in ("age", "dose", "weight"))
    found = columns.replace("range", "within", 1)
    (place / "found.toml").write_text(f'[target]\ncolumn = "label"\nlevels = ["well", "ill"]\n{found}')
    (place / "schema.toml").write_text(f'[target]\ncolumn = "label"\nlevels = ["well", "ill"]\n{columns}')
    lines = [f"{a:.4f},{abs(b) + 0.1:.4f},{int(c > 0)},{int(4 * abs(a))}" for a, b, c in x]
    for name, (label, target) in {"counts": ("n", 'task = "count"\nmaximum = 9'), "times": ("time", SURVIVAL)}.items():
        rest = "".join(
            f'[columns.{column}]\ntype = "drop"\n'
            for column in ("time", "died", "n")
            if column != label and not (column == "died" and label == "time")
        )
        text = f'[target]\ncolumn = "{label}"\n{target}\n[columns.a]\ntype = "number"\nrange = [-3, 3]\n{rest}'
        (place / f"{name}.toml").write_text(text)
    (place / "numbers.csv").write_text("\n".join(["a,time,died,n", *lines]) + "\n")
    np.savez(place / "stats.npz", mean=np.zeros(3), cov=np.eye(3))
    (place / "split.csv").write_text("client,class_0,class_1\n0,60,70\n1,80,50\n")
    if TEXTS:
        (place / "gpt2").mkdir()
        language.gpt2(place / "gpt2")
        language.answers(place / "answers.csv")
    return place


@pytest.fixture(scope="module")
def done(files, tmp_path_factory):
    """Every run once, by the command line: (directory, --json document)."""
    made = {}
    for name, words in RUNS.items():
        out = tmp_path_factory.mktemp("runs") / name
        source = files / ("patients.csv" if any("by-column" in word for word in words) else "free.csv")
        known = {"FILE": str(source), "STATS": str(files / "stats.npz"), "QUANTITY": str(files / "dose.csv")}
        known |= {"SCHEMA": str(files / "schema.toml"), "COUNT": str(files / "numbers.csv")}
        known |= {"TIME": str(files / "numbers.csv"), "COUNTS": str(files / "counts.toml")}
        known |= {"TEXT": str(files / "answers.csv"), "weights=FOLDER": f"weights={files / 'gpt2'}"}
        known |= {"TIMES": str(files / "times.toml"), "public=STATS": f"public={files / 'stats.npz'}"}
        known["counts:SPLIT"] = f"counts:{files / 'split.csv'}"
        known |= {"SCHEMA": str(files / "found.toml")} if name == "found" else {}
        words = [known.get(word, word) for word in words]
        method = [] if "--method" in words else ["--method", "dp-fedgd"]
        result = out.with_suffix(".json")
        rounds = [] if "--rounds" in words else ["--rounds", "3"]
        assert main(["run", *words, *method, *rounds, "--out", str(out), "--json", str(result)]) == 0
        made[name] = out, json.loads(result.read_text())
    return made


@pytest.mark.parametrize("name", list(RUNS))
def test_every_public_field_is_listed(done, name):
    out, _ = done[name]
    assert public.unlisted(out / "public") == []
    cert = json.loads((out / "public" / "certificate.json").read_text())
    assert (out / "public" / "statement.md").read_text() == statement(cert)


def test_every_listed_field_occurs(done):
    occurs: dict[str, set[str]] = {}
    for out, _ in done.values():
        for name, told in public.found(out / "public").items():
            occurs.setdefault(name, set()).update(told)
    of_texts = set() if TEXTS else {field for field in (*public.METRICS, *public.SUMMARY) if "perplexity" in field}
    for name, listed in public.FILES.items():
        missing = set(listed) - occurs[name] - of_texts
        assert missing == set() or name == "spec.toml", (name, missing)
    named = {field.removesuffix(".*") for field in public.SPEC} - {"(option)"}
    assert named == set(RUN_KEYS), "a key of a run that has no reason, or a reason without a key"
    told = {field for _, document in done.values() for field in public.fields({**document, "spec": None})}
    assert told - {"spec"} == set(public.SUMMARY) - of_texts


def test_only_a_client_that_was_never_drawn_may_have_no_releases(tmp_path):
    for releases, problems in (([], []), ([1], ["certificate.json: groups[].releases"])):
        (tmp_path / "certificate.json").write_text(json.dumps({"groups": [{"releases": releases}]}))
        assert public.unlisted(tmp_path) == problems
    assert list(public.fields({"queries": []})) == ["queries"], "no other field may be empty"


def test_a_new_field_is_noticed(tmp_path):
    for name, text in (
        ("certificate.json", '{"groups": [{"mean_age": 1}], "seconds": 2}'),
        ("metrics.jsonl", '{"round": 1, "seconds": 0.5}\n'),
        ("notes.txt", "n"),
    ):
        (tmp_path / name).write_text(text)
    assert public.unlisted(tmp_path) == [
        "certificate.json: groups[].mean_age",
        "certificate.json: seconds",
        "metrics.jsonl: seconds",
        "notes.txt: (unknown file)",
    ]


@pytest.mark.parametrize("name", list(RUNS))
def test_exact_functions_of_private_data_are_not_told(done, name, files):
    """Neither labels by client, nor how long a round took; at client level not who took part, nor how many records."""
    out, document = done[name]
    assert ("seconds" in document) is (name in OPEN)
    assert ("heterogeneity" in document) is (name in OPEN)
    assert ("client_metrics" in document) is (name in OPEN)
    for group in document["metrics"].get("calibration_curve", []):
        assert ("records" in group) is (name not in ("client", "amplified"))
    published = [path for path in (out / "public").rglob("*") if path.is_file()]
    text = "".join(path.read_bytes().decode("latin-1") for path in published) + json.dumps(document)
    if name in ("client", "amplified"):
        assert "clinic-" not in text
        cert = json.loads((out / "public" / "certificate.json").read_text())
        assert (cert["records"], cert["test_records"], cert["client_names"]) == (None, None, [])
        assert cert["clients"] == 6, "two of eight clients are held out for testing"
    if name == "amplified":
        assert "schedule_seed" not in document["spec"]
    key = (out / "private" / "run.key").read_text().split('"')
    assert not any(secret in text for secret in (key[1], key[3]))


@pytest.mark.parametrize("name", list(RUNS))
def test_no_public_file_names_a_folder_of_this_machine(done, files, name):
    out, document = done[name]
    published = [path for path in (out / "public").rglob("*") if path.is_file()]
    text = "".join(path.read_bytes().decode("latin-1") for path in published) + json.dumps({**document, "out": ""})
    assert str(files.parent) not in text
    secret = out / "private" / "secret.toml"
    assert secret.is_file() is any(word.isupper() or word.endswith(("=STATS", ":SPLIT")) for word in RUNS[name])
    for part in re.findall(r'"(.*)"', secret.read_text() if secret.is_file() else ""):
        assert Path(part.removeprefix("counts:")).exists()


def test_runs_whose_paths_are_private_are_verified_with_and_without_them(done, tmp_path, capsys):
    for name in ("side", "counts", *(["text"] if TEXTS else [])):
        out, _ = done[name]
        shutil.copytree(out / "public", tmp_path / name)
        for place in (out, tmp_path / name):
            assert main(["verify", str(place)]) == (0 if name != "counts" else 1), capsys.readouterr()
            assert "no plan follows" not in capsys.readouterr().out


def test_every_line_on_the_console_is_listed(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setattr("sordino.training.evaluate.beats_constant_guess", lambda dataset, last: dataset.classes == ())
    chance = f"its concordance index is 0.51, {BY_CHANCE}"  # of a real run it depends on the noise
    monkeypatch.setattr(
        "sordino.training.evaluate.hardly_better", lambda dataset, _: chance if dataset.task == "survival" else ""
    )
    sure = slope_note({"calibration_slope": 0.5}, 1000)
    monkeypatch.setattr("sordino.cli.run.slope_note", lambda measured, tests: sure)
    monkeypatch.setattr("sordino.cli.run.MOST_CLASSES", 9)  # fewer than digits has
    seen = set()
    for name in (
        "record",
        "client",
        "sampled",
        "quantity",
        "seeded",
        "benchmark",
        "count",
        "open survival",
        "found",
        "intervals",
        *(["text"] if TEXTS else []),
    ):
        words = list(RUNS[name])
        known = {"FILE": "patients.csv" if "by-column:site" in words else "free.csv", "QUANTITY": "dose.csv"}
        known |= dict.fromkeys(("COUNT", "TIME"), "numbers.csv") | {"COUNTS": "counts.toml", "TIMES": "times.toml"}
        known |= {"SCHEMA": "found.toml" if name == "found" else "schema.toml", "TEXT": "answers.csv"}
        words = [str(files / known[word]) if word in known else word for word in words]
        words = [word.replace("=FOLDER", f"={files / 'gpt2'}") for word in words]
        words = [word.replace("poisson:60", "poisson:200") for word in words]
        words += ["--ledger", str(tmp_path / "l.db")] if name == "record" else []
        words += ["--epsilon", "12"] if name == "quantity" else []
        words += [] if name == "intervals" else ["--method", "dp-fedgd", "--rounds", "3"]
        assert main(["run", *words, "--out", str(tmp_path / name)]) == 0
        captured = capsys.readouterr()
        for line in filter(None, re.split(r"[\r\n]+", captured.out + captured.err)):
            own = [k for k, one in enumerate(public.CONSOLE) if re.fullmatch(one.pattern, line.strip())]
            assert len(own) == 1, (name, line, own)
            assert name in OPEN or not public.CONSOLE[own[0]].open_only, line
            seen.update(own)
        if name == "client":
            assert "test records" not in captured.out
            assert "clinic-" not in captured.out
    unseen = [one.pattern for k, one in enumerate(public.CONSOLE) if k not in seen]
    assert unseen == [] or (not TEXTS and all("perplexity" in pattern for pattern in unseen))


def test_the_page_for_people_is_made_from_the_list():
    page = (Path(__file__).parents[2] / "docs" / "files.md").read_text(encoding="utf-8")
    assert page == public.page(), "run: python -m sordino.evidence.public > docs/files.md"
    assert all(reason for listed in public.FILES.values() for reason in listed.values())

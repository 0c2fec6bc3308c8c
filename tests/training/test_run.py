import json
import random
import shutil
import stat
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from sordino.errors import SordinoError
from sordino.evidence.certificate import certificate
from sordino.evidence.ledger import Ledger
from sordino.training import artifacts, run
from sordino.training.artifacts import load_model
from sordino.training.evaluate import beats_constant_guess, evaluate
from sordino.training.folder import RunFolder
from sordino.training.predict import predict
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from sordino.training.verify_run import verify_run
from tests.support import tiers


def finished(out, **values):
    job = run.prepare(Spec.of({"method": "dp-fedsofim", "rounds": 8, "seed": 1, **values}))
    run.start(job, out)
    history = list(run.rounds(job, out))
    return job, run.finish(job, out, history), history


def where(job, out):
    place = RunFolder.find(out)
    return place, job.identity(place.keys().identity)


@pytest.mark.draws
def test_a_run_leaves_everything_behind(tmp_path):
    job, cert, history = finished(tmp_path / "run")
    root = tmp_path / "run"
    assert {path.name for path in root.iterdir()} == {"README.txt", "public", "private"}
    names = {path.name for path in (root / "public").iterdir()}
    expected = {"metrics.jsonl", "certificate.json", "statement.md", "model.safetensors", "curve.png", "spec.toml"}
    assert names == expected | {"MODEL_CARD.md"}
    kept = {path.name for path in (root / "private").iterdir()}
    assert kept == {"ledger.db", "checkpoint.npz", "run.key", "lock", "timings.jsonl"}
    assert stat.S_IMODE((root / "private").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (root / "private").iterdir()} == {0o600}
    assert len({path.stat().st_mtime for path in (root / "public").iterdir()}) == 1, "times tell how long a run took"
    lines = [json.loads(line) for line in (tmp_path / "run" / "public" / "metrics.jsonl").read_text().splitlines()]
    assert lines == history
    assert [line["round"] for line in lines] == list(range(1, 9))
    assert lines[-1]["epsilon"] == pytest.approx(8.0)
    assert all(a["epsilon"] < b["epsilon"] for a, b in pairwise(lines))
    assert (tmp_path / "run" / "public" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert cert["epsilon"] == pytest.approx(8.0)
    summary = run.summary(job, cert, history, root)
    assert summary["metrics"]["accuracy"] == lines[-1]["accuracy"]
    assert [row["client"] for row in summary["client_metrics"]] == list(range(job.plan.clients))
    assert sum(row["records"] for row in summary["client_metrics"]) == sum(job.plan.sizes)
    assert list(summary["accuracy"]) == [str(t) for t in range(1, 9)]
    assert all(0 <= value <= 1 for value in summary["accuracy"].values())


def test_seeded_noise_says_so_and_secret_noise_is_certified(tmp_path):
    _, seeded, _ = finished(tmp_path / "a", rounds=2)
    assert not seeded["certified"]
    told = (tmp_path / "a" / "public" / "statement.md").read_text().split("## What is protected")[0]
    assert "seeded: not private" in told
    _, secret, _ = finished(tmp_path / "b", rounds=2, seed="none")
    finished(tmp_path / "c", rounds=2, seed="none")
    assert secret["certified"]
    assert "Certified: ε = 8" in (tmp_path / "b" / "public" / "statement.md").read_text()
    a, b = (load_model(tmp_path / name / "public" / "model.safetensors")[1] for name in "bc")
    assert not torch.equal(a, b)


def test_no_noise_is_not_private(tmp_path):
    _, cert, history = finished(tmp_path / "run", epsilon="inf")
    assert cert["epsilon"] is None
    assert history[-1]["epsilon"] is None
    assert not cert["certified"]
    assert "Not certified" in (tmp_path / "run" / "public" / "statement.md").read_text()
    assert verify_run(tmp_path / "run" / "public" / "certificate.json").problems == []


def test_a_directory_is_never_overwritten(tmp_path):
    finished(tmp_path / "run", rounds=2)
    before = (tmp_path / "run" / "public" / "certificate.json").read_bytes()
    with pytest.raises(SordinoError, match="not empty; resume it with"):
        finished(tmp_path / "run", rounds=3)
    assert (tmp_path / "run" / "public" / "certificate.json").read_bytes() == before


def test_the_ledger_has_one_row_for_equal_clients_and_pays_before_round_one(tmp_path):
    job = run.prepare(Spec.of({"method": "dp-fedgd", "seed": 1, "client_epsilon": {"3": 1.0}}))
    run.start(job, tmp_path / "run")
    next(run.rounds(job, tmp_path / "run"))
    with Ledger(tmp_path / "run" / "private" / "ledger.db") as ledger:
        rows = list(ledger.rows())
        assert [(row.who, row.times) for row in rows] == [("clients 0-2, 4-9", 70), ("clients 3", 70)]
        assert ledger.spent_epsilon("clients 3", 1e-5) == pytest.approx(1.0)
        assert ledger.spent_epsilon("clients 0-2, 4-9", 1e-5) == pytest.approx(8.0)


IMPORTS = """
from pathlib import Path
from sordino.training import artifacts, run
from sordino.training.folder import RunFolder
from sordino.training.spec import Spec
"""
RESUME = """
out = Path(sys.argv[1])
job = run.prepare(Spec.read(out / "public" / "spec.toml"))
place = RunFolder.find(out)
try:
    before, *_ = artifacts.restore(place, job.identity(place.keys().identity))
except Exception:  # no checkpoint yet
    before = 0
for line in run.rounds(job, out):
    if line["round"] > before:
        print(line["round"], flush=True)
"""


@pytest.mark.soak  # a random schedule of faults
def test_kill_nine_at_random_moments_and_resume(tmp_path, lives):
    """The resumed run ends with the very model, metrics and ledger of one that was never interrupted."""
    values = {"rounds": 40, "seed": 5, "method": "dp-fedadam", "tail": 0.5}
    job, cert, history = finished(tmp_path / "whole", **values)
    out = tmp_path / "killed"
    run.start(job, out)
    rng = random.Random(0)
    kills = 0
    process = lives(IMPORTS, RESUME, out)
    while True:
        process.begin()
        ended = "end" in (process.line() for _ in range(rng.randint(1, 18)))
        time.sleep(rng.random() * 0.004)
        shown = process.kill()
        if ended:
            break
        kills += 1
        done, _, _, stored = artifacts.restore(*where(job, out))
        assert len(stored) == done
        assert all(int(t) <= done for t in shown if t != "end"), "nothing is shown before it is stored"
        if done == 40:
            break
    assert kills >= 2
    again = list(run.rounds(job, out))
    resumed = run.finish(job, out, again)
    assert again == history
    assert torch.equal(*(load_model(d / "public" / "model.safetensors")[1] for d in (out, tmp_path / "whole")))
    own = {"ledger", "signature", "statement_sha256", "card_sha256"}  # they tell the ledger's head and the run's key
    assert {k: v for k, v in resumed.items() if k not in own} == {k: v for k, v in cert.items() if k not in own}
    assert resumed["ledger"]["rows"] == cert["ledger"]["rows"]
    assert verify_run(out / "public" / "certificate.json").problems == []


def test_a_run_goes_on_only_with_the_spec_and_data_it_began_with(tmp_path):
    """Else a certificate could promise epsilon 1 for rounds that had the noise of epsilon 8."""
    finished(tmp_path / "run", rounds=3)
    spec = tmp_path / "run" / "public" / "spec.toml"
    spec.write_text(spec.read_text().replace("epsilon = 8.0", "epsilon = 1.0"))
    job = run.prepare(Spec.read(spec))
    with pytest.raises(SordinoError, match=r"changed since round 3"):
        list(run.rounds(job, tmp_path / "run"))
    with pytest.raises(SordinoError, match=r"changed since round 3"):
        run.finish(job, tmp_path / "run", [])


def test_a_checkpoint_without_a_model_is_refused(tmp_path):
    job = run.prepare(Spec.of({"method": "dp-fedgd", "rounds": 3}))
    run.start(job, tmp_path / "run")
    place, identity = where(job, tmp_path / "run")
    for tree in ((), ((), ()), ((), (), ())):
        artifacts.store(place, identity, tree, {"round": 1})
        with pytest.raises(SordinoError, match=r"checkpoint.npz' is of round 1 and holds no model"):
            artifacts.restore(place, identity)
    artifacts.store(place, identity, (), None)
    assert artifacts.restore(place, identity).done == 0


def test_a_run_killed_before_it_paid_pays_when_it_resumes(tmp_path):
    job = run.prepare(Spec.of({"method": "dp-fedgd", "rounds": 3, "seed": 1}))
    run.start(job, tmp_path / "run")
    list(run.rounds(job, tmp_path / "run"))
    with Ledger(tmp_path / "run" / "private" / "ledger.db") as ledger:
        assert len(ledger) == 1
    list(run.rounds(job, tmp_path / "run"))
    with Ledger(tmp_path / "run" / "private" / "ledger.db") as ledger:
        assert len(ledger) == 1, "and only once"


def test_rounds_done_are_never_done_again(tmp_path):
    job, _, _ = finished(tmp_path / "run", rounds=3)
    (tmp_path / "run" / "private" / "checkpoint.npz").unlink()
    with pytest.raises(SordinoError, match=r"is missing, and the run was paid for already.*Start a new run"):
        list(run.rounds(job, tmp_path / "run"))
    (tmp_path / "run" / "public" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "public" / "model.safetensors").unlink()
    with pytest.raises(SordinoError, match="is missing, and the run was paid for already"):
        list(run.rounds(job, tmp_path / "run"))


def test_an_earlier_checkpoint_is_refused(tmp_path):
    """Else the rounds after it would be released twice, on one charge."""
    out = tmp_path / "run"
    job = run.prepare(Spec.of({"method": "dp-fedgd", "rounds": 4}))
    run.start(job, out)
    for line in run.rounds(job, out):
        if line["round"] == 2:
            shutil.copy(out / "private" / "checkpoint.npz", tmp_path / "early.npz")
    run.finish(job, out, [{"round": 4, "accuracy": 0.5, "epsilon": 8.0}])
    shutil.copy(tmp_path / "early.npz", out / "private" / "checkpoint.npz")
    with pytest.raises(SordinoError, match=r"holds round 2, and 4 rounds were stored"):
        list(run.rounds(job, out))


@pytest.mark.parametrize("change", ["edited", "swapped", "cut", "emptied", "not JSON", "missing"])
def test_metrics_that_the_run_did_not_write_are_refused(tmp_path, change):
    """Else a resumed run would sign them."""
    out = tmp_path / "run"
    job = run.prepare(Spec.of({"method": "dp-fedgd", "rounds": 4}))
    run.start(job, out)
    for line in run.rounds(job, out):
        if line["round"] == 3:
            break
    path = out / "public" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    changed = {
        "edited": [lines[0], json.dumps(json.loads(lines[1]) | {"accuracy": 0.999}) + "\n", lines[2]],
        "swapped": [lines[1], lines[0], lines[2]],
        "cut": lines[1:],
        "emptied": [],
        "not JSON": ["accuracy\n", *lines[1:]],
    }
    path.write_text("".join(changed.get(change, lines)))
    if change == "missing":
        path.unlink()
    for go_on in (lambda: next(run.rounds(job, out)), lambda: run.finish(job, out, [])):
        with pytest.raises(SordinoError, match=r"metrics.jsonl' does not hold the metrics of the 3 rounds.*put the"):
            go_on()
    path.write_text("".join(lines[:2]) + lines[2][:9])  # a kill may cut the last line, which the checkpoint holds
    history = list(run.rounds(job, out))
    assert [json.dumps(line) + "\n" for line in history[:3]] == lines
    path.write_text("".join([*lines, json.dumps(history[3] | {"accuracy": 0.999}) + "\n", "and more\n"]))
    run.finish(job, out, history)
    assert [json.loads(line) for line in path.read_text().splitlines()] == history, "what is signed is what was stored"
    assert verify_run(out).problems == []


@pytest.mark.parametrize("at", ["pay", "simulate.run"])
def test_a_kill_before_the_first_round_is_stored_releases_nothing_and_goes_on(tmp_path, monkeypatch, at):
    """Between the empty checkpoint and the charge, and between the charge and round 1."""
    out = tmp_path / "run"
    job = run.prepare(Spec.of({"method": "dp-fedgd", "rounds": 3}))
    run.start(job, out)

    def killed(*args, **keys):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"sordino.training.run.{at}", killed)
        with pytest.raises(KeyboardInterrupt):
            list(run.rounds(job, out))
    assert (out / "public" / "metrics.jsonl").exists() is (at == "simulate.run")
    assert [line["round"] for line in run.rounds(job, out)] == [1, 2, 3]
    with Ledger(out / "private" / "ledger.db") as ledger:
        assert len(ledger) == 1


def test_a_charge_whose_checkpoint_is_gone_is_refused_even_if_no_round_was_shown(tmp_path):
    out = tmp_path / "run"
    job = run.prepare(Spec.of({"method": "dp-fedgd", "rounds": 3}))
    run.start(job, out)
    with Ledger(out / "private" / "ledger.db") as ledger:
        run.pay(job, ledger, where(job, out)[1])
    with pytest.raises(SordinoError, match="second model on one charge"):
        list(run.rounds(job, out))


def test_what_the_chain_is_made_of_cannot_be_guessed_from_data(tmp_path):
    """The published head hashes the identity of the data: without the key of the run it tells nothing of them."""
    heads = set()
    for name in ("a", "b"):
        job, cert, _ = finished(tmp_path / name, rounds=2, schedule_seed=7)
        place = RunFolder.find(tmp_path / name)
        with Ledger(place.private / "ledger.db") as ledger:
            plans = {row.plan for row in ledger.rows()}
        assert plans == {job.identity(place.keys().identity)}
        assert job._digest.hex() not in (place.private / "ledger.db").read_bytes().decode("latin-1")
        assert job.identity(bytes(32)) not in plans
        heads.add((cert["ledger"]["head"], *plans))
    assert len(heads) == 2, "the same spec and data under another key"
    unkeyed = job._digest.hex()
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert unkeyed not in path.read_bytes().decode("latin-1"), path


def test_two_processes_do_not_share_a_directory(tmp_path):
    job = run.prepare(Spec.of({"method": "dp-fedsofim", "rounds": 3, "seed": 1}))
    run.start(job, tmp_path / "run")
    first = run.rounds(job, tmp_path / "run")
    next(first)
    with pytest.raises(SordinoError, match="another process is training"):
        next(run.rounds(job, tmp_path / "run"))
    assert len(list(first)) == 2


def test_other_data_of_the_same_sizes_are_refused(tmp_path):
    job, _, _ = finished(tmp_path / "run", rounds=2)
    other = replace(job, records=replace(job.records, x=job.records.x + 1))
    with pytest.raises(SordinoError, match="the data changed"):
        list(run.rounds(other, tmp_path / "run"))


def test_private_figures_of_real_clients_are_not_told(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "d.npz", x=rng.normal(size=(90, 2)), y=rng.integers(0, 2, 90), client=np.repeat(["a", "b", "c"], 30)
    )
    job, cert, history = finished(
        tmp_path / "run", data=str(tmp_path / "d.npz"), partition="by-site", rounds=2, seed=None
    )
    told = run.summary(job, cert, history, None)
    assert "heterogeneity" not in told
    assert "seconds" not in told
    assert told["client_names"] == ["a", "b", "c"]
    assert "0: a; 1: b; 2: c." in (tmp_path / "run" / "public" / "statement.md").read_text()
    with pytest.raises(SordinoError, match="clients: 7, but the data hold 3 clients"):
        run.prepare(Spec.of({"data": str(tmp_path / "d.npz"), "partition": "by-site", "clients": 7}))


def test_a_client_level_certificate_does_not_tell_the_sizes(tmp_path):
    _, cert, _ = finished(tmp_path / "run", unit="client", rounds=2, sizes="lognormal", partition="iid", seed="none")
    assert cert["records"] is None
    assert all(group["records"] is None for group in cert["groups"])
    assert "1,438" not in (tmp_path / "run" / "public" / "statement.md").read_text()
    assert verify_run(tmp_path / "run" / "public" / "certificate.json").problems == []


def test_verify_catches_what_was_changed(tmp_path):
    finished(tmp_path / "run", seed="none", trust="secure-aggregation", divisor="client-mean", rounds=5, clients=3)
    path = tmp_path / "run" / "public" / "certificate.json"
    good = json.loads(path.read_text())
    assert verify_run(path).problems == []

    def problems(change):
        """Without its signature, which any change would break."""
        bad = json.loads(json.dumps(good))
        change(bad)
        bad.pop("signature", None)
        path.write_text(json.dumps(bad))
        found = verify_run(path).problems
        path.write_text(json.dumps(good))
        return found

    assert problems(lambda c: c.update(epsilon=c["epsilon"] * 0.99))
    assert not [p for p in problems(lambda c: c.pop("signature")) if "sign" in p], "a gap, and no problem"
    assert problems(lambda c: c.update(epsilon=c["epsilon"] * (1 + 1e-5)))
    assert problems(lambda c: c["groups"][-1].update(epsilon=c["groups"][-1]["epsilon"] / 2))
    assert problems(lambda c: [r.update(std=2 * r["std"]) for g in c["groups"] for r in g["releases"]])
    assert problems(lambda c: [r.update(times=r["times"] - 1) for g in c["groups"] for r in g["releases"]])
    assert problems(lambda c: [r.update(sensitivity=r["sensitivity"] / 2) for g in c["groups"] for r in g["releases"]])
    assert problems(lambda c: c.update(clip=1.0, queries=[{**c["queries"][0], "clip": 2.0}]))
    assert problems(lambda c: c.update(queries=[{**c["queries"][0], "joint": 2}]))
    assert problems(lambda c: c.update(queries=[{**c["queries"][0], "calls": 2}]))
    assert problems(lambda c: c.update(trust="untrusted-server"))
    assert problems(lambda c: c.update(unit="client"))
    assert problems(lambda c: c.update(adjacency="add-remove"))
    assert problems(lambda c: c.update(clip=0.1))
    assert problems(lambda c: c.update(noise=3 * c["noise"]))
    assert problems(lambda c: c.update(client_noise=3 * c["client_noise"]))
    assert problems(lambda c: c.update(records=100 * c["records"]))
    assert problems(lambda c: c.update(rounds=4))
    assert problems(lambda c: c.update(delta=1e-4))
    assert problems(lambda c: c.update(mu=0.01))
    assert problems(lambda c: c.update(assumes=[]))
    assert problems(lambda c: c.update(method="dp-fedgd"))
    assert problems(lambda c: c["ledger"].update(rows=0, head=""))
    assert problems(lambda c: c["epsilon_at"].update({"1e-08": 0.1}))
    assert problems(lambda c: c.update(noise_source="seeded"))
    assert problems(lambda c: c.update(clients=99))
    assert problems(lambda c: c.update(spec_sha256="0" * 64))
    assert problems(lambda c: c["ledger"].update(head="0" * 64))
    assert problems(lambda c: c["ledger"].update(rows=c["ledger"]["rows"] + 1))
    with pytest.raises(SordinoError, match="the field 'groups' is missing, so this is no certificate"):
        problems(lambda c: c.pop("groups"))

    # Consistent in itself, but not with the spec and the ledger beside it.
    def as_if_louder(cert):
        job = run.prepare(Spec.read(tmp_path / "run" / "public" / "spec.toml"))
        quiet = replace(job.plan, privacy=replace(job.plan.privacy, epsilon=1.0))
        cert.update({**certificate(quiet, job.source, version="0"), **{k: cert[k] for k in ("spec_sha256", "ledger")}})

    found = problems(as_if_louder)
    assert any("epsilon_asked: the certificate says 1, the plan of spec.toml gives 8" in each for each in found)
    assert any("the ledger" in problem for problem in found)


def test_predict_gives_back_what_the_run_measured(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(300, 3)).astype(np.float32), rng.integers(0, 2, 300)
    x[:, 0] += 2 * y
    names = np.array(["healthy", "ill"])[y]
    table = "\n".join(f"{a},{b},{c},{label}" for (a, b, c), label in zip(x, names, strict=True))
    (tmp_path / "data.csv").write_text("age,dose,weight,label\n" + table + "\n")
    np.savez(tmp_path / "public.npz", mean=np.ones(3), cov=np.eye(3) * 2, n=10)
    stats = str(tmp_path / "public.npz")
    job, _, history = finished(
        tmp_path / "run",
        data=str(tmp_path / "data.csv"),
        clients=3,
        public_stats=stats,
        normalize="clip:3",
        model="logistic",
    )
    assert "auc" in history[-1]
    assert history[-1]["auc"] > 0.5
    labels, classes, scores = predict(tmp_path / "run", str(tmp_path / "data.csv"))
    assert classes == ["healthy", "ill"]
    assert len(labels) == 300
    assert set(labels) <= {"healthy", "ill"}
    assert np.allclose(np.sum(scores, 1), 1)
    theta = load_model(tmp_path / "run" / "public" / "model.safetensors")[1]
    direct = job.model.predict(theta, torch.from_numpy(job.dataset.x_test))
    held_out = {tuple(np.round(row, 4)) for row in job.dataset.x_test}
    assert float((direct == torch.from_numpy(job.dataset.y_test)).float().mean()) == pytest.approx(
        history[-1]["accuracy"]
    )
    assert len(held_out) == len(direct)
    (tmp_path / "short.csv").write_text("age,dose\n1,2\n")
    with pytest.raises(SordinoError, match="lacks the columns"):
        predict(tmp_path / "run", str(tmp_path / "short.csv"))


def test_regression_runs_and_reports_mean_squared_error(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=(x @ [1, -1, 0.5]).astype(np.float32))
    _, _, history = finished(
        tmp_path / "run",
        data=str(tmp_path / "data.npz"),
        method="dp-fedgd",
        partition="iid",
        clients=2,
        epsilon=50.0,
        lr=0.3,
    )
    assert history[-1]["mse"] < history[0]["mse"]
    values, classes, scores = predict(tmp_path / "run", str(tmp_path / "data.npz"))
    assert (classes, scores) == ([], [])
    assert len(values) == 400


def test_auto_needs_a_public_range_of_quantities(tmp_path):
    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=x, y=x.sum(1))
    with pytest.raises(SordinoError, match="method: auto learns a quantity within a public range"):
        run.prepare(Spec.of({"data": str(tmp_path / "data.npz"), "partition": "iid"}))


def test_model_must_fit_labels(tmp_path):
    with pytest.raises(SordinoError, match="logistic is for two classes, but the data have 10"):
        run.prepare(Spec.of({"model": "logistic"}))
    with pytest.raises(SordinoError, match="squares does not fit"):
        run.prepare(Spec.of({"model": "squares"}))
    with pytest.raises(SordinoError, match="2 weights for 10 classes"):
        run.prepare(Spec.of({"class_weights": [1.0, 2.0]}))


def test_auc_is_the_share_of_ordered_pairs():
    from sordino.models.linear import Linear, Loss

    model = Linear(1, 1, Loss.LOGISTIC, bias=False)
    x, y = torch.tensor([[0.1], [0.4], [0.35], [0.8]]), torch.tensor([0, 0, 1, 1])
    assert evaluate(model, torch.ones(1), x, y)["auc"] == pytest.approx(0.75)
    assert evaluate(model, -torch.ones(1), x, y)["auc"] == pytest.approx(0.25)


# ------------------------------------------------------------------------------------------------ private and open data


@pytest.fixture
def patients(tmp_path):
    """90 records of nine clinics in a file."""
    rng = np.random.default_rng(0)
    x, client = rng.normal(size=(90, 2)), np.repeat([f"clinic-{k}" for k in range(9)], 10)
    x[:, 0] = np.arange(90)  # every record can be told
    np.savez(tmp_path / "d.npz", x=x, y=rng.integers(0, 2, 90), client=client)
    return str(tmp_path / "d.npz")


@pytest.mark.parametrize("partition", tiers(["dirichlet", "counts:counts.csv", "dirichlet:0.1", "classes:1"], 2))
def test_a_partition_by_labels_is_not_certified_on_private_data(tmp_path, patients, partition, monkeypatch):
    monkeypatch.chdir(tmp_path)
    y = resolve(Spec.of({"data": patients})).read_data().y_train
    (tmp_path / "counts.csv").write_text(f"client,class_0,class_1\n0,{(y == 0).sum()},0\n1,0,{(y == 1).sum()}\n")
    values = {"data": patients, "partition": partition, "method": "dp-fedgd", "rounds": 2}
    values |= {} if partition.startswith("counts") else {"clients": 2}
    with pytest.raises(SordinoError, match=r"reads the labels.*Use partition = iid or by-column:NAME.*public_data"):
        run.prepare(Spec.of(values))
    _, cert, _ = finished(tmp_path / "doubtful", **{**values, "seed": "none", "uncertified": True})
    assert not cert["certified"]
    assert "reads the labels" in cert["reasons"][0]
    assert verify_run(tmp_path / "doubtful").problems == []
    _, cert, _ = finished(tmp_path / "declared", **{**values, "seed": "none", "public_data": True})
    assert cert["certified"]
    assert cert["execution"] == "simulation on data declared public"
    assert any("Clients are simulated" in line for line in cert["assumes"])
    assert verify_run(tmp_path / "declared").problems == []
    finished(tmp_path / "seeded", **values)  # says of itself that it is not certified


def test_benchmark_data_are_a_simulation_and_files_are_not(tmp_path, patients):
    _, cert, _ = finished(tmp_path / "a", seed="none", rounds=2)
    assert (cert["certified"], cert["execution"]) == (True, "simulation on benchmark data")
    assert "This was a simulation on benchmark data" in (tmp_path / "a" / "public" / "statement.md").read_text()
    _, cert, _ = finished(tmp_path / "b", seed="none", rounds=2, data=patients, partition="iid", clients=3)
    assert (cert["certified"], cert["execution"]) == (True, "simulated on one machine")
    np.savez(tmp_path / "digits.npz", x=np.zeros((2, 2)), y=[0, 1])
    for name, benchmark in (("digits", True), ("synthetic(1,1)", True), ("a9a", True), ("mnist", True), ("sst2", True)):
        assert resolve(Spec.of({"data": name})).source.benchmark is benchmark
    for name in (str(tmp_path / "digits.npz"), "digits.csv", "given", "patients"):
        assert not resolve(Spec.of({"data": name})).source.benchmark


def test_whole_clients_are_held_out_at_client_level(tmp_path, patients):
    """Test figures of some of a protected client's records would be a release that nobody pays for."""
    values = {"data": patients, "partition": "by-site", "method": "dp-fedgd", "rounds": 2}
    job = run.prepare(Spec.of({**values, "unit": "client"}))
    trained, tested = (set(part[:, 0].astype(int) // 10) for part in (job.dataset.x_train, job.dataset.x_test))
    assert not trained & tested
    assert (len(trained), len(tested), job.plan.clients) == (7, 2, 7)
    others = [
        resolve(Spec.of({**values, "unit": "client", "split_seed": seed})).read_data().x_test[:, 0] for seed in range(6)
    ]
    assert len({tuple(sorted(other)) for other in others}) >= 4, "by split_seed"
    mixed = run.prepare(Spec.of(values))
    assert {int(row) // 10 for row in mixed.dataset.x_test[:, 0]} <= set(range(9))
    assert mixed.plan.clients == 9, "at record level by position, out of every client"
    few = run.prepare(Spec.of({**values, "unit": "client", "test_fraction": 0.75}))
    assert few.plan.clients == 2
    with pytest.raises(SordinoError, match=r"test_fraction: 0.9 of 9 clients, held out as a whole, leaves 1"):
        run.prepare(Spec.of({**values, "unit": "client", "test_fraction": 0.9}))
    _, cert, _ = finished(tmp_path / "run", **{**values, "unit": "client", "seed": "none"})
    assert any("clients held out as a whole" in line for line in cert["assumes"])
    assert verify_run(tmp_path / "run").problems == []


@pytest.mark.parametrize("unit", ["record", "person", "client"])
@pytest.mark.parametrize("partition", ["iid", "by-site", "dirichlet", "classes:2", "counts:counts.csv"])
@pytest.mark.parametrize("how", ["private", "public_data", "uncertified", "benchmark"])
def test_clients_made_of_private_records_are_not_certified_as_clients(tmp_path, unit, partition, how, monkeypatch):
    """Metrics are multiples of one over the number of test records, hence tell that of all records."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    client, person = np.repeat([f"clinic-{k}" for k in range(9)], 10), np.repeat(np.arange(45), 2)
    np.savez("d.npz", x=rng.normal(size=(90, 2)), y=rng.integers(0, 2, 90), client=client, person=person)
    (tmp_path / "counts.csv").write_text("client,class_0,class_1\n0,9,4\n1,4,9\n")
    if how == "benchmark" and (unit == "person" or partition in ("by-site", "counts:counts.csv")):
        pytest.skip("benchmarks have neither sites nor persons")
    labels = partition in ("dirichlet", "classes:2", "counts:counts.csv")
    if unit == "person" and labels:
        pytest.skip("persons are not divided by labels")
    values = {"data": "digits" if how == "benchmark" else "d.npz", "partition": partition, "unit": unit}
    values |= {"method": "dp-fedgd", "rounds": 2} | ({how: True} if how in ("public_data", "uncertified") else {})
    values |= {} if partition in ("by-site", "counts:counts.csv") else {"clients": 5 if how == "benchmark" else 2}
    values |= {"person": "person"} if unit == "person" else {}
    made_of_clients, is_open = unit == "client" and partition != "by-site", how in ("public_data", "benchmark")
    sound = is_open or not (labels or made_of_clients)
    if how == "private" and not sound:
        remedy = "Use partition = by-column:NAME .*or unit = record" if unit == "client" else "Use partition = iid or"
        with pytest.raises(SordinoError, match=rf"^partition: .*{remedy}.*public_data.*uncertified = true"):
            run.prepare(Spec.of(values))
        return
    _, cert, _ = finished(tmp_path / "run", **{**values, "seed": "none"})
    assert cert["certified"] is sound
    assert any("metrics tell how many records there are" in why for why in cert["reasons"]) is (
        made_of_clients and not is_open
    )
    assert verify_run(tmp_path / "run").problems == []
    if not sound:  # who drops the word from the spec is found out
        spec = tmp_path / "run" / "public" / "spec.toml"
        path = spec.with_name("certificate.json")
        forged = json.loads(path.read_text()) | {"certified": True, "reasons": []}
        path.write_text(json.dumps(forged))
        spec.write_text(spec.read_text().replace("uncertified = true\n", ""))
        assert any("certified" in problem for problem in verify_run(tmp_path / "run").problems)


def test_metrics_at_client_level_tell_the_records_of_whole_clients_alone(tmp_path):
    """Other records of a client that is trained on leave the test records as they are."""
    rng, values = np.random.default_rng(0), {"partition": "by-site", "unit": "client", "method": "dp-fedgd"}

    def clinics(sizes):
        client, n = np.repeat([f"clinic-{k}" for k in range(9)], sizes), sum(sizes)
        np.savez(tmp_path / "d.npz", x=rng.random((n, 2)), y=rng.integers(0, 2, n), client=client)
        return run.prepare(Spec.of({**values, "data": str(tmp_path / "d.npz")})).dataset

    even = clinics([10] * 9)
    trained = int(even.site[0].removeprefix("clinic-"))
    more = clinics([17 if k == trained else 10 for k in range(9)])
    assert (len(even.y_test), len(more.y_test), len(more.y_train) - len(even.y_train)) == (20, 20, 7)


def test_a_constant_guess_is_no_better_than_a_constant_guess(tmp_path):
    """0.9 in float32 is more than in float64."""
    from sordino.models.linear import Linear

    job = run.prepare(Spec.of({"seed": 1}))
    y = np.array([0] * 9 + [1])
    job = replace(job, dataset=job.dataset._replace(x_test=np.zeros((10, 2), np.float32), y_test=y))
    model = Linear(2, 2, "softmax")
    scores = evaluate(model, torch.zeros(model.size), torch.zeros(10, 2), torch.from_numpy(y))
    assert scores["accuracy"] == 0.9
    assert not beats_constant_guess(job.dataset, scores)
    assert beats_constant_guess(job.dataset, {"accuracy": 1.0})


def test_how_long_a_run_took_is_private(tmp_path):
    _, _, history = finished(tmp_path / "run", rounds=3)
    assert not any("seconds" in line for line in history)
    timings = [json.loads(line) for line in (tmp_path / "run" / "private" / "timings.jsonl").read_text().splitlines()]
    assert [line["round"] for line in timings] == [1, 2, 3]
    assert artifacts.total_seconds(RunFolder.find(tmp_path / "run")) == timings[-1]["seconds"] > 0


def test_a_run_of_integers_keeps_its_promise_resumes_and_is_verified(tmp_path):
    settings = {"method": "auto", "trust": "secure-aggregation", "integers": True, "dropouts": 1, "clients": 4}
    job, cert, history = finished(tmp_path / "run", **settings)
    assert job.records.x.dtype == torch.float64
    assert cert["secure"] | {"epsilon_server": 0} == {"dropouts": 1, "colluders": 1, "honest": 2, "epsilon_server": 0}
    assert [query["dimension"] for query in cert["queries"]] == [65 * 66 // 2, 650, 650]
    verdict = verify_run(tmp_path / "run")
    assert verdict.problems == []
    assert any("lengths of the answers" in gap for gap in verdict.gaps)
    assert cert["epsilon"] <= 8
    real, *_ = finished(tmp_path / "real", **{k: v for k, v in settings.items() if k not in ("integers", "dropouts")})
    assert real.plan.integers is None
    again = run.prepare(run.reopen(tmp_path / "run"))
    assert list(run.rounds(again, tmp_path / "run")) == history  # all of it is stored


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"integers": True}, "need secure-aggregation"),
        ({"dropouts": 1}, "belongs to sums of integers"),
        ({"integers": True, "trust": "secure-aggregation", "clients": 2}, "no better than untrusted-server"),
        ({"integers": True, "trust": "secure-aggregation", "participation": "fixed:3"}, "full participation"),
    ],
)
def test_integers_that_no_federation_would_add_up_are_refused(values, why):
    with pytest.raises(SordinoError, match=why):
        run.prepare(Spec.of({"clients": 4, **values}))


def test_runs_side_by_side_do_not_pretend_to_add_up_integers():
    resolved = resolve(Spec.of({"integers": True, "trust": "secure-aggregation"}))
    with pytest.raises(SordinoError, match="only sordino run"):
        resolved.plan((10,) * 4)

"""`sordino run --private-statistics`: ranges from noised counts, as the first round of the plan."""

import json
import math
import tomllib

import numpy as np
import pytest
import torch
from scipy.special import expit

from sordino.cli import main
from sordino.core import Kind, Privacy, Shard, Trust
from sordino.data.columns import Number
from sordino.data.schema import Schema
from sordino.errors import SordinoError
from sordino.evidence.ledger import Ledger
from sordino.federation.terms import federated
from sordino.methods import build
from sordino.methods.tally import after_tally
from sordino.models.tally import ColumnTally
from sordino.privacy import calibration, spending
from sordino.privacy.plan import Plan
from sordino.training import run
from sordino.training.batch import run_many
from sordino.training.folder import RunFolder
from sordino.training.predict import load_run
from sordino.training.private_statistics import (
    covering,
    edge,
    found_schema,
    frequent,
    rough,
    shortest,
    statistics_tally,
)
from sordino.training.spec import Spec
from sordino.training.verify_run import verify_run
from tests.support import DIED

SCHEMA = f"""
{DIED}[columns.age]
type = "number"
within = [-1000, 1000]
[columns.income]
type = "number"
within = [0, 10000000]
log = true
[columns.ward]
type = "category"
levels = ["a", "b"]
"""


def table(path, n=3000, seed=0):
    rng = np.random.default_rng(seed)
    age, income = rng.uniform(20, 90, n), np.exp(rng.normal(8, 0.5, n))
    died = rng.random(n) < expit((age - 60) / 8)
    ages = ["" if k % 50 == 0 else f"{a:.1f}" for k, a in enumerate(age)]
    rows = [
        f"{a},{i:.0f},{'ab'[k % 2]},{'yes' if y else 'no'}"
        for k, (a, i, y) in enumerate(zip(ages, income, died, strict=True))
    ]
    path.write_text("\n".join(["age,income,ward,died", *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("statistics")
    (place / "schema.toml").write_text(SCHEMA)
    table(place / "data.csv")
    return place


def words(place, *more, rounds=4, share="0.1", schema="schema.toml"):
    first = ["run", "--data", str(place / "data.csv"), "--schema", str(place / schema), "--clients", "3"]
    first += ["--method", "dp-fedadam", "--rounds", str(rounds), "--epsilon", "4"]
    return [*first, *(["--private-statistics", share] if share else []), *more]


@pytest.mark.parametrize("trust", list(Trust))
def test_ranges_are_found_paid_for_and_verified(place, tmp_path, trust):
    out = tmp_path / "run"
    assert main(words(place, "--trust", trust, "--out", str(out))) == 0
    found = Schema.read(out / "public" / "schema.toml")
    assert found.unknown == []
    (low, high), (poor, rich) = found.columns["age"].range, found.columns["income"].range
    assert -1000 <= low < high <= 1000
    assert 0 <= poor < rich <= 10_000_000
    cert = json.loads((out / "public" / "certificate.json").read_text())
    assert cert["certified"]
    assert cert["epsilon"] == pytest.approx(4.0, abs=1e-6), "the total stays what was asked for"
    assert [query["query"] for query in cert["queries"]] == ["0.0 tally", "1.0 gradient"]
    assert cert["rounds"] == 5
    for group in cert["groups"]:
        costs = {r["query"]: r["times"] * (r["sensitivity"] / r["std"]) ** 2 for r in group["releases"]}
        assert costs["0.0 tally"] / sum(costs.values()) == pytest.approx(0.1)
    assert any("noised counts" in fact and "age, income" in fact for fact in cert["assumes"])
    assert "table of counts" in (out / "public" / "statement.md").read_text()
    verdict = verify_run(out)
    assert (verdict.problems, verdict.gaps) == ([], [])
    with Ledger(out / "private" / "ledger.db", read_only=True) as ledger:
        assert "0.0 tally" in {row.query for row in ledger.rows()}
    lines = [json.loads(line) for line in (out / "public" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
    assert set(lines[0]) == {"round", "epsilon"}
    assert load_run(out).predict(str(place / "data.csv")).shape == (3000,)


@pytest.mark.parametrize("trust", list(Trust))
def test_ranges_hold_most_records_and_little_else(place, tmp_path, trust):
    """With a seed: one noisy cell in some hundreds widens a range, which fresh noise would show now and then."""
    out = tmp_path / "run"
    assert main(words(place, "--trust", trust, "--seed", "1", "--out", str(out))) == 0
    found = Schema.read(out / "public" / "schema.toml")
    (low, high), (poor, rich) = found.columns["age"].range, found.columns["income"].range
    assert -120 <= low <= 35
    assert 75 <= high <= 220
    assert 50 <= poor <= 3000
    assert rich >= 5000
    # Where every client adds noise, ranges are rough.
    assert rich <= 3_000_000 or trust is Trust.UNTRUSTED_SERVER


def test_a_smaller_share_in_the_spec_than_in_the_certificate_is_found(place, tmp_path):
    out = tmp_path / "run"
    assert main(words(place, "--out", str(out))) == 0
    spec = out / "public" / "spec.toml"
    spec.write_text(spec.read_text().replace("private_statistics = 0.1", "private_statistics = 0.2"))
    assert any("the plan of spec.toml gives" in problem for problem in verify_run(out).problems)


def test_a_changed_range_is_found(place, tmp_path):
    out = tmp_path / "run"
    assert main(words(place, "--out", str(out))) == 0
    path = out / "public" / "schema.toml"
    found = Schema.read(path)
    path.write_text(found.with_ranges({"age": (0.0, 1.0)}).toml())
    assert any("schema.toml is not the one" in problem for problem in verify_run(out).problems)


def prepared(place, out, **more):
    values = {"data": str(place / "data.csv"), "schema": str(place / "schema.toml"), "clients": 3, "rounds": 3}
    values |= {"method": "dp-fedadam", "private_statistics": 0.1, **more}
    made = run.prepare(Spec.of(values))
    run.start(made, out)
    return made


def test_a_run_is_resumed_with_the_ranges_that_it_found(place, tmp_path):
    first = prepared(place, tmp_path / "run")
    first = run.release_statistics(first, tmp_path / "run")
    text = (tmp_path / "run" / "public" / "schema.toml").read_text()
    steps = run.rounds(first, tmp_path / "run")
    for _ in range(2):  # the line of the statistics, and one round
        next(steps)
    steps.close()
    again = run.prepare(run.reopen(tmp_path / "run"))
    again = run.release_statistics(again, tmp_path / "run")
    assert (tmp_path / "run" / "public" / "schema.toml").read_text() == text
    history = list(run.rounds(again, tmp_path / "run"))
    assert [line["round"] for line in history] == [1, 2, 3, 4]
    assert run.finish(again, tmp_path / "run", history)["certified"]
    assert verify_run(tmp_path / "run").problems == []


def killed(*_, **__):
    raise KeyboardInterrupt


# Where a kill may fall, in order: what is patched to raise, and whether counts may be drawn again after it.
MOMENTS = {
    "before the charge": ("pay", True),
    "between charge and count": ("count", True),
    "between count and private schema": ("files.write", True),
    "between private schema and checkpoint": ("prepare_resolved", False),
    "between checkpoint and its mark": ("Ledger.mark", False),
    "between checkpoint and public schema": ("artifacts.add_timing", False),
    "after the count": ("", False),
}
STORED = [moment for moment, (_, again) in MOMENTS.items() if not again]


def begun(place, out, moment):
    """A run that was killed at a moment of its count."""
    first = prepared(place, out)
    with pytest.MonkeyPatch.context() as patch:
        if MOMENTS[moment][0]:
            patch.setattr(f"sordino.training.run.{MOMENTS[moment][0]}", killed)
            with pytest.raises(KeyboardInterrupt):
                run.release_statistics(first, out)
        else:
            run.release_statistics(first, out)
    return out


def resumed(out):
    """A run after its statistics, and how often they were counted."""
    counted, count = [], run.count
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "count", lambda *args: (counted.append(1), count(*args))[1])
        again = run.release_statistics(run.prepare(run.reopen(out)), out)
    return again, len(counted)


def ended(again, out):
    """The certificate of a run after its last round, which agrees with all files."""
    history = list(run.rounds(again, out))
    assert [line["round"] for line in history] == [1, 2, 3, 4]
    cert = run.finish(again, out, history)
    assert verify_run(out).problems == []
    with Ledger(out / "private" / "ledger.db", read_only=True) as ledger:
        assert [row.query for row in ledger.rows()] == ["0.0 tally", "1.0 gradient"], "paid for once"
    return cert


@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_kill_releases_counts_once(place, tmp_path, moment):
    """Counts are drawn again only where nothing of them was stored, so that nothing was shown."""
    out = begun(place, tmp_path / "run", moment)
    kept = (out / "private" / "schema.toml").read_text()
    shown = (out / "public" / "schema.toml").read_text()
    anew = MOMENTS[moment][1]
    assert bool(Schema.read(out / "private" / "schema.toml").unknown) is anew
    if anew:
        assert shown == kept, "nothing was shown"
    again, counted = resumed(out)
    assert counted == anew
    assert anew or (out / "private" / "schema.toml").read_text() == kept
    assert again.dataset.schema.unknown == []
    assert (out / "public" / "schema.toml").read_bytes() == (out / "private" / "schema.toml").read_bytes()
    assert ended(again, out)["certified"]


@pytest.mark.parametrize("moment", STORED)
@pytest.mark.parametrize("change", ["reset", "missing"])
def test_a_public_schema_without_its_ranges_is_written_again_and_nothing_is_counted(place, tmp_path, moment, change):
    out = begun(place, tmp_path / "run", moment)
    kept, copy = (out / "private" / "schema.toml").read_text(), out / "public" / "schema.toml"
    copy.write_text(Schema.read(place / "schema.toml").toml())
    if change == "missing":
        copy.unlink()
    for _ in range(2):
        again, counted = resumed(out)
        assert counted == 0, "fresh noise would be a second release on one charge"
        assert copy.read_text() == kept
    assert ended(again, out)["certified"]


@pytest.mark.parametrize("moment", list(MOMENTS))
def test_an_edited_public_schema_is_refused(place, tmp_path, moment):
    """Else the statement would say of any range that it follows from noised counts."""
    out = begun(place, tmp_path / "run", moment)
    copy = out / "public" / "schema.toml"
    ranges = {"age": (20.0, 90.0), "income": (1.0, 2.0)}
    for edited in (ranges, {"age": (20.0, 90.0), "income": None}):
        copy.write_text(Schema.read(out / "private" / "schema.toml").with_ranges(edited).toml())
        with pytest.raises(
            SordinoError, match=r"public/schema.toml' changed since the run wrote it.*; delete the chang"
        ):
            resumed(out)
    copy.unlink()
    assert ended(resumed(out)[0], out)["certified"]


def test_an_edit_of_the_public_schema_between_rounds_is_refused_or_undone(place, tmp_path):
    out = tmp_path / "run"
    first = run.release_statistics(prepared(place, out), out)
    copy, steps = out / "public" / "schema.toml", run.rounds(first, out)
    kept = copy.read_text()
    for _ in range(2):  # the line of the statistics, and one round
        next(steps)
    steps.close()
    copy.write_text(first.dataset.schema.with_ranges({"age": (20.0, 90.0)}).toml())
    with pytest.raises(SordinoError, match="changed since the run wrote it"):
        next(run.rounds(first, out))
    copy.unlink()
    history = list(run.rounds(first, out))
    copy.write_text(first.dataset.schema.with_ranges({"age": (20.0, 90.0)}).toml())
    run.finish(first, out, history)
    assert copy.read_text() == kept, "the certificate names what the run went on with"
    assert verify_run(out).problems == []


def test_a_run_does_not_go_on_with_ranges_that_it_did_not_find(place, tmp_path):
    """The identity of a run leaves ranges out, because it is the same before and after they were found."""
    out = tmp_path / "run"
    run.release_statistics(prepared(place, out), out)
    other = Schema.read(out / "public" / "schema.toml").with_ranges({"age": (20.0, 90.0)})
    (tmp_path / "other.toml").write_text(other.toml())
    made = run.prepare(Spec.of({**RunFolder.of(out).settings(), "schema": str(tmp_path / "other.toml")}))
    with pytest.raises(SordinoError, match="which it goes on with; read the spec by reopen"):
        next(run.rounds(made, out))
    with pytest.raises(SordinoError, match="which it goes on with; read the spec by reopen"):
        run.finish(made, out, [])
    again = run.release_statistics(made, out)
    assert again.dataset.schema == Schema.read(out / "private" / "schema.toml")


def test_a_lost_private_schema_is_refused(place, tmp_path):
    out = begun(place, tmp_path / "run", "after the count")
    kept = out / "private" / "schema.toml"
    kept.write_text(Schema.read(place / "schema.toml").toml())
    with pytest.raises(SordinoError, match=r"public/schema.toml' changed"):
        resumed(out)
    (out / "public" / "schema.toml").unlink()
    with pytest.raises(SordinoError, match=r"lacks age, which round 1 found.*counting again would release it twice"):
        resumed(out)
    kept.unlink()
    with pytest.raises(SordinoError, match=r"private/schema.toml' is missing.*; put it back, or start a new run"):
        resumed(out)


@pytest.mark.parametrize("column", ["age", "income"])
def test_ranges_that_people_wrote_are_not_certified_as_found(place, tmp_path, column):
    """A schema that needs no counts was never counted, and its statement would say that it was."""
    for ranges in ({column: (20.0, 90.0)}, {"age": (20.0, 90.0), "income": (1.0, 2.0)}):
        text = Schema.read(place / "schema.toml").with_ranges(ranges).toml()
        (tmp_path / "schema.toml").write_text(text)
        spec = {"data": str(place / "data.csv"), "schema": str(tmp_path / "schema.toml"), "private_statistics": 0.1}
        made = run.prepare(Spec.of({**spec, "clients": 3, "method": "dp-fedadam", "rounds": 3}))
        with pytest.raises(SordinoError, match="private_statistics: the schema has ranges, levels or shares already"):
            run.start(made, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_rounds_without_ranges_are_refused(place, tmp_path):
    with pytest.raises(SordinoError, match="ranges are not found yet"):
        next(run.rounds(prepared(place, tmp_path / "run"), tmp_path / "run"))


@pytest.mark.parametrize("method", ["auto", "dp-fedsofim", "dp-fedfc"])
@pytest.mark.parametrize("trust", list(Trust))
def test_the_total_stays_epsilon_for_methods_of_several_stages(method, trust):
    tally = ColumnTally(3, (("a", 0, False), ("b", 1, False)))
    plain = build(method)
    for share in (0.02, 0.3):
        both = after_tally(plain, tally, share)
        plan = Plan(both, 70 + 1, (200, 400), Privacy(2.0, trust=trust), uncertified=True)
        assert spending.epsilon(plan) == pytest.approx(2.0, rel=1e-6)
        (group, *_) = spending.groups(plan)
        parts = {r.query: r.times * (r.sensitivity / r.std) ** 2 for r in group.releases}
        assert parts["0.0 tally"] / sum(parts.values()) == pytest.approx(share)
        assert {pair[0].value for pair in both.proves} <= {"record", "person"}
        assert both.stages[0].queries[0].kind is Kind.TALLY
        assert calibration.query_noises(plan)[0].query.bound is not None


def test_rare_levels_of_a_category_are_merged(place, tmp_path):
    """The levels that noised counts do not find rare are kept; others fall under `other`."""
    rng = np.random.default_rng(3)
    lines = (place / "data.csv").read_text().splitlines()
    wards = rng.choice(["a", "b", "c", "d"], size=len(lines) - 1, p=[0.6, 0.3975, 0.002, 0.0005])
    moved = [
        ",".join([*line.split(",")[:2], ward, line.split(",")[3]]) for line, ward in zip(lines[1:], wards, strict=True)
    ]
    (tmp_path / "data.csv").write_text("\n".join([lines[0], *moved]) + "\n")
    text = SCHEMA.replace('levels = ["a", "b"]', 'candidates = ["d", "b", "nobody", "a", "c"]')
    (tmp_path / "schema.toml").write_text(text)
    out = tmp_path / "run"
    assert main(words(tmp_path, "--out", str(out))) == 0
    found = Schema.read(out / "public" / "schema.toml")
    assert found.columns["ward"].levels == ("b", "a")
    assert found.features[-4:] == ["ward = b", "ward = a", "ward = other", "ward = missing"]
    assert found.without_ranges == Schema.of(tomllib.loads(text))
    cert = json.loads((out / "public" / "certificate.json").read_text())
    assert cert["certified"]
    assert any("the levels of ward that are kept" in fact for fact in cert["assumes"])
    assert verify_run(out).problems == []
    assert load_run(out).predict(str(tmp_path / "data.csv")).shape == (3000,)


def test_levels_below_their_noise_are_not_kept():
    assert frequent(("a", "b", "c"), np.array([0.5, 0.02, 0.004]), 0.001) == ("a", "b")
    assert frequent(("a", "b", "c"), np.array([0.5, 0.02, 0.004]), 0.01) == ("a",)
    assert frequent(("a", "b"), np.array([-0.1, 0.001]), 0.1) == ("b",), "one level is left"


@pytest.mark.parametrize(
    ("about", "complaint"),
    [
        ({"candidates": ["a", "a"]}, "candidates: a level stands there twice"),
        ({"candidates": ["a"], "levels": ["b"]}, "'b' is none of the candidates"),
        ({}, "levels: list at least 1"),
    ],
)
def test_wrong_candidates_are_refused(about, complaint):
    with pytest.raises(SordinoError, match=complaint):
        Schema.of({"columns": {"ward": {"type": "category", **about}}})


def test_a_category_without_levels_encodes_nothing():
    schema = Schema.of({"columns": {"ward": {"type": "category", "candidates": ["a", "b"]}}})
    with pytest.raises(SordinoError, match="no public range or levels yet"):
        schema.encode({"ward": ["a"]}, target=False)
    tally = statistics_tally(schema)
    x = schema.at_its_widest.encode({"ward": ["b", "b", None, "z"]}, target=False).x
    shard = Shard(torch.from_numpy(x), torch.zeros(4), torch.ones(4).double())
    assert tally.tally_sum(torch.zeros(1), shard, tally.clip).tolist() == [0, 2], "other and missing are not counted"


@pytest.mark.parametrize("unit", ["record", "person"])
def test_persons_pay_for_statistics_as_records_do(place, tmp_path, unit):
    lines = (place / "data.csv").read_text().splitlines()
    text = "\n".join([f"{lines[0]},patient", *(f"{line},p{k // 3}" for k, line in enumerate(lines[1:]))]) + "\n"
    (tmp_path / "data.csv").write_text(text)
    (tmp_path / "schema.toml").write_text('person = "patient"\n' + SCHEMA)
    out = tmp_path / "run"
    assert main(words(tmp_path, "--unit", unit, "--out", str(out))) == 0
    cert = json.loads((out / "public" / "certificate.json").read_text())
    assert (cert["unit"], cert["certified"]) == (unit, True)
    assert verify_run(out).problems == []
    assert Schema.read(out / "public" / "schema.toml").unknown == []


# ------------------------------------------------------------------------------------------------------- wrong inputs


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (["--private-statistics", "0"], "must lie in (0, 0.5]"),
        (["--private-statistics", "0.9"], "must lie in (0, 0.5]"),
        (["--private-statistics", "much"], "private_statistics"),
        (["--private-statistics", "0.1", "--unit", "client"], "nothing is proved for unit = client"),
        (["--private-statistics", "0.1", "--batch", "poisson:16"], "batch: the bound of"),
        ([], "columns.age: it has no public range"),
    ],
)
def test_wrong_inputs_get_one_line(place, tmp_path, capsys, more, complaint):
    assert main(words(place, *more, "--out", str(tmp_path / "r"), share=None)) == 2
    assert complaint in capsys.readouterr().err


def test_without_a_schema_or_without_within_it_is_refused(place, tmp_path, capsys):
    plain = SCHEMA.replace("within", "range")
    (place / "plain.toml").write_text(plain)
    assert main(words(place, "--out", str(tmp_path / "r"), schema="plain.toml")) == 2
    assert "the schema has none" in capsys.readouterr().err
    with pytest.raises(SordinoError, match="there is no schema"):
        run.prepare(Spec.of({"data": "digits", "private_statistics": 0.1}))


def test_records_in_memory_sweeps_and_federations_are_refused(place):
    spec = Spec.of({"data": str(place / "data.csv"), "schema": str(place / "schema.toml"), "private_statistics": 0.1})
    whole = run.prepare(spec).dataset
    with pytest.raises(SordinoError, match="in memory already"):
        run.prepare(spec, whole)
    with pytest.raises(SordinoError, match="by sordino run alone"):
        run_many([spec])
    with pytest.raises(SordinoError, match="a federation finds ranges in a run of its own"):
        federated({"private_statistics": 0.1})


@pytest.mark.parametrize(
    ("about", "complaint"),
    [
        ({"within": [5, 5]}, r"within: .* two numbers"),
        ({"within": [0, 10], "mean": 1, "std": 1}, "nothing is left to find"),
        ({"within": [0, 10], "range": [-1, 5]}, "must lie within"),
        ({"within": [0]}, "must be two numbers"),
        ({}, "give either a public range"),
    ],
)
def test_a_wrong_within_is_refused(about, complaint):
    with pytest.raises(SordinoError, match=complaint):
        Schema.of({"columns": {"age": {"type": "number", **about}}})


def test_a_schema_without_ranges_encodes_nothing():
    schema = Schema.of({"columns": {"age": {"type": "number", "within": [0, 10]}}})
    with pytest.raises(SordinoError, match="no public range"):
        schema.encode({"age": [1.0]}, target=False)
    assert schema.at_its_widest.encode({"age": [10.0]}, target=False).x.tolist() == [[1.0, 0.0]]
    assert Schema.of(schema.at_its_widest.values()).without_ranges == schema, "what was written is found again"


# ---------------------------------------------------------------------------------------------------- from the counts


def test_the_shortest_interval_holds_nearly_all():
    shares = np.zeros(64)
    shares[20:30] = 0.1
    assert shortest(shares, 1e-4) == (20, 30)
    rng = np.random.default_rng(0)
    low, high = shortest(shares + 0.003 * rng.normal(size=64), 0.003)
    assert 19 <= low <= 21
    assert 29 <= high <= 31


@pytest.mark.parametrize("std", [1.0, 10.0])
def test_noise_that_hides_everything_keeps_the_wide_range(std):
    assert shortest(std * np.random.default_rng(1).normal(size=64), std) == (0, 64)
    assert shortest(np.zeros(64), std) == (0, 64)


def test_records_beside_the_shortest_interval_extend_the_range():
    """With noise of 1 % per bin, the shortest interval leaves out more than the range does."""
    rng, bins = np.random.default_rng(2), np.arange(64)
    shares = np.exp(-((bins - 30) ** 2) / 72)
    shares /= shares.sum()
    outside, before = [], []
    for _ in range(40):
        noised = shares + 0.01 * rng.normal(size=64)
        for interval, left in ((covering, outside), (shortest, before)):
            low, high = interval(noised, 0.01)
            left.append(1 - shares[low:high].sum())
    assert np.mean(outside) < 0.06 < 0.08 < np.mean(before)
    few = np.zeros(64)
    few[[10, 60]] = 0.97, 0.03
    assert covering(few, 1e-5)[1] == 61, "the shortest interval that leaves out 2 % reaches both"
    few[[10, 60]] = 0.985, 0.015
    assert covering(few, 1e-5) == (10, 11), "records far away do not widen a range beyond three times its width"


def test_a_run_says_that_its_ranges_are_rough(place, tmp_path, capsys):
    assert main(words(place, "--out", str(tmp_path / "few"), share="0.001", rounds=1)) == 0
    assert "WARNING: the found ranges are rough (age, income)" in capsys.readouterr().out.replace("\n", " ")
    tally = ColumnTally(1, (("a", 0, False),))
    assert rough(tally, 0.02 / 8.1, 1000) is None
    assert "(21 of 1,000)" in rough(tally, 0.021 / 8, 1000)
    assert rough(ColumnTally(1, ()), 1.0, 1000) is None, "levels have a rule of their own"


def test_a_point_mass_is_a_range_of_one_bin():
    shares = np.zeros(64)
    shares[7] = 1.0
    assert shortest(shares, 1e-4) == (7, 8)


def test_edges_follow_the_scale_of_the_column():
    even, log = Number(within=(0.0, 640.0)), Number(within=(0.0, 640.0), log=True)
    assert [edge(even, k, 64) for k in (0, 1, 64)] == [0.0, 10.0, 640.0]
    assert edge(log, 32, 64) == pytest.approx(math.sqrt(641) - 1, rel=1e-5)
    tally = ColumnTally(2, (("x", 0, True),))
    schema = Schema.of({"columns": {"x": {"type": "number", "within": [0, 640], "log": True}}})
    x = schema.at_its_widest.encode({"x": [20.0, None]}, target=False).x
    shard = Shard(torch.from_numpy(x), torch.zeros(2), torch.ones(2).double())
    counts = tally.tally_sum(torch.zeros(1), shard, tally.clip)
    assert float(counts.sum()) == 1, "a missing value is not counted"
    found = found_schema(schema, tally, counts.numpy(), 1e-6)
    low, high = found.columns["x"].range
    assert low <= 20 <= high

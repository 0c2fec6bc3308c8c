"""Persons in data: how their records are laid out, held out and dealt to clients."""

import numpy as np
import pytest
import torch

from sordino import Dataset, Linear, Plan, Privacy, build, source, split
from sordino.data.arrays import unit_numbers
from sordino.data.records import Lazy, Records, check_person_clients, person_rows, rows_of
from sordino.data.sources import load
from sordino.data.splits import generator, hold_out_persons
from sordino.engines import reference, simulate
from sordino.engines.schedule import record_choice
from sordino.errors import SordinoError
from sordino.privacy.mechanisms.random import Secure, Seeded
from sordino.training.run import prepare
from sordino.training.spec import Spec

CLIENT = np.array([1, 0, 0, 1, 0, 1, 0, -1])
PERSON = np.array([5, 7, 2, 5, 7, 9, 7, 7])


def test_rows_of_persons_lie_together_and_more_than_the_most_are_left_out():
    rows, starts = person_rows(CLIENT, PERSON, 2)
    assert rows.tolist() == [2, -1, 1, 4, 0, 3, 5, -1]  # person 2, then 7 (its third is left out), then 5 and 9
    assert starts.tolist() == [0, 4, 8]
    held = Records.of(np.arange(16.0).reshape(8, 2), np.arange(8.0), CLIENT, person=PERSON, per_person=2)
    assert held.sizes == (2, 2)
    assert held.filled.tolist() == [True, False, True, True, True, True, True, False]
    assert held.shard(0).x[:, 0].tolist() == [4, 0, 2, 8]
    assert held.shard(1).mask.tolist() == [1, 1, 1, 0]
    assert held.shard(0).per_person == 2


def drawn(source):
    return record_choice(source, Privacy(unit="person", person_choice="random"))


def test_records_drawn_at_random_are_a_uniform_choice_within_each_person():
    client, person = np.zeros(6, int), np.array([0, 0, 0, 0, 1, 1])
    counts = np.zeros(6)
    for seed in range(600):
        rows, _ = person_rows(client, person, 2, drawn(Seeded(seed)))
        assert set(person[rows[:2]]) == {0}
        assert sorted(rows[2:]) == [4, 5], "a person with few records keeps all of them"
        counts[rows] += 1
    assert np.abs(counts[:4] - 300).max() < 4 * np.sqrt(600 / 4), counts
    rows, _ = person_rows(client, person, 2, drawn(Secure()))
    assert len(set(rows)) == 4


def test_the_choice_within_one_person_does_not_depend_on_others():
    """The draw of a record has an address of its own: another number of records of person 0 changes nothing for 1."""
    person = np.array([1, 1, 1, 1, 0, 0, 0])
    alone, _ = person_rows(np.zeros(4, int), person[:4], 2, drawn(Seeded(5)))
    both, _ = person_rows(np.zeros(7, int), person, 2, drawn(Seeded(5)))
    assert set(alone) == set(both[2:])


def test_a_person_has_one_weight():
    held = Records.of(np.zeros((8, 2)), np.arange(8.0), CLIENT, person=PERSON, per_person=3)
    weighted = held.fused(np.arange(2), np.array([0.5, 1.0]))
    assert weighted.person_weights().tolist() == [0.5, 0.5, 1, 1]


def test_minibatches_and_batches_hold_whole_persons():
    held = Records.of(np.arange(16.0).reshape(8, 2), np.arange(8.0), CLIENT, person=PERSON, per_person=2)
    assert rows_of(np.array([1, -1]), 2).tolist() == [2, 3, -1, -1]
    shard = held.picked(np.array([0, 1]), [np.array([1, -1]), np.array([-1, 0])])
    assert shard.x[:, :, 0].tolist() == [[2, 8, 0, 0], [0, 0, 0, 6]]
    assert shard.mask.tolist() == [[1, 1, 0, 0], [0, 0, 1, 1]]
    ((clients, batch),) = held.buckets(np.array([0, 1]))
    assert clients.tolist() == [0, 1]
    assert batch.mask.tolist() == [[1, 0, 1, 1], [1, 1, 1, 0]]


def test_the_grouping_must_be_that_of_the_promise():
    x, y, client = np.zeros((4, 2)), np.zeros(4), np.zeros(4, int)
    plain, grouped = Records.of(x, y, client), Records.of(x, y, client, person=np.arange(4), per_person=2)
    person = Privacy(unit="person", person_records=2)
    plain.check_unit(Privacy())
    grouped.check_unit(person)
    for held, privacy in ((plain, person), (grouped, Privacy()), (grouped, Privacy(unit="person", person_records=3))):
        with pytest.raises(SordinoError, match=r"^person: records are"):
            held.check_unit(privacy)
    with pytest.raises(SordinoError, match=r"^person: records are not grouped"):
        Lazy.of([2], lambda i: (torch.ones(2, 4), torch.zeros(2))).check_unit(person)


@pytest.mark.parametrize(("person", "most"), [(PERSON, 1), (np.minimum(PERSON, 5), 2), (0 * PERSON + 2**62, 2)])
def test_records_know_at_how_many_clients_a_person_is(person, most):
    held = Records.of(np.zeros((8, 2)), np.zeros(8, int), CLIENT, person=person, per_person=2)
    assert held.person_clients == most


@pytest.mark.parametrize("engine", [reference, simulate])
def test_persons_at_several_clients_need_a_promise_that_says_so(engine):
    """With one client promised, an epsilon of 1 was certified where a person at five clients had 2.4."""
    client, person = np.arange(100) % 5, np.arange(100) // 5
    held = Records.of(np.eye(100)[:, :3], client % 2, client, person=person, per_person=1)

    def run(most):
        promise = Privacy(1.0, unit="person", person_records=1, person_clients=most)
        plan = Plan(build("dp-fedgd", "person"), 1, held.sizes, promise)
        return next(engine.run(plan, Linear(3, 2), held, source(1)))

    with pytest.raises(SordinoError, match=r"^person_clients: a person has records at 5 clients, and the plan"):
        run(4)
    assert run(5).t == 0


@pytest.mark.parametrize("filled", [torch.full((4,), 5), torch.full((4,), -1.0)])
def test_rows_are_filled_or_not(filled):
    """A 5 in place of True multiplied a clipped term by 5, and the run was certified."""
    with pytest.raises(SordinoError, match=r"^filled: of type"):
        Records(torch.zeros(4, 2), torch.zeros(4), np.array([0, 4]), filled)


def test_a_person_at_more_clients_than_declared_is_refused():
    with pytest.raises(
        SordinoError, match=r"1 person has records at more than 1 client, one at 2.*--set person_clients=2.*per-client"
    ):
        check_person_clients(np.array([0, 1, 1]), np.array([4, 4, 5]), 1)
    check_person_clients(np.array([0, 1, 1]), np.array([4, 4, 5]), 2)
    check_person_clients(np.array([0, -1, 1]), np.array([4, 4, 5]), 1)  # a record that is left out counts nowhere


def test_persons_are_held_out_as_a_whole():
    person = np.repeat(np.arange(100), 1 + np.arange(100) % 5)
    whose = person % 3
    out = hold_out_persons(whose, person, 0.2, generator(0, "hold out"))
    parts = {who: set(out[person == who]) for who in range(100)}
    assert all(len(part) == 1 for part in parts.values())
    assert sum(True in part for part in parts.values()) == 20


def test_iid_deals_persons(tmp_path):
    person = np.repeat(np.arange(40), 1 + np.arange(40) % 3)
    n = len(person)
    data = Dataset(
        "t", np.zeros((n, 2)), np.arange(n) % 2, np.zeros((1, 2)), np.zeros(1), None, ("0", "1"), person=person
    )
    client = split(data, "iid", 4, by_person=True)
    assert all(len(set(client[person == who])) == 1 for who in range(40))
    sizes = [len(set(person[client == i])) for i in range(4)]
    assert sizes == [10, 10, 10, 10]
    with pytest.raises(SordinoError, match=r"^partition: 'dirichlet' deals records, not persons"):
        split(data, "dirichlet:1", 4, by_person=True)
    with pytest.raises(SordinoError, match=r"^person: the data do not say"):
        split(data._replace(person=None), "iid", 4, by_person=True)


def write(path, text):
    path.write_text(text)
    return str(path)


def test_a_person_column_is_no_feature(tmp_path):
    rows = "\n".join(f"{k % 7},{k},{k % 2}" for k in range(40))
    data = load(write(tmp_path / "t.csv", f"who,a,label\n{rows}\n"), person="who")
    assert data.features == ("a",)
    assert len(set(data.person.tolist())) in (5, 6)
    np.savez(tmp_path / "t.npz", x=np.arange(20.0).reshape(10, 2), y=np.arange(10) % 2, who=np.arange(10) % 5)
    data = load(str(tmp_path / "t.npz"), person="who")
    assert len(data.person) == len(data.y_train)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"person": "whom"}, r"^person: .* has no column 'whom'"),
        ({"person": "label"}, r"^person: 'label' is the label column already"),
        ({"person": "a", "client": "a"}, r"^person: 'a' is the client column already"),
    ],
)
def test_wrong_person_columns(tmp_path, arguments, message):
    path = write(tmp_path / "t.csv", "who,a,b,label\n1,2,3,0\n2,3,4,1\n1,2,5,0\n2,2,2,1\n")
    with pytest.raises(SordinoError, match=message):
        load(path, **arguments)


def test_other_wrong_persons(tmp_path):
    with pytest.raises(SordinoError, match=r"^person: 1 entries of column 'who' are missing"):
        load(write(tmp_path / "t.csv", "who,a,label\n1,2,0\n,3,1\nb,2,0\n"), person="who")
    with pytest.raises(SordinoError, match=r"^person: 'digits' has no columns"):
        load("digits", person="who")
    np.savez(tmp_path / "t.npz", x=np.zeros((4, 2)), y=np.arange(4) % 2, who=np.zeros((4, 2)))
    with pytest.raises(SordinoError, match=r"^person: the array has shape"):
        load(str(tmp_path / "t.npz"), person="who")
    with pytest.raises(SordinoError, match=r"^person: .* has no array 'whom'"):
        load(str(tmp_path / "t.npz"), person="whom")
    with pytest.raises(SordinoError, match=r"^person: give one whole number per record"):
        Records.of(np.zeros((2, 2)), np.zeros(2), np.zeros(2, int), person=np.array([0.5, 1]), per_person=2)
    for most in (0, 1001):
        with pytest.raises(SordinoError, match=r"^person_records: "):
            Privacy(unit="person", person_records=most)
    with pytest.raises(SordinoError, match=r"^person_clients: 2 clients per person need unit = person"):
        Privacy(person_clients=2)
    with pytest.raises(SordinoError, match=r"^client_epsilon: a person may be at several clients"):
        Privacy(unit="person", person_clients=2, client_epsilon={0: 0.5})


def renamed(tmp_path, old, new, **settings):
    """The runs that are prepared from a table, and from the one in which one unit has another name."""
    numbers = np.random.default_rng(0).normal(size=80).tolist()
    names = np.repeat([f"n{k:02d}" for k in range(40)], 2)
    prepared = []
    for who in (names, np.where(names == old, new, names)):
        rows = [f"{a!r},{int(a > 0)},{name}" for a, name in zip(numbers, who, strict=True)]
        path = write(tmp_path / f"{len(prepared)}.csv", "\n".join(["a,label,who", *rows, ""]))
        prepared.append(prepare(Spec.of({"data": path, "rounds": 2, "method": "dp-fedgd", **settings})))
    return prepared


@pytest.mark.parametrize("new", ["a", "n200", "zz"])
def test_the_name_of_a_person_decides_nothing_about_others(tmp_path, new):
    one, two = renamed(tmp_path, "n07", new, person="who", clients=4)
    assert np.array_equal(one.dataset.x_test, two.dataset.x_test)
    assert torch.equal(one.records.x, two.records.x)


@pytest.mark.parametrize("new", ["35", "45", "999"])
def test_the_id_of_a_person_decides_nothing_about_persons_of_other_clients_with_ids_of_their_own(tmp_path, new):
    """Clinic a numbers 30 persons, clinic b 50. A person of a gets an id that b has, too, or has no more."""
    prepared, rng = [], np.random.default_rng(0)
    rows = [("a", str(k)) for k in range(30)] + [("b", str(k)) for k in range(50)]
    numbers = rng.normal(size=(len(rows), 2)).tolist()
    for first in ("0", new):
        lines = ["a,label,site,who"]
        for (site, who), pair in zip(rows, numbers, strict=True):
            named = first if (site, who) == ("a", "0") else who
            lines += [f"{a!r},{int(a > 0)},{site},{named}" for a in pair]
        path = write(tmp_path / f"{first}.csv", "\n".join([*lines, ""]))
        keys = {"person": "who", "unit": "person", "person_ids": "per-client", "partition": "by-column:site"}
        prepared.append(prepare(Spec.of({"data": path, "rounds": 2, "method": "dp-fedgd", **keys})))
    one, two = prepared
    assert np.array_equal(one.dataset.x_test, two.dataset.x_test)
    assert one.plan.sizes == two.plan.sizes
    assert torch.equal(one.records.x, two.records.x)


def test_at_which_client_a_person_comes_first_decides_nothing_about_others(tmp_path):
    """A person at two clinics is exchanged for one who was at the other first."""
    numbers, prepared = np.random.default_rng(0).normal(size=19).tolist(), []
    for k, (first, last) in enumerate((("a", "b"), ("b", "a"))):
        sites = [first, *("ab"[n > 4] for n in range(17)), last]
        names = ["both", *(f"n{n}" for n in range(17)), "both"]
        rows = [f"{a!r},{int(a > 0)},{site},{who}" for a, site, who in zip(numbers, sites, names, strict=True)]
        path = write(tmp_path / f"{k}.csv", "\n".join(["a,label,site,who", *rows, ""]))
        keys = {"person": "who", "person_clients": 2, "partition": "by-column:site", "test_fraction": 0.1}
        prepared.append(prepare(Spec.of({"data": path, "rounds": 2, "method": "dp-fedgd", **keys})))
    one, two = prepared
    assert one.plan.sizes == two.plan.sizes
    assert np.array_equal(one.dataset.x_test, two.dataset.x_test)


def test_a_column_of_clients_that_makes_none_decides_nothing_about_others(tmp_path):
    schema = '[target]\ncolumn = "label"\nlevels = ["0", "1"]\n[columns.a]\ntype = "number"\nrange = [-4, 4]\n'
    numbers, prepared = np.random.default_rng(0).normal(size=9).tolist(), []
    write(tmp_path / "schema.toml", f'client = "site"\n{schema}')
    for first in "ab":
        sites = [first, *("ab"[n % 2] for n in range(1, 9))]
        rows = [f"{a!r},{int(a > 0)},{site}" for a, site in zip(numbers, sites, strict=True)]
        path = write(tmp_path / f"{first}.csv", "\n".join(["a,label,site", *rows, ""]))
        keys = {"schema": str(tmp_path / "schema.toml"), "partition": "iid", "clients": 2, "test_fraction": 0.3}
        prepared.append(prepare(Spec.of({"data": path, "rounds": 2, "method": "dp-fedgd", **keys})))
    one, two = prepared
    assert np.array_equal(one.dataset.x_test, two.dataset.x_test)
    assert torch.equal(one.records.x, two.records.x)


@pytest.mark.parametrize("new", ["n31", "new"])
def test_whose_a_single_record_is_decides_nothing_about_others_where_records_are_protected(tmp_path, new):
    """Test records are held out one by one then: with whole persons, sizes would tell whose one record is."""
    prepared, numbers = [], np.random.default_rng(0).normal(size=90).tolist()
    for first in ("n00", new):
        names = [first, *(f"n{k // 2:02d}" for k in range(2, 91))]
        rows = [f"{a!r},{int(a > 0)},{name}" for a, name in zip(numbers, names, strict=True)]
        path = write(tmp_path / f"{first}.csv", "\n".join(["a,label,who", *rows, ""]))
        keys = {"person": "who", "unit": "record", "method": "dp-fedgd", "clients": 4}
        prepared.append(prepare(Spec.of({"data": path, "rounds": 2, **keys})))
    one, two = prepared
    assert one.plan.sizes == two.plan.sizes
    assert np.array_equal(one.dataset.x_test, two.dataset.x_test)
    assert torch.equal(one.records.x, two.records.x)


@pytest.mark.parametrize("new", ["a", "n200", "zz"])
def test_the_name_of_a_client_decides_nothing_about_others_where_it_is_hidden(tmp_path, new):
    one, two = renamed(tmp_path, "n07", new, partition="by-column:who", unit="client")
    assert np.array_equal(one.dataset.x_test, two.dataset.x_test)
    assert torch.equal(one.records.x, two.records.x)


@pytest.mark.parametrize(
    "spellings",
    [
        ["p1", "P1", " p1\t", "p\u200b1", "\ufeffp1", "\uff50\uff11"],
        ["7", "007", "7.0", "+7", "\u0667", "\u06f7.0"],
        ["Mu\u0308ller", "M\u00fcller", "MÜLLER"],
    ],
)
def test_spellings_of_a_name_are_one_person(spellings):
    assert unit_numbers(np.array(["other", *spellings])).tolist() == [0, *[1] * len(spellings)]


def test_other_names_are_other_persons():
    assert unit_numbers(np.array(["b", "a", "12e5", "1200000", "0", "", "a1"])).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert unit_numbers(np.array([9, 2, 9, -2])).tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize(
    "spellings",
    [["100000", "1e+05", "1E+5", "100000.0"], ["-7", "-7.0", "-07", "-7."], [0.0, -0.0], ["1.5", "1.50", "01.5"]],
)
def test_numbers_that_programs_write_in_several_ways_are_one_unit(spellings):
    """R writes 100000 as 1e+05, and a column with missing cells writes -7 as -7.0. Two units are protected half."""
    assert unit_numbers(np.array(spellings)).tolist() == [0] * len(spellings)


def test_a_client_spelt_in_two_ways_is_one_where_clients_are_protected(tmp_path):
    rows = [f"{k / 40},{k % 2},{'Ward' if k % 4 < 2 else ' ward'} {k // 8}" for k in range(80)]
    path = write(tmp_path / "t.csv", "\n".join(["a,label,who", *rows, ""]))
    asked = {"data": path, "rounds": 2, "method": "dp-fedgd", "unit": "client", "partition": "by-column:who"}
    assert prepare(Spec.of(asked)).plan.clients == 8, "of 10 clients, 2 are for testing"


def test_a_person_spelt_in_two_ways_is_one_unit_of_a_run(tmp_path):
    rows = [f"{k / 40},{k % 2},{'P' if k % 4 < 2 else ' p'}{k // 4:03d}" for k in range(80)]
    path = write(tmp_path / "t.csv", "\n".join(["a,label,who", *rows, ""]))
    run = prepare(Spec.of({"data": str(path), "rounds": 2, "method": "dp-fedgd", "person": "who", "clients": 4}))
    assert sum(run.plan.sizes) == 16, "of 20 persons, 4 are for testing"

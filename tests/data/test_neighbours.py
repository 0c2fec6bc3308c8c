"""Neighbouring tables: what one record, person or client says decides nothing about the others, nor anything public.

Each case changes every column of one unit, cell by cell, and compares all that no noise hides: who is held out, which
client and which row each other record gets, its encoded values, the sizes, the spec, and the certificate.
"""

import csv
import json
from itertools import product

import numpy as np
import pytest

from sordino.data.schema import Schema
from sordino.errors import SordinoError
from sordino.estimators import FederatedClassifier
from sordino.evidence.certificate import certificate
from sordino.federation.config import SiteConfig
from sordino.federation.site_data import SiteData
from sordino.training.run import prepare
from sordino.training.spec import Spec

ROWS = 48
SCHEMA = {
    "target": {"column": "label", "levels": ["0", "1"]},
    "columns": {
        "row": {"type": "number", "range": [0, ROWS]},
        "dose": {"type": "number", "range": [0, 10], "log": True},
        "drug": {"type": "category", "levels": ["u", "v", "w"]},
        "when": {"type": "date", "range": ["2020-01-01", "2021-01-01"]},
    },
}
# None of these is another spelling of a name that the table has, which would make one unit of two.
CELLS = {
    "dose": ["1e30", "-0.0", "1000000000000000001", "3.5"],
    "drug": ["w", "none", 'ü,"\n'],
    "when": ["1990-01-01", "2020-06-30"],
    "label": ["0", "1"],
    "who": ["zz", "7", "1.5", "٧"],
    "where": ["aaa", "zz", "7"],
}
BY_CLIENT = {"partition": "by-column:where"}
IID = {"partition": "iid", "clients": 3}
PERSON = {"person": "who", "unit": "person"}
RECORD = {"person": "who", "unit": "record"}
CLIENT = {**BY_CLIENT, "unit": "client", "test_fraction": 0.4}
CASES = {  # the columns that name a unit; keys of the run
    "records": ((), IID),
    "records of persons": ((), {**IID, **RECORD}),
    "records of persons at clients": ((), {**BY_CLIENT, **RECORD}),
    "persons": (("who",), {**IID, **PERSON}),
    "persons of clients": (("who", "where"), {**BY_CLIENT, **PERSON, "person_ids": "per-client"}),
    "persons at several clients": (("who",), {**BY_CLIENT, **PERSON, "person_clients": 4}),
    "clients": (("where",), CLIENT),
    "clients of persons": (("where",), {**CLIENT, "person": "who"}),
}


def cells():
    rows = range(ROWS)
    return {
        "row": [str(k) for k in rows],
        "dose": [str(7 * k % 11) for k in rows],
        "drug": ["uvw"[k % 3] for k in rows],
        "when": [f"2020-01-{1 + k % 28:02d}" for k in rows],
        "label": [str(k // 2 % 2) for k in rows],
        "who": [f"p{5 * k % 17}" for k in rows],
        "where": [f"c{k // 3 % 4}" for k in rows],
    }


def neighbours(unit, *, fixed_clients=True):
    """Tables with other cells for the records of one unit, and the places of its records.

    unit: the columns that name it; none for a record.
    fixed_clients: the number of units of each client is public, so that a record or a person stays at its client.
    """
    table = cells()
    names = unit or ("row",)
    whose = list(zip(*(table[name] for name in names), strict=True))
    mine = [k for k in range(ROWS) if whose[k] == whose[17]]
    for who in sorted({*table["who"]}) if unit == ("who",) else []:  # the same clients, another of them first
        places = [k for k in range(ROWS) if table["who"][k] == who]
        turned = dict(zip(places, [table["where"][k] for k in reversed(places)], strict=True))
        yield {**table, "where": [turned.get(k, old) for k, old in enumerate(table["where"])]}, places
    for name, others in CELLS.items():
        if name == "where" and fixed_clients and unit != ("where",):
            continue
        if name == names[0] == "who" and len(names) > 1:  # also an id that a person of another client has
            here = {who for who, client in whose if client == whose[17][1]}
            others = [*others, *sorted({*table["who"]} - here)[:3]]
        for cell, places in product(others, [mine, mine[-1:]]):
            if name in names and places != mine:
                continue
            yield {**table, name: [cell if k in places else old for k, old in enumerate(table[name])]}, mine


def write(path, table):
    """A table as .csv, .parquet, .xlsx or .npz; only text files and workbooks spell their cells."""
    numbers = {name: list(map(float, table[name])) for name in ("row", "dose")}
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([table, *zip(*table.values(), strict=True)])
    elif path.suffix == ".npz":
        x = np.array([numbers["row"], numbers["dose"]]).T
        roles = {"who": np.array(table["who"]), "where": np.array(table["where"])}
        np.savez(path, x=x, y=np.array(table["label"]), client=roles["where"], **roles)
    elif path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({**table, **numbers}), path)
    else:
        workbook = pytest.importorskip("openpyxl").Workbook()
        for row in [table, *zip(*{**table, **numbers}.values(), strict=True)]:
            workbook.active.append(list(row))
        workbook.save(path)
    return str(path)


def told(run, mine):
    """What is not noised of a prepared run, without the records of the unit."""
    plan, data, records = run.plan, run.dataset, run.records
    public = plan.privacy.unit.sizes_public
    facts = {"names": run.names, "assumes": run.resolved.assumptions, "tested": len(data.y_test) if public else None}
    cert = json.dumps(certificate(plan, run.source, version="0", **facts), sort_keys=True)
    order = records.x[:, 0].double().numpy()  # the first feature numbers the rows
    trained = np.setdiff1d(np.arange(ROWS), data.tested)
    number = dict(zip(data.x_train[:, 0].tolist(), trained.tolist(), strict=True))
    filled = np.ones(len(order), bool) if records.filled is None else records.filled.numpy()
    whose = [number[value] if full else -1 for value, full in zip(order.tolist(), filled, strict=True)]
    rows = [(k, row.tolist(), label) for k, row, label in zip(whose, records.x, records.y.tolist(), strict=True)]
    others = [(place, *row) for place, row in enumerate(rows) if row[0] not in (-1, *mine)]
    keep = ~np.isin(data.tested, mine)
    return {
        "certificate": cert,
        "spec": run.resolved.portable.toml(),
        "features": (data.features, data.classes),
        "tested": data.tested.tolist(),
        "starts": records.starts.tolist(),
        "rows": others,
        "test": (data.x_test[keep].tolist(), data.y_test[keep].tolist()),
    }


def compare(unit, prepared, values):
    """Prepare the table and its neighbours, and compare. A table that is refused tells no more than that."""
    before = prepared(cells())
    compared = 0
    for table, mine in neighbours(unit, fixed_clients=values["partition"] != "iid"):
        try:
            after = prepared(table)
        except SordinoError:
            continue
        compared += 1
        expected, found = told(before, mine), told(after, mine)
        assert [key for key in expected if expected[key] != found[key]] == []
    assert compared > 10


def run_of(values):
    fixed = {"method": "dp-fedgd", "rounds": 2, "noise": 1.0, "schedule_seed": 1, "normalize": "none"}
    return prepare(Spec.of({**fixed, **values}))


@pytest.mark.parametrize("case", CASES)
def test_no_unit_decides_about_others_in_a_described_table(tmp_path, case):
    unit, values = CASES[case]
    by_client, person = values["partition"] != "iid", "person" in values
    roles = ({"client": "where"} if by_client else {}) | ({"person": "who"} if person else {})
    free = {name: {"type": "drop"} for name in {"who", "where"} - {*roles.values()}}
    schema = Schema.of({**SCHEMA, **roles, "columns": {**SCHEMA["columns"], **free}})
    (tmp_path / "schema.toml").write_text(schema.toml())
    rest = {key: value for key, value in values.items() if key != "person" and (key != "partition" or not by_client)}
    described = {**rest, "schema": str(tmp_path / "schema.toml")}
    compare(unit, lambda table: run_of({**described, "data": write(tmp_path / "t.csv", table)}), values)


@pytest.mark.parametrize(
    ("suffix", "case"),
    [
        *product([".csv"], ["records of persons", "persons at several clients", "clients of persons"]),
        *product([".npz"], ["records", "persons", "persons of clients"]),
        (".parquet", "records of persons at clients"),
        (".xlsx", "persons of clients"),
    ],
)
def test_no_unit_decides_about_others_in_a_file_without_a_schema(tmp_path, suffix, case):
    unit, values = CASES[case]
    roles = {values.get("person"), values["partition"].partition(":")[2]}
    label = {} if suffix == ".npz" else {"label": "label"}

    def prepared(table):
        kept = {name: cells for name, cells in table.items() if name in {"row", "dose", "label", *roles}}
        path = write(tmp_path / f"t{suffix}", table if suffix == ".npz" else kept)
        return run_of({**values, **label, "data": path})

    compare(unit, prepared, values)


@pytest.mark.parametrize("suffix", [".csv", ".npz"])
def test_no_unit_decides_about_others_at_a_site(tmp_path, suffix):
    roles = {"client": "where", "person": "who"}
    (tmp_path / "schema.toml").write_text(Schema.of({**SCHEMA, **roles}).toml())
    how = {"schema": "schema.toml"} if suffix == ".csv" else {"classes": ("0", "1")}

    def site(table, mine):
        write(tmp_path / f"t{suffix}", table)
        data = SiteData(SiteConfig(tmp_path, "north", f"t{suffix}", 8.0, 1e-5, **how))
        dataset = data.load()
        trained = np.setdiff1d(np.arange(ROWS), dataset.tested)
        x = dataset.x_train[~np.isin(trained, mine)].tolist()
        return data.shape, data.tests, data.columns, dataset.tested.tolist(), x

    for unit in [("who",)] if suffix == ".csv" else [(), ("where",)]:
        for table, mine in neighbours(unit, fixed_clients=False):
            assert site(table, mine) == site(cells(), mine)


@pytest.mark.parametrize("unit", ["who", "where"])
def test_the_name_of_a_unit_does_not_change_the_certificate_of_an_estimator(unit):
    table = cells()
    x = np.array([list(map(float, table[name])) for name in ("row", "dose")]).T

    def fitted(names):
        given = {"persons": names} if unit == "who" else {"groups": names}
        how = {"clients": 3} if unit == "who" else {"unit": "client"}
        model = FederatedClassifier(method="dp-fedgd", rounds=1, classes=["0", "1"], **how)
        return model.fit(x, table["label"], **given).certificate_

    expected = fitted(table[unit])
    for cell in CELLS[unit]:
        assert fitted([cell if name == table[unit][-1] else name for name in table[unit]]) == expected

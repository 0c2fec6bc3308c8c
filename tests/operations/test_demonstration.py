"""A federation on one machine: how the records of a file are divided among its sites."""

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")

from sordino.data.schema import Schema
from sordino.operations.demonstration import prepare


def parts(folder, y, client):
    """Of each site, and of the coordinator's test, the places of its records."""
    folder.mkdir()
    np.savez(folder / "t.npz", x=np.arange(60.0)[:, None] * [1.0, 0.0], y=y, client=client)
    prepare(folder / "f", 3, spec={}, data=str(folder / "t.npz"))
    files = [*sorted((folder / "f" / "sites").glob("*/data.npz")), folder / "f" / "coordinator" / "test.npz"]
    return [np.load(file)["x"][:, 0].tolist() for file in files]


def test_no_label_and_no_client_decides_where_other_records_are(tmp_path):
    """The sizes of sites are public, and certificates say so: another label of a record must not change them."""
    y, client = np.arange(60) % 3, np.arange(60) // 15
    expected = parts(tmp_path / "0", y, client)
    for k in (0, 7, 20):
        here = np.arange(60) == k
        assert parts(tmp_path / f"label{k}", np.where(here, (k + 1) % 3, y), client) == expected
        assert parts(tmp_path / f"client{k}", y, np.where(here, 3 - client, client)) == expected


def test_an_id_of_one_client_does_not_decide_who_is_tested_at_others(tmp_path):
    """Sites cannot compare ids: where a person is at one client, equal ids at two are two persons."""
    schema = {"target": {"column": "y", "levels": ["0", "1"]}, "columns": {"x": {"type": "number", "range": [0, 60]}}}
    (tmp_path / "schema.toml").write_text(Schema.of({**schema, "client": "where", "person": "who"}).toml())

    def tested(folder, who):
        folder.mkdir()
        rows = [f"{k},{k % 2},c{k // 20},{who if k == 59 else f'p{k}'}" for k in range(60)]
        (folder / "t.csv").write_text("\n".join(["x,y,where,who", *rows]) + "\n")
        prepare(folder / "f", spec={}, data=str(folder / "t.csv"), schema=tmp_path / "schema.toml")
        lines = (folder / "f" / "coordinator" / "test.csv").read_text().splitlines()
        return [line.partition(",")[0] for line in lines]

    assert tested(tmp_path / "0", "new") == tested(tmp_path / "1", "p7")

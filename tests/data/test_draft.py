"""The draft of a schema: what it takes from a table, and what it leaves to people."""

import tomllib
from pathlib import Path

import pytest

from sordino.cli import main
from sordino.data import draft as draft_module
from sordino.data.draft import draft
from sordino.data.schema import Schema
from sordino.errors import SordinoError


def write(folder: Path, text: str, name="table.csv", encoding="utf-8") -> Path:
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


def test_a_draft_names_its_own_options(tmp_path, capsys):
    for text in ("größe,y\n1,j\n", "a,y\né,j\n"):
        assert main(["schema", "draft", str(write(tmp_path, text, encoding="latin-1"))]) == 2
        assert "--encoding latin-1" in capsys.readouterr().err
    path = str(write(tmp_path, "kg;name;n\n1,5;a,b;1\n;c;2\n70;d;3\n"))
    assert main(["schema", "draft", path]) == 0
    out, err = capsys.readouterr()
    assert "kg would be categories" in err
    assert "# Types of a column: number, category, ordinal, boolean, date, drop; docs/how-to/describe" in out
    assert main(["schema", "draft", path, "--decimal", ","]) == 0
    assert "--decimal" not in capsys.readouterr().err


def test_a_draft_holds_names_and_types_and_no_value(tmp_path):
    secret = "age,ward,born,died\n93,rare-ward,1931-05-05,true\n41,b,1980-01-01,false\n"
    text, looked = draft(write(tmp_path, secret))
    for value in ("93", "41", "rare-ward", "1931", "1980"):
        assert value not in text
    assert "names and types of the 4 columns" in looked[0]
    for line in ("[columns.age]", 'type = "number"', 'type = "category"', 'type = "date"', 'type = "boolean"'):
        assert line in text
    with pytest.raises(SordinoError, match=r"still says 'FILL IN', as \d+ further places do: .*ward \(levels\)"):
        Schema.read(write(tmp_path, text, "schema.toml"))


@pytest.mark.parametrize(
    "cell", ["79", "3.5", '"3,5"', "-1e-3", "nan", "2020-01-01", "2020-01-01 12:30:00", "31.12.2024", "12/31/2024", ""]
)
def test_a_file_without_a_heading_gives_no_draft(tmp_path, capsys, cell):
    """Its first line is a person: no part of it is in the draft, or in the error."""
    path = write(tmp_path, f"rare-ward,{cell},no\nb,{cell},yes\n")
    assert main(["schema", "draft", str(path)]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    said = told.err.replace(str(path), "")
    assert "1 of 3 cells are unlikely names of columns (empty, a number or a date)" in said
    assert "--any-names" in said
    assert "rare-ward" not in said
    assert len(cell) < 2 or cell.strip('"') not in said
    assert main(["schema", "draft", str(path), "--any-names"]) == 0
    assert "[columns.rare-ward]" in capsys.readouterr().out


def test_a_draft_says_that_types_come_from_the_cells(tmp_path):
    """One cell among many changes a type, so that the draft tells something of the records until people review it."""
    rows = [f"{k}" for k in range(600)]
    one, looked = draft(write(tmp_path, "\n".join(["marker", *rows]), "t.csv"))
    other, _ = draft(write(tmp_path, "\n".join(["marker", *rows[:-1], "rare"]), "t.csv"))
    assert ('type = "number"' in one, 'type = "category"' in other) == (True, True)
    assert "the draft is private until people have reviewed it" in looked[0]
    assert "# Types come from the cells: one cell that is not a number makes its column a category" in one


def test_a_draft_drops_what_is_called_like_an_id_or_a_person(tmp_path):
    ids = ["id", "patient_id", "PatientID", "Fall-Id", "record uuid", "MRN", "first_name", "Name", "e-mail"]
    others = ["paid", "covid", "fluid", "bids", "HbA1c", "id_of_ward", "hostname", "named", "address_changes"]
    text, looked = draft(write(tmp_path, ",".join(ids + others) + "\n" + ",".join("1" * len(ids + others)) + "\n"))
    types = {name: column["type"] for name, column in tomllib.loads(text)["columns"].items()}
    assert [name for name, kind in types.items() if kind == "drop"] == ids
    assert f"{', '.join(ids)}, so type" in looked[1]


@pytest.mark.parametrize("name", ["patient_nbr", "PatientID", "subject no", "patient", "mrn", "person-id"])
def test_a_draft_proposes_the_column_of_the_person_and_tells_repeated_ids_on_the_screen(tmp_path, capsys, name):
    path = write(tmp_path, f"age,{name}\n50,a\n51,a\n52,b\n53,\n54,a\n")
    text, looked = draft(path)
    assert f'# person = "{name}"' in text
    assert tomllib.loads(text)["columns"][name] == {"type": "drop"}
    assert "2 of 4 records repeat one" in looked[-1]
    assert "2 of 4" not in text, "the draft may leave"
    other, looked = draft(write(tmp_path, f"age,{name}\n50,a\n51,b\n", "other.csv"))
    assert other == text, "nothing in it depends on the ids"
    assert "none of 2 stands twice" in looked[-1]
    values = tomllib.loads(text.replace("# person =", "person ="))
    values |= {"client": None, "target": {"column": "died", "levels": ["no", "yes"]}}
    values["columns"]["age"] = {"type": "number", "range": [0, 100]}
    assert Schema.of(values).person == name, "the line stands where the schema reads it"
    assert main(["schema", "draft", str(path), "--out", str(tmp_path / "s.toml")]) == 0
    assert "2 of 4 records repeat one" in capsys.readouterr().err
    assert (tmp_path / "s.toml").read_text() == text


@pytest.mark.parametrize("name", ["impatient", "patient_age", "persons", "key", "casemix"])
def test_a_draft_takes_no_other_column_for_a_person(tmp_path, name):
    text, _ = draft(write(tmp_path, f"age,{name}\n50,1\n51,2\n"))
    assert "# person = " not in text
    assert tomllib.loads(text)["columns"][name]["type"] == "number"


def test_a_draft_with_the_columns_of_target_and_client_kept_says_what_to_remove(tmp_path):
    text, _ = draft(write(tmp_path, "age,ward,died\n93,rare,true\n"))
    assert "# Remove [columns.NAME] of the target, the client and the person" in text
    values = tomllib.loads(text) | {"client": "ward", "target": {"column": "died", "levels": ["no", "yes"]}}
    with pytest.raises(SordinoError) as error:
        Schema.of(values)
    assert "died is the target and ward is the client" in str(error.value), "all of them at once, before blanks"
    assert "remove [columns.died] and [columns.ward]" in str(error.value)


def test_two_tables_of_the_same_columns_have_the_same_draft(tmp_path):
    one = draft(write(tmp_path, "age,ward\n93,rare\n", "t.csv"))
    other = draft(write(tmp_path, "age,ward\n1,b\n2,c\n", "t.csv"))
    assert one == other


def test_a_draft_from_public_records_is_filled(tmp_path):
    private = write(tmp_path, "age,ward,unit\n93,rare,x\n")
    public = write(tmp_path, "ward,age,unit\na,10,?\nb,20,?\n", "public.csv")
    text, looked = draft(private, public)
    assert tomllib.loads(text)["columns"]["unit"]["levels"] == ["FILL IN"], "no public level is known"
    assert "10.0" in text
    assert '"a"' in text
    assert "93" not in text
    assert len(looked) == 2
    with pytest.raises(SordinoError, match=r"--from-public: .* is the table itself"):
        draft(private, private)


def test_a_draft_takes_the_most_frequent_public_levels_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(draft_module, "MOST_PUBLIC_LEVELS", 2)
    public = write(tmp_path, "ward\na\nb\nb\nz\nz\n", "public.csv")
    text, looked = draft(write(tmp_path, "ward\nx\n"), public)
    assert tomllib.loads(text)["columns"]["ward"]["levels"] == ["b", "z"]
    assert "of ward no more than the 2 levels that are most frequent in public.csv" in looked[-1]

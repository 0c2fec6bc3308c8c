"""Texts of somebody else are one printable line, and their JSON has each key once."""

import pytest

from sordino.errors import SordinoError
from sordino.foreign import cell, printable, printable_parts, read_json


@pytest.mark.parametrize(
    "letter", [chr(k) for k in (*range(32), *range(127, 161), 0x2028, 0x202E, 0x2066, 0xFEFF, 0xDC80)]
)
def test_nothing_that_steers_a_terminal_is_left(letter):
    shown = printable(f"a{letter}b")
    assert shown.isprintable()
    assert shown == f"a{ascii(letter)[1:-1]}b"


def test_words_stay_as_they_are():
    for words in ("Köln, ε = 2 · 北京", "[bold]no markup[/]", ""):
        assert printable(words) == words
    assert printable("x" * 10, 4) == "xxx…"


def test_parts_of_a_document_are_printable():
    found = printable_parts({"na\nme": ["a\x1b", {"b": ("\r", 1.5, None, True)}]})
    assert found == {r"na\nme": [r"a\x1b", {"b": [r"\r", 1.5, None, True]}]}


def test_json_with_a_key_twice_is_refused_at_any_depth():
    assert read_json('{"a": {"b": [1, {"c": 2}]}, "b": 2}') == {"a": {"b": [1, {"c": 2}]}, "b": 2}
    for text in ('{"a": 1, "a": 1}', '[{"x": {"a": 1, "b": 2, "a": 3}}]', b'{"a": 1, "\\u0061": 2}'):
        with pytest.raises(SordinoError, match="the key 'a' is there twice"):
            read_json(text)


@pytest.mark.parametrize("label", ["+", "-", "-ve", "+ve", "- none", "+/-", "--", "-inf", "-1", "+2.5e3", "age", ""])
def test_labels_that_no_program_of_tables_computes_stay_as_they_are(label):
    assert cell(label) == label


@pytest.mark.parametrize(
    "formula",
    [
        "=A1",
        "=",
        "@SUM(A1)",
        "\tA1",
        "\r=A1",
        "\n=A1",
        "+A1",
        "-A1",
        "-$B$2",
        "+R[1]C[1]",
        "-SUM (A1)",
        "+cmd|' /C x'!A",
        "-cmd|x",
        "+WEBSERVICE(x)",
        "-1+1",
        "+1-cmd",
        "-\tx",
        "+@x",
        "-x!y",
        "++A1",
        "-=x",
        '+"x"',
    ],
)
def test_formulas_are_texts(formula):
    assert cell(formula) == f"'{formula}"

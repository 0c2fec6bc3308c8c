"""The sentences and labels of GLUE, for models that read text."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from sordino.data import formats
from sordino.data.fetch import Published, Remote, locate
from sordino.errors import SordinoError, check_known

BROKEN = 0.01  # share of rows: a few of QQP are broken by a line break and left out; more means a damaged file


class Sentences(NamedTuple):
    """One part of a task. `second` is empty for tasks of single sentences; `y` is None if labels are not published."""

    name: str
    first: list[str]
    second: list[str]
    y: np.ndarray | None  # indices into classes
    classes: tuple[str, ...]


class Task(NamedTuple):
    published: Published
    columns: tuple[tuple[str, ...], ...]  # column names of each sentence
    label: str
    classes: tuple[str, ...]
    parts: dict[str, str]  # split -> file


def load(task: str, split: str = "train", data_dir: str | Path | None = None) -> Sentences:
    """A split (`train`, `dev`, `test`; of `mnli` also `dev_mismatched`, `test_mismatched`) of `sst2`, `qnli`, `qqp` or
    `mnli`.

    Columns are found by the header's names: GLUE's own, or `label<TAB>content`. GLUE does not
    publish the labels of its test parts.
    """
    check_known("task", task, TASKS)
    about = TASKS[task]
    check_known("split", split, about.parts)
    file = about.parts[split]
    store = locate(about.published, (file,), data_dir)
    where = f"{store.where}: {file}"
    header, rows = formats.table(store.read(file), where)
    whole = [row for row in rows if len(row) >= len(header)]
    if len(rows) - len(whole) > BROKEN * len(rows) or not whole:
        raise SordinoError(
            f"data: {len(rows) - len(whole)} of {len(rows)} rows in '{where}' have fewer than the header's "
            f"{len(header)} columns; replace it by a complete copy."
        )
    places = [next((header.index(name) for name in names if name in header), None) for names in about.columns]
    if None in places:
        wanted = " and ".join(" or ".join(names) for names in about.columns)
        raise SordinoError(f"data: '{where}' has columns {header}; {about.published.title} needs {wanted}.")
    first, *second = ([row[place] for row in whole] for place in places if place is not None)
    y = _labels([row[header.index(about.label)] for row in whole], about, where) if about.label in header else None
    return Sentences(task, first, second[0] if second else [], y, about.classes)


def _labels(words: list[str], about: Task, where: str) -> np.ndarray:
    index = {word: i for i, word in enumerate(about.classes)}
    if unknown := set(words) - index.keys():
        raise SordinoError(
            f"data: label '{min(unknown)}' in '{where}' is not one of {', '.join(about.classes)}; check the file."
        )
    return np.array([index[word] for word in words], np.int64)


def _task(
    name: str,
    title: str,
    file: str,
    md5: str | None,
    columns: tuple[tuple[str, ...], ...],
    label: str,
    classes: tuple[str, ...],
    **parts: str,
) -> Task:
    url = f"https://dl.fbaipublicfiles.com/glue/data/{file}"
    published = Published(name, title, (Remote(file, (url,), md5 and f"md5:{md5}"),), (name, title), title)
    return Task(
        published, columns, label, classes, {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"} | parts
    )


TASKS = {
    "sst2": _task(
        *("sst2", "SST-2", "SST-2.zip", "9f81648d4199384278b86e315dac217c"),
        (("sentence", "content"),),
        "label",
        ("0", "1"),
    ),
    "qnli": _task(
        *("qnli", "QNLI", "QNLIv2.zip", "b4efd6554440de1712e9b54e14760e82"),
        (("question",), ("sentence",)),
        "label",
        ("entailment", "not_entailment"),
    ),
    "qqp": _task(
        *("qqp", "QQP", "QQP-clean.zip", None),
        (("question1",), ("question2",)),
        "is_duplicate",
        ("0", "1"),
    ),
    "mnli": _task(
        *("mnli", "MNLI", "MNLI.zip", None),
        (("sentence1",), ("sentence2",)),
        "gold_label",
        ("entailment", "neutral", "contradiction"),
        dev="dev_matched.tsv",
        dev_mismatched="dev_mismatched.tsv",
        test="test_matched.tsv",
        test_mismatched="test_mismatched.tsv",
    ),
}

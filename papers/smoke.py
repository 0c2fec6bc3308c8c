"""Every table for two rounds on small made-up files, to see that each preset still runs.

No figure of it means anything: there is one budget, grids are tried at their first setting, and clients are as few as
a table has.
"""

from __future__ import annotations

import gzip
import pickle
import shlex
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from papers import limits
from papers.tables import PaperTable, TableRequest, published
from sordino.data import glue
from sordino.errors import SordinoError
from sordino.settings import parse_setting
from sordino.training import run as training
from sordino.training.spec import Spec

ROUNDS, RECORDS, TESTS, WIDTH = 2, 1200, 60, 3  # of a run; of a stand-in
IMAGES = 10  # of a file
CLASSES = {"federated_emnist_pca100": 47, "pathmnist_resnet20": 9, "pathmnist_vgg16": 9}  # ten otherwise
COUNTED = {"cifar10_resnet20": "sofim-14", "pathmnist_resnet20": "sofim-13"}  # partitions by printed counts
SHORT = {"rounds": ROUNDS, "steps": 1, "clients": 2, "batch": "fixed:1", "participation": "full", "noise": 4.0}
SHORT |= {"adjacency": "replace-one", "evaluate_every": ROUNDS}
TRAINED = "to run it: sordino run "


def run(tables: Sequence[PaperTable], tick: Callable[[int], None]) -> list[dict[str, Any]]:
    """Try tables one after another; a failure is a row, and the next table is tried.

    Args:
      tables: which.
      tick: called with 1 after each.

    Returns:
      One row per table: its name, lines, runs, seconds, and `ran` or what went wrong.
    """
    rows = []
    with tempfile.TemporaryDirectory() as place, _quiet():
        for each in tables:
            began, lines, runs = time.perf_counter(), 0, [0]
            try:
                prepare(each, Path(place))
                request = TableRequest(
                    each,
                    place,
                    seeds=1,
                    epsilons=None if each.name.startswith("adamw") else (1.0,),
                    clients=_fewest(each),
                    rounds=ROUNDS,
                    most_settings=1,
                    keep=Path(place) / "settings",
                    tick=lambda n, runs=runs: runs.__setitem__(0, runs[0] + n),  # type: ignore[misc]
                )
                content = each.make(request)
                lines, outcome = len(content.lines), "ran"
                for note in content.notes:
                    if note.startswith(TRAINED):
                        train(note.removeprefix(TRAINED))
                        runs[0] += 1
            except Exception as error:
                outcome = f"{type(error).__name__}: {error}".split("\n")[0]
            seconds = time.perf_counter() - began
            rows.append({"table": each.name, "lines": lines, "runs": runs[0], "seconds": seconds, "outcome": outcome})
            tick(1)
    return rows


def _fewest(table: PaperTable) -> tuple[int, ...] | None:
    """The smallest number of clients of a table that varies them."""
    known = getattr(table.make, "keywords", {}).get("clients")
    return (min(known),) if known else None


def train(command: str) -> None:
    """Run a printed command: its keys as they stand, on few clients for two rounds."""
    words = shlex.split(command)
    keys = dict(parse_setting(word) for word in words if word != "--set")
    prepared = training.prepare(Spec.of({**keys, **SHORT, "partition": "iid", "seed": 1}))
    if len(list(training.rounds(prepared))) != ROUNDS:
        raise SordinoError(f"rounds: the command did not train for {ROUNDS}.")


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --------------------------------------------------------------------------------------------------------- stand-ins


def prepare(table: PaperTable, place: Path) -> None:
    """Write what the table needs into the folder, unless it is there already.

    Args:
      table: which.
      place: the folder.
    """
    if table.needs is not None and table.needs.endswith(".npz") and not (place / table.needs).exists():
        _features(place / table.needs)
    if table.needs == "a9a":
        _a9a(place / "a9a")
    if table.needs in (limits.DIGITS[0], "mnist"):
        _digits(place)
    if table.name.startswith("adamw") or table.needs == "cifar10":
        _images(place)
    if table.name.startswith("adamw"):
        _sentences(place)
        _weights(place)


def _features(path: Path) -> None:
    name, rng = path.stem, np.random.default_rng(0)
    classes = CLASSES.get(name, 10)
    y = np.arange(RECORDS) % classes
    if name in COUNTED:  # as many records of each class as the paper's clients hold
        rows = published(COUNTED[name])
        y = np.repeat(np.arange(classes), [sum(int(row[f"class_{k}"]) for row in rows) for k in range(classes)])
    y_test, centres = np.arange(TESTS) % classes, rng.standard_normal((classes, WIDTH))
    x, x_test = (centres[each] + 0.3 * rng.standard_normal((len(each), WIDTH)) for each in (y, y_test))
    np.savez(path, x_train=x.astype(np.float32), y_train=y, x_test=x_test.astype(np.float32), y_test=y_test)


def _a9a(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(0)
    for name, n in (("a9a", RECORDS), ("a9a.t", TESTS)):
        lines = (f"{'+1' if k % 2 else '-1'} {1 + k % 2}:1 {rng.integers(3, 123)}:1" for k in range(n))
        (folder / name).write_text("\n".join(lines) + "\n")


def _digits(place: Path) -> None:
    """MNIST of a few images, in its own format."""
    rng = np.random.default_rng(0)
    for part, n in (("train", RECORDS), ("t10k", TESTS)):
        pixels, labels = rng.integers(0, 256, (n, 28, 28), np.uint8), (np.arange(n) % 10).astype(np.uint8)
        for name, magic, array in (("images-idx3", 0x803, pixels), ("labels-idx1", 0x801, labels)):
            head = np.array([magic, *array.shape], ">i4").tobytes()
            (place / f"mnist-{part}-{name}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))


def _images(place: Path) -> None:
    """CIFAR-10 and CIFAR-100 of a few images, in their own format."""
    rng = np.random.default_rng(0)

    def batch(path: Path, labels: str, classes: int) -> None:
        path.parent.mkdir(exist_ok=True)
        data = rng.integers(0, 256, (IMAGES, 3072), np.uint8)
        path.write_bytes(pickle.dumps({b"data": data, labels.encode(): [k % classes for k in range(IMAGES)]}))

    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        batch(place / "cifar10" / name, "labels", 10)
    for name in ("train", "test"):
        batch(place / "cifar100" / name, "fine_labels", 10)


def _sentences(place: Path) -> None:
    """The files of GLUE with a few sentences."""
    for name, task in glue.TASKS.items():
        columns = [names[0] for names in task.columns]
        lines = ["\t".join([*columns, task.label])]
        lines += ["\t".join(["a fine film"] * len(columns) + [task.classes[k % len(task.classes)]]) for k in range(60)]
        for part in (task.parts["train"], task.parts["dev"]):
            (place / name).mkdir(exist_ok=True)
            (place / name / part).write_text("\n".join(lines) + "\n")


def _weights(place: Path) -> None:
    """Folders of small transformers with random weights, by the names that the tables look for."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    from sordino.models.transformers import library

    hub = library()
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    swin = {"image_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2]}
    words = ("<s>", "<pad>", "</s>", "<unk>", "a", "fine", "film")
    made: dict[str, Callable[[], Any]] = {
        "vit-base": lambda: hub.ViTForImageClassification(hub.ViTConfig(image_size=16, patch_size=8, **small)),
        "swin-tiny": lambda: hub.SwinForImageClassification(hub.SwinConfig(**swin)),
        "swin-base": lambda: hub.SwinForImageClassification(hub.SwinConfig(**swin)),
        "roberta-base": lambda: hub.RobertaForSequenceClassification(
            hub.RobertaConfig(vocab_size=len(words), max_position_embeddings=514, type_vocab_size=1, **small)
        ),
    }
    for name, make in made.items():
        if not (place / name / "config.json").exists():
            make().save_pretrained(place / name)
    engine = Tokenizer(models.WordLevel({word: k for k, word in enumerate(words)}, unk_token="<unk>"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    engine.save(str(place / "roberta-base" / "tokenizer.json"))

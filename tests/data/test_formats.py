"""Tiny files in the true formats, and the real ones where they are at hand."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import pickle
import struct
import tarfile
import urllib.error
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from sordino.data import catalog, formats, glue
from sordino.data.sources import load
from sordino.errors import SordinoError

SHARED = Path(__file__).parents[3] / "shared" / "data"
shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real files are not at hand (../shared/data)")
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("SORDINO_DATA", raising=False)


# --------------------------------------------------------------------------------------------------------------- idx


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


IMAGES = RNG.integers(0, 256, (12, 28, 28), np.uint8)
LABELS = np.arange(12, dtype=np.uint8) % 10


def mnist(folder: Path, prefix: str = "", test: str = "t10k", labels: np.ndarray = LABELS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part, rows in (("train", slice(0, 10)), (test, slice(10, 12))):
        (folder / f"{prefix}{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(IMAGES[rows])))
        (folder / f"{prefix}{part}-labels-idx1-ubyte").write_bytes(idx(labels[rows]))
    return folder


@pytest.mark.parametrize(
    ("name", "place", "prefix"),
    [
        ("mnist", "", ""),
        ("mnist", "", "mnist-"),
        ("mnist", "MNIST/raw", ""),
        ("fashion-mnist", "", "fashion-mnist-"),
        ("fashion-mnist", "fashion-mnist", ""),
    ],
)
def test_idx_compressed_or_not_under_any_of_its_names(tmp_path: Path, name: str, place: str, prefix: str) -> None:
    mnist(tmp_path / place, prefix)
    data = load(name, data_dir=tmp_path)
    np.testing.assert_array_equal(data.x_train, IMAGES[:10].reshape(10, 784) / np.float32(255))
    assert data.x_train.dtype == np.float32
    assert data.y_train.tolist() == list(range(10))
    assert data.y_test.tolist() == [0, 1]
    assert data.classes[0] == ("0" if name == "mnist" else "T-shirt/top")


def test_emnist_is_turned_upright_and_its_letters_begin_at_one(tmp_path: Path) -> None:
    mnist(tmp_path, "emnist-digits-", "test")
    data = load("emnist-digits", data_dir=str(tmp_path))
    np.testing.assert_array_equal(data.x_train[3].reshape(28, 28), IMAGES[3].T / np.float32(255))
    loose = mnist(tmp_path / "loose", "emnist-letters-", "test", LABELS + 1)
    with zipfile.ZipFile(tmp_path / "gzip.zip", "w") as archive:
        for path in loose.iterdir():
            packed = path.read_bytes() if path.suffix == ".gz" else gzip.compress(path.read_bytes())
            archive.writestr(f"gzip/{path.name.removesuffix('.gz')}.gz", packed)
    letters = load("emnist-letters", data_dir=tmp_path)
    assert [letters.classes[k] for k in letters.y_train] == list("abcdefghij")
    assert len(load_classes("emnist-balanced")) == len(load_classes("emnist-bymerge")) == 47
    assert len(load_classes("emnist-byclass")) == 62


def load_classes(name: str) -> Any:
    return catalog.SETS[name].read.keywords["classes"]  # type: ignore[attr-defined]


def test_fashion_mnist_is_not_taken_for_mnist(tmp_path: Path) -> None:
    opening = np.array([9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9], np.uint8)
    mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(opening))
    with pytest.raises(SordinoError, match="are Fashion-MNIST; put each set into its own folder"):
        load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: gzip.compress(data)[:-20], "damaged or not a whole .gz file"),
        (lambda data: gzip.compress(data)[:5], "damaged or not a whole .gz file"),
        (lambda data: gzip.compress(b"\0\0\r\3" + data[4:]), r"idx file of bytes \(it begins with 00000d03\)"),
        (lambda data: gzip.compress(data[:-1]), "7839 bytes, where .* needs 7840"),
        (lambda data: gzip.compress(data + b"\0"), "7841 bytes"),
        (lambda data: gzip.compress(b""), "damaged or not an idx file"),
        (lambda data: gzip.compress(idx(LABELS)), "has 1 dimensions, not 3"),
    ],
)
def test_damaged_idx(tmp_path: Path, damage: Any, message: str) -> None:
    mnist(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(damage(idx(IMAGES[:10])))
    with pytest.raises(SordinoError, match=f"train-images-idx3-ubyte.*{message}"):
        load("mnist", data_dir=tmp_path)


def test_idx_parts_that_do_not_fit(tmp_path: Path) -> None:
    mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS[:9]))
    with pytest.raises(SordinoError, match="10 records for 9 labels in the training part of 'mnist'"):
        load("mnist", data_dir=tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS[:10] + 1))
    with pytest.raises(SordinoError, match="labels from 1 to 10 in the training part of 'mnist', which has 10 classes"):
        load("mnist", data_dir=tmp_path)


# ------------------------------------------------------------------------------------------------------------- CIFAR


class Old(pickle._Pickler):  # type: ignore[name-defined, misc]
    """Strings as Python 2 wrote them: CIFAR's batches are its work."""

    dispatch: ClassVar[dict[Any, Any]] = dict(pickle._Pickler.dispatch)  # type: ignore[attr-defined]

    def old(self, value: bytes | str) -> None:
        data = value.encode("latin1") if isinstance(value, str) else value
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)
        self.memoize(value)

    dispatch[bytes] = dispatch[str] = old


def old(value: object) -> bytes:
    file = io.BytesIO()
    Old(file, protocol=2).dump(value)
    return file.getvalue().replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


PIXELS = RNG.integers(0, 256, (12, 3072), np.uint8)
WAYS = {"old": old, "protocol 2": lambda v: pickle.dumps(v, 2), "newest": lambda v: pickle.dumps(v, 5)}


def cifar(dump: Any = old) -> dict[str, bytes]:
    names = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]
    members = {
        name: dump({"data": PIXELS[2 * k : 2 * k + 2], "labels": [k % 3, k % 2], "filenames": ["a.png", "b.png"]})
        for k, name in enumerate(names)
    }
    return {**members, "batches.meta": dump({"label_names": ["airplane", "automobile", "bird"]})}


def tar(path: Path, top: str, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(f"{top}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("way", WAYS)
def test_cifar10_as_archive_and_as_folder(tmp_path: Path, way: str) -> None:
    members = cifar(WAYS[way])
    tar(tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py", members)
    data = load("cifar10", data_dir=tmp_path)
    assert data.x_train.shape == (10, 3072)
    np.testing.assert_array_equal(
        data.x_train[3].reshape(32, 32, 3), PIXELS[3].reshape(3, 32, 32).transpose(1, 2, 0) / np.float32(255)
    )
    assert data.y_train.tolist() == [0, 0, 1, 1, 2, 0, 0, 1, 1, 0]
    assert data.classes == ("airplane", "automobile", "bird")
    folder = tmp_path / "other" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for name, batch in members.items():
        (folder / name).write_bytes(batch)
    for place in (folder, folder.parent):
        again = load("cifar10", data_dir=place)
        np.testing.assert_array_equal(again.x_test, data.x_test)


def test_cifar100_has_fine_labels(tmp_path: Path) -> None:
    batch = old({"data": PIXELS, "fine_labels": [0, 99] * 6, "coarse_labels": [1] * 12})
    meta = old({"fine_label_names": [f"c{k}" for k in range(100)]})
    tar(tmp_path / "cifar-100-python.tar.gz", "cifar-100-python", {"train": batch, "test": batch, "meta": meta})
    data = load("cifar100", data_dir=tmp_path)
    assert len(data.classes) == 100
    assert data.y_test.tolist() == [0, 99] * 6


class Malicious:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('a pickle ran code')",))


def test_a_pickle_that_names_anything_else_is_refused(tmp_path: Path) -> None:
    members = cifar()
    members["data_batch_3"] = pickle.dumps({"data": PIXELS, "labels": Malicious()}, 2)
    tar(tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py", members)
    with pytest.raises(
        SordinoError, match=r"data_batch_3.*it refers to (__builtin__|builtins)\.exec, which no array needs"
    ):
        load("cifar10", data_dir=tmp_path)


def test_damaged_cifar(tmp_path: Path) -> None:
    path = tar(tmp_path / "cifar-10-python.tar.gz", "cifar-10-batches-py", cifar())
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SordinoError, match=r"cifar-10-python.tar.gz' is damaged or not a whole .tar.gz"):
        load("cifar10", data_dir=tmp_path)
    for batch in (b"junk", old({"data": PIXELS}), old({"data": PIXELS, "labels": [1]}), old([1]), old({})[:-1]):
        tar(path, "cifar-10-batches-py", {**cifar(), "test_batch": batch})
        with pytest.raises(SordinoError, match="test_batch' is damaged or not a"):
            load("cifar10", data_dir=tmp_path)


# ---------------------------------------------------------------------------------------------------------- MedMNIST


def test_medmnist_leaves_its_validation_part_out(tmp_path: Path) -> None:
    x = RNG.integers(0, 256, (8, 28, 28, 3), np.uint8)
    y = np.arange(8, dtype=np.uint8)[:, None] % 2
    path = tmp_path / "pathmnist.npz"
    parts = {f"{part}_images": x for part in ("train", "val")} | {f"{part}_labels": y for part in ("train", "val")}
    np.savez(path, test_images=x[:2], test_labels=y[:2], **parts)
    data = load("pathmnist", data_dir=tmp_path)
    assert data.x_train.shape == (8, 2352)
    np.testing.assert_array_equal(data.x_test, x[:2].reshape(2, -1) / np.float32(255))
    assert data.y_train.tolist() == [0, 1] * 4
    assert data.classes == ("0", "1")
    np.savez(tmp_path / "octmnist.npz", train_images=x[..., 0], train_labels=y, test_images=x[..., 0], test_labels=y)
    assert load("octmnist", data_dir=tmp_path).x_train.shape == (8, 784)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SordinoError, match=r"pathmnist.npz' is damaged or not an .npz with train_images"):
        load("pathmnist", data_dir=tmp_path)
    np.savez(path, train_images=x, train_labels=np.array([Malicious()], object), test_images=x, test_labels=y)
    with pytest.raises(SordinoError, match="pathmnist"):
        load("pathmnist", data_dir=tmp_path)


# ----------------------------------------------------------------------------------------------------- Tiny-ImageNet


@pytest.mark.parametrize("packed", [False, True])
def test_tiny_imagenet_is_decoded_as_it_is_asked_for(tmp_path: Path, packed: bool) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow, the extra `images`, decodes JPEG")

    def picture(value: int, mode: str = "RGB") -> bytes:
        file = io.BytesIO()
        image.new(mode, (64, 64), (value, 0, 255) if mode == "RGB" else value).save(file, "JPEG", quality=95)
        return file.getvalue()

    members = {"wnids.txt": b"n02\nn01\n", "val/val_annotations.txt": b"val_0.JPEG\tn02\t0\t0\t9\t9\n"}
    members |= {f"train/{c}/images/{c}_{k}.JPEG": picture(100 + k) for c in ("n01", "n02") for k in range(2)}
    members |= {"val/images/val_0.JPEG": picture(50, "L"), "train/n01/n01_boxes.txt": b"n01_0.JPEG\t0\t0\t9\t9\n"}
    top = tmp_path / "tiny-imagenet-200"
    if packed:
        with zipfile.ZipFile(f"{top}.zip", "w") as archive:
            for name, content in members.items():
                archive.writestr(f"{top.name}/{name}", content)
    else:
        for name, content in members.items():
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_bytes(content)
    data = load("tiny-imagenet", data_dir=tmp_path)
    assert data.classes == ("n01", "n02")
    assert data.y_train.tolist() == [0, 0, 1, 1]
    assert data.y_test.tolist() == [1]
    assert data.x_train.shape == (4, 12288)
    np.testing.assert_allclose(data.x_train[1].reshape(64, 64, 3)[5, 5] * 255, [101, 0, 255], atol=3)
    np.testing.assert_allclose(data.x_test * 255, 50, atol=1)
    pictures = catalog.read("tiny-imagenet", tmp_path).x_train
    assert isinstance(pictures, catalog.Jpegs)
    assert pictures[1:3].shape == (2, 64, 64, 3)
    with pytest.raises(SordinoError, match=r"a.jpg' is damaged or not a JPEG"):
        formats.jpeg(picture(1)[:300], "a.jpg", 64)
    with pytest.raises(SordinoError, match="64 by 64 pixels, where 32 by 32 are expected"):
        formats.jpeg(picture(1), "a.jpg", 32)


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(SordinoError, match=r"pip install 'sordino\[images\]'"):
        formats.jpeg(b"", "a.jpg", 64)


# ------------------------------------------------------------------------------------------------------------ LIBSVM


A9A = b"-1 3:1 11:1 123:0.5 \n+1 5:1 7:-2\n-1 \n"


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".xz", lzma.compress), (".bz2", bz2.compress)])
def test_a9a_is_read_packed_or_not_under_both_names(tmp_path: Path, suffix: str, pack: Any) -> None:
    for name in ("a9a", "a9a.t"):
        (tmp_path / f"{name}{suffix}").write_bytes(pack(A9A))
    for name in ("a9a", "adult"):
        data = load(name, data_dir=tmp_path)
        assert data.x_train.shape == (3, 123)
        assert data.x_train[0, [2, 10, 122]].tolist() == [1, 1, 0.5]
        assert data.x_train[1].sum() == -1
        assert data.classes == ("-1", "1")
        assert data.y_train.tolist() == [0, 1, 0]


@pytest.mark.parametrize("line", [b"1 124:1", b"1 0:1", b"1 3", b"one 3:1", b"1 3:1:1", b"1 3:", b"\xff"])
def test_damaged_libsvm(line: bytes) -> None:
    with pytest.raises(SordinoError, match="a9a, line 4' is damaged or not LIBSVM text"):
        formats.libsvm(A9A + line, "a9a", 123)


def test_a_damaged_xz_file_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("a9a.xz", "a9a.t.xz"):
        (tmp_path / name).write_bytes(lzma.compress(A9A)[:-8])
    with pytest.raises(SordinoError, match=r"a9a.xz' is damaged or not a whole .xz file"):
        load("a9a", data_dir=tmp_path)


# -------------------------------------------------------------------------------------------------------------- GLUE

MNLI_HEAD = "index\tpromptID\tpairID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n"


@pytest.mark.parametrize(
    ("task", "split", "file", "content", "first", "second", "y"),
    [
        ("sst2", "train", "SST-2/train.tsv", 'sentence\tlabel\na "b\t1\nc \t0\n', ['a "b', "c"], [], [1, 0]),
        ("sst2", "dev", "sst2-dev.tsv", "label\tcontent\n0\ta\x85b\n", ["a\x85b"], [], [0]),
        ("sst2", "test", "SST-2/test.tsv", "index\tsentence\r\n0\ta\r\n", ["a"], [], None),
        (
            "qnli",
            "train",
            "QNLI/train.tsv",
            "index\tquestion\tsentence\tlabel\n0\tq\ts\tnot_entailment\n",
            ["q"],
            ["s"],
            [1],
        ),
        (
            "qqp",
            "dev",
            "qqp/dev.tsv",
            "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\ta\tb\t1\n",
            ["a"],
            ["b"],
            [1],
        ),
        ("mnli", "dev", "MNLI/dev_matched.tsv", MNLI_HEAD + "0\t1\t2\tf\ta\tb\tneutral\tneutral\n", ["a"], ["b"], [1]),
        (
            "mnli",
            "dev_mismatched",
            "MNLI/dev_mismatched.tsv",
            MNLI_HEAD + "0\t1\t2\tf\ta\tb\tneutral\tcontradiction\n",
            ["a"],
            ["b"],
            [2],
        ),
    ],
)
def test_a_glue_file_gives_sentences_and_labels(
    tmp_path: Path, task: str, split: str, file: str, content: str, first: Any, second: Any, y: list[int] | None
) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(content.encode())
    found = glue.load(task, split, tmp_path)
    assert (found.first, found.second) == (first, second)
    assert (None if found.y is None else found.y.tolist()) == y


def test_glue_archive_and_rows_that_are_cut_in_two(tmp_path: Path) -> None:
    head, row = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n", "0\t1\t2\ta\tb\t1\n"
    with zipfile.ZipFile(tmp_path / "QQP-clean.zip", "w") as archive:
        archive.writestr("QQP/train.tsv", head + row * 200 + "0\t1\n")
        archive.writestr("QQP/dev.tsv", head + row * 5 + "0\t1\n")
    assert len(glue.load("qqp", data_dir=tmp_path).first) == 200
    with pytest.raises(SordinoError, match=r"1 of 6 rows in .*dev.tsv' have fewer than the header's 6 columns"):
        glue.load("qqp", "dev", tmp_path)


def test_glue_errors(tmp_path: Path) -> None:
    with pytest.raises(SordinoError, match=r"data: 'sst2' is text.*sordino.data.glue.load"):
        load("sst2", data_dir=tmp_path)
    with pytest.raises(SordinoError, match=r"task: 'sst3' is unknown. Did you mean 'sst2'"):
        glue.load("sst3")
    with pytest.raises(SordinoError, match=r"split: 'trian' is unknown. Did you mean 'train'"):
        glue.load("sst2", "trian")
    (tmp_path / "train.tsv").write_text("sentence\tlabel\na\t2\n")
    with pytest.raises(SordinoError, match=r"label '2' in .* is not one of 0, 1"):
        glue.load("sst2", data_dir=tmp_path)
    with pytest.raises(SordinoError, match=r"has columns \['sentence', 'label'\]; QNLI needs question and sentence"):
        glue.load("qnli", data_dir=tmp_path)


# ----------------------------------------------------------------------------------------------------- the real files


@shared
@pytest.mark.parametrize(
    ("name", "train", "test", "features", "classes"),
    [("mnist", 60000, 10000, 784, 10), ("a9a", 32561, 16281, 123, 2)],
)
def test_the_real_sets(name: str, train: int, test: int, features: int, classes: int) -> None:
    if not any(SHARED.glob(f"{name}*")):
        pytest.skip(f"{name} is not in ../shared/data")
    data = load(name, data_dir=SHARED)
    assert data.x_train.shape == (train, features)
    assert data.x_test.shape == (test, features)
    assert len(data.classes) == classes
    assert data.x_train.min() == 0
    assert data.x_train.max() == 1
    if name == "mnist":
        with pytest.raises(SordinoError, match="Fashion-MNIST is not on this machine"):
            load("fashion-mnist", data_dir=SHARED)


@shared
@pytest.mark.parametrize(("split", "rows"), [("train", 67349), ("dev", 872), ("test", 1821)])
def test_the_real_sst2(split: str, rows: int) -> None:
    if not (SHARED / f"sst2-{split}.tsv.gz").exists():
        pytest.skip(f"sst2-{split} is not in ../shared/data")
    found = glue.load("sst2", split, SHARED)
    assert len(found.first) == rows
    assert found.y is not None
    assert 0.3 < found.y.mean() < 0.7
    assert min(map(len, found.first)) > 0

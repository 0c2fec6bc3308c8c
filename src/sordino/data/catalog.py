"""Published sets by name: where their files come from, and how they are read.

Images are bytes of shape (n, height, width, channels). As features they are flat pixels in [0, 1]: each record is
mapped independently of the others, which costs no privacy. The test part is the official one. For Tiny-ImageNet it is
the validation part, because the test labels are not published. The validation part of MedMNIST is not used.
"""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from sordino.data import formats, glue
from sordino.data.fetch import Published, Remote, Store, locate
from sordino.errors import SordinoError, nearest

IMAGES_CHUNK = 4096  # images decoded at a time


class Pictures(Protocol):
    """(n, height, width, channels) of bytes, in memory, or decoded on access."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> np.ndarray: ...


class Jpegs:
    """JPEG files of a store, decoded slice by slice."""

    def __init__(self, store: Store, members: Sequence[str], side: int) -> None:
        self.store, self.members, self.side = store, members, side

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.members), self.side, self.side, 3

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, part: slice, /) -> np.ndarray:
        members = self.members[part]
        out = np.empty((len(members), *self.shape[1:]), np.uint8)
        for image, member in zip(out, members, strict=True):
            image[:] = formats.jpeg(self.store.read(member), f"{self.store.where}: {member}", self.side)
        return out


class Official(NamedTuple):
    """A published set. `y` holds indices into `classes`, or raw labels if `classes` is None."""

    x_train: Pictures
    y_train: np.ndarray
    x_test: Pictures
    y_test: np.ndarray
    classes: tuple[str, ...] | None


class CatalogEntry(NamedTuple):
    published: Published
    members: tuple[str, ...]  # files that must exist
    read: Callable[[Store], Official]


def read(name: str, data_dir: str | Path | None = None) -> Official:
    """Read a published set from disk, or download it. `a9a` has features instead of images."""
    if name in glue.TASKS:
        raise SordinoError(
            f"data: '{name}' is text, which a model of features cannot read. sordino.data.glue.load('{name}') "
            "reads the sentences; save their embeddings by a language model as an .npz, and train on that."
        )
    name = ALIASES.get(name, name)
    if name not in SETS:
        raise SordinoError(f"data: '{name}' is unknown.{nearest(name, NAMES)}")
    entry = SETS[name]
    official = entry.read(locate(entry.published, entry.members, data_dir))
    for x, y, part in ((official.x_train, official.y_train, "training"), (official.x_test, official.y_test, "test")):
        if len(x) != len(y):
            raise SordinoError(
                f"data: {len(x)} records for {len(y)} labels in the {part} part of '{name}'; check the files."
            )
        if official.classes and len(y) and not 0 <= y.min() <= y.max() < len(official.classes):
            raise SordinoError(
                f"data: labels from {y.min()} to {y.max()} in the {part} part of '{name}', which has "
                f"{len(official.classes)} classes; check the files."
            )
    return official


def flat(x: Pictures) -> np.ndarray:
    """Features: pixels in [0, 1], by rows with the channels innermost. Sets without images keep their features."""
    if isinstance(x, np.ndarray) and x.dtype == np.float32:
        return x
    out = np.empty((len(x), math.prod(x.shape[1:])), np.float32)
    for start in range(0, len(x), IMAGES_CHUNK):
        part = x[start : start + IMAGES_CHUNK]
        out[start : start + IMAGES_CHUNK] = part.reshape(len(part), -1) / np.float32(255)
    return out


# --------------------------------------------------------------------------------------------------------- the readers


def _idx(store: Store, parts: Sequence[str], classes: str | tuple[str, ...], first: int, upright: bool) -> Official:
    images, labels, test_images, test_labels = (formats.idx(store.read(part), _at(store, part)) for part in parts)
    for opening, title in OPENINGS.items():  # two sets whose files have the same names
        if labels[: len(opening)].tobytes() == opening and classes != CLASSES[title]:
            raise SordinoError(f"data: the files in '{store.where}' are {title}; put each set into its own folder.")
    for part, array, dimensions in zip(parts, (images, labels, test_images, test_labels), (3, 1, 3, 1), strict=True):
        if array.ndim != dimensions:
            raise SordinoError(f"data: '{_at(store, part)}' has {array.ndim} dimensions, not {dimensions}; check it.")
    if not upright:  # columns first on disk
        images, test_images = images.transpose(0, 2, 1), test_images.transpose(0, 2, 1)
    y, y_test = (each.astype(np.int64) - first for each in (labels, test_labels))
    return Official(images[..., None], y, test_images[..., None], y_test, tuple(classes))


def _cifar(store: Store, train: Sequence[str], test: str, meta: str, labels: str, names: str) -> Official:
    batches = [formats.cifar(store.read(part), _at(store, part), labels) for part in (*train, test)]
    x, y = (np.concatenate(part) for part in zip(*batches[:-1], strict=True))
    classes = formats.unpickle(store.read(meta), _at(store, meta)).get(names) if store.has(meta) else None
    words = (word.decode() if isinstance(word, bytes) else str(word) for word in classes or ())
    return Official(x, y, *batches[-1], tuple(words) or None)


def _medmnist(store: Store, file: str) -> Official:
    names = ("train_images", "train_labels", "test_images", "test_labels")
    x, y, x_test, y_test = formats.npz(store.read(file), _at(store, file), names)
    x, x_test = (each if each.ndim == 4 else each[..., None] for each in (x, x_test))
    if x.dtype != np.uint8 or x_test.dtype != np.uint8 or x.ndim != 4 or x_test.ndim != 4:
        raise SordinoError(f"data: '{_at(store, file)}' holds {x.dtype} {x.shape}, not images of bytes; check it.")
    return Official(x, y, x_test, y_test, None)


def _a9a(store: Store) -> Official:
    (x, y), (x_test, y_test) = (formats.libsvm(store.read(part), _at(store, part), 123) for part in ("a9a", "a9a.t"))
    return Official(x, y, x_test, y_test, None)


def _tiny_imagenet(store: Store) -> Official:
    classes = tuple(sorted(store.read("wnids.txt").decode().split()))
    index = {name: i for i, name in enumerate(classes)}
    train = [member for member in store.below("train") if member.endswith(".JPEG")]
    annotations = "val/val_annotations.txt"
    with formats.reading(_at(store, annotations), "a table of images and classes of wnids.txt"):
        rows = [line.split("\t") for line in store.read(annotations).decode().splitlines()]
        y, y_test = [index[member.split("/")[1]] for member in train], [index[row[1]] for row in rows]
    test = [f"val/images/{row[0]}" for row in rows]
    return Official(Jpegs(store, train, 64), np.array(y), Jpegs(store, test, 64), np.array(y_test), classes)


def _at(store: Store, member: str) -> str:
    return f"{store.where}: {member}"


# ----------------------------------------------------------------------------------------------------------- the table

FASHION = "T-shirt/top, Trouser, Pullover, Dress, Coat, Sandal, Shirt, Sneaker, Bag, Ankle boot"
CLASSES: dict[str, str | tuple[str, ...]] = {"MNIST": string.digits, "Fashion-MNIST": tuple(FASHION.split(", "))}
OPENINGS = {  # the first labels for training
    bytes((5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5)): "MNIST",
    bytes((9, 0, 0, 3, 0, 2, 7, 2, 5, 5, 0, 9)): "Fashion-MNIST",
}
MERGED = (
    string.digits + string.ascii_uppercase + "abdefghnqrt"
)  # EMNIST merges the other small letters with their capitals
EMNIST = {  # classes, and the number of the first
    "balanced": (MERGED, 0),
    "byclass": (string.digits + string.ascii_uppercase + string.ascii_lowercase, 0),
    "bymerge": (MERGED, 0),
    "digits": (string.digits, 0),
    "letters": (string.ascii_lowercase, 1),
    "mnist": (string.digits, 0),
}
MEDMNIST = {  # sets of 2D images with one label per image; MD5 of the 28 by 28 version
    "pathmnist": "a8b06965200029087d5bd730944a56c1",
    "dermamnist": "0744692d530f8e62ec473284d019b0c7",
    "octmnist": "c68d92d5b585d8d81f7112f81e2d0842",
    "pneumoniamnist": "28209eda62fecd6e6a2d98b1501bb15f",
    "retinamnist": "bd4c0672f1bba3e3a89f0e4e876791e4",
    "breastmnist": "750601b1f35ba3300ea97c75c52ff8f6",
    "bloodmnist": "7053d0359d879ad8a5505303e11de1dc",
    "tissuemnist": "ebe78ee8b05294063de985d821c1c34b",
    "organamnist": "68e3f8846a6bd62f0c9bf841c0d9eacc",
    "organcmnist": "b9ceb9546e10131b32923c5bbeaea2b1",
    "organsmnist": "9ab87b696fb54e2a387ebe992d6ed5f1",
}
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _mnist(name: str, title: str, bases: Sequence[str], md5: Sequence[str], *folders: str) -> CatalogEntry:
    remotes = tuple(
        Remote(f"{part}.gz", tuple(f"{base}{part}.gz" for base in bases), f"md5:{each}")
        for part, each in zip(IDX, md5, strict=True)
    )
    reader = partial(_idx, parts=IDX, classes=CLASSES[title], first=0, upright=True)
    return CatalogEntry(Published(name, title, remotes, (name, *folders)), IDX, reader)


def _emnist(split: str, classes: str, first: int) -> CatalogEntry:
    urls = ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",)
    remote = Remote("gzip.zip", urls, "md5:58c8d27c78d21e728a6bc7b3cc06412e")
    name = f"emnist-{split}"
    parts = tuple(f"{name}-{part.replace('t10k', 'test')}" for part in IDX)
    published = Published(name, f"EMNIST {split}", (remote,), ("emnist", "EMNIST/raw", "gzip"), "gzip")
    return CatalogEntry(published, parts, partial(_idx, parts=parts, classes=classes, first=first, upright=False))


def _cifar_entry(classes: int, md5: str, top: str, train: tuple[str, ...], test: str, *keys: str) -> CatalogEntry:
    file = f"cifar-{classes}-python.tar.gz"
    remote = Remote(file, (f"https://www.cs.toronto.edu/~kriz/{file}",), f"md5:{md5}")
    published = Published(f"cifar{classes}", f"CIFAR-{classes}", (remote,), (f"cifar{classes}", top), top)
    return CatalogEntry(published, (*train, test), lambda store: _cifar(store, train, test, *keys))


def _medmnist_entry(name: str, md5: str) -> CatalogEntry:
    file = f"{name}.npz"
    remote = Remote(file, (f"https://zenodo.org/records/10519652/files/{file}?download=1",), f"md5:{md5}")
    return CatalogEntry(Published(name, name, (remote,), ("medmnist",)), (file,), partial(_medmnist, file=file))


SETS: dict[str, CatalogEntry] = {
    "mnist": _mnist(
        "mnist",
        "MNIST",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        (
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "d53e105ee54ea40749a09fcbcd1e9432",
            "9fb629c4189551a2d022fa330f9573f3",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
        "MNIST/raw",
    ),
    "fashion-mnist": _mnist(
        "fashion-mnist",
        "Fashion-MNIST",
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        (
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "25c81989df183df01b3e8a0aad5dffbe",
            "bef4ecab320f06d8554ea6380940ec79",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
        "FashionMNIST/raw",
    ),
    **{f"emnist-{split}": _emnist(split, *rest) for split, rest in EMNIST.items()},
    "cifar10": _cifar_entry(
        10,
        "c58f30108f718f92721af3b95e74349a",
        "cifar-10-batches-py",
        tuple(f"data_batch_{k}" for k in range(1, 6)),
        "test_batch",
        *("batches.meta", "labels", "label_names"),
    ),
    "cifar100": _cifar_entry(
        100,
        "eb9058c3a382ffc7106e4002c42a8d85",
        "cifar-100-python",
        ("train",),
        "test",
        *("meta", "fine_labels", "fine_label_names"),
    ),
    **{name: _medmnist_entry(name, md5) for name, md5 in MEDMNIST.items()},
    "tiny-imagenet": CatalogEntry(
        Published(
            "tiny-imagenet",
            "Tiny-ImageNet",
            (
                Remote(
                    "tiny-imagenet-200.zip",
                    ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
                    "md5:90528d7ca1a48142e341f4ef8d21d0de",
                ),
            ),
            ("tiny-imagenet", "tiny-imagenet-200"),
            "tiny-imagenet-200",
        ),
        ("wnids.txt", "val/val_annotations.txt"),
        _tiny_imagenet,
    ),
    "a9a": CatalogEntry(
        Published(
            "a9a",
            "Adult (a9a)",
            tuple(
                Remote(part, (f"https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/{part}",))
                for part in ("a9a", "a9a.t")
            ),
            ("a9a",),
        ),
        ("a9a", "a9a.t"),
        _a9a,
    ),
}
ALIASES = {"adult": "a9a"}
NAMES = (*SETS, *ALIASES, *glue.TASKS)
IMAGE_SETS = tuple(name for name in SETS if name != "a9a")

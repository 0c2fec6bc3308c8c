"""`sordino features`: images to features, by a frozen network."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from sordino.cli.show import add_device, add_json, bar, check_json, command, console, emit
from sordino.cli.sweep import check_device
from sordino.errors import SordinoError

ABOUT = """
The network must be trained on public data, and it is not changed. So each record is mapped independently of all
others, which costs no privacy. --mean and --std are constants of the network (default: ImageNet's), not statistics of
your data.
"""


def add(commands: Any) -> None:
    parser = command(
        commands,
        "features",
        act,
        "turn images into features by a frozen network",
        "sordino features --data cifar10 --network resnet20 --weights resnet20.safetensors --out cifar10.npz\n"
        "sordino features --data pathmnist --network resnet50 --weights resnet50.pt --size 224 --out path.npz\n"
        "sordino features --data cifar100 --module net.pt --out public.npz --stats public_stats.npz\n"
        "sordino run --data cifar10.npz --public-stats public_stats.npz",
    )
    parser.description = f"{parser.description}\n{ABOUT}"
    parser.add_argument("--data", required=True, metavar="NAME", help="a published set of images: cifar10, mnist …")
    parser.add_argument("--network", metavar="NAME", help="resnet20, resnet44, resnet50 or vgg16")
    parser.add_argument("--weights", metavar="FILE", help="state dict of the network: .pt or .safetensors")
    parser.add_argument(
        "--module", metavar="FILE", help="instead of --network and --weights: a module saved by torch.jit.save"
    )
    parser.add_argument("--out", required=True, metavar="FILE", help=".npz with x_train, y_train, x_test, y_test")
    parser.add_argument(
        "--stats",
        metavar="FILE",
        help="also write mean, cov and n of the training features, for --public-stats of a run. Use it for PUBLIC data "
        "only: statistics of private data are a release that no budget pays for",
    )
    parser.add_argument("--mean", metavar="R,G,B", help="mean per channel, of pixels in [0, 1] (default: ImageNet's)")
    parser.add_argument("--std", metavar="R,G,B", help="standard deviation per channel (default: ImageNet's)")
    parser.add_argument("--size", type=int, metavar="N", help="resize to N by N (default: pad to 32 by 32 at least)")
    parser.add_argument("--batch", type=int, default=256, metavar="N", help="images at a time (default: 256)")
    add_device(parser)
    parser.add_argument(
        "--data-dir", metavar="DIR", help="folder of the set's files (also: $SORDINO_DATA, or the cache)"
    )
    add_json(parser)


def act(arguments: argparse.Namespace) -> int:
    check_json(arguments)
    _check(arguments)
    import numpy as np

    from sordino.data import backbones, catalog
    from sordino.errors import nearest

    if arguments.data not in catalog.IMAGE_SETS:
        raise SordinoError(
            f"--data: '{arguments.data}' is not a set of images.{nearest(arguments.data, catalog.IMAGE_SETS)}"
        )
    normal = {"mean": _channels(arguments.mean, "--mean"), "std": _channels(arguments.std, "--std", positive=True)}
    normal = {key: value for key, value in normal.items() if value is not None}
    if arguments.module:
        module = backbones.script(arguments.module)
    else:
        module = backbones.network(arguments.network, arguments.weights)
    images = catalog.read(arguments.data, arguments.data_dir)
    start = time.perf_counter()
    x_train, x_test = _extract(arguments, module, (images.x_train, images.x_test), normal)
    np.savez_compressed(arguments.out, x_train=x_train, y_train=images.y_train, x_test=x_test, y_test=images.y_test)
    if arguments.stats:
        backbones.save_statistics(arguments.stats, x_train)
    summary = {
        "data": arguments.data,
        "network": arguments.network or arguments.module,
        "features": x_train.shape[1],
        "train": len(x_train),
        "test": len(x_test),
        "out": arguments.out,
        "stats": arguments.stats,
        "seconds": time.perf_counter() - start,
    }
    if not emit(arguments, summary):
        page = console()
        page.print(
            f"{len(x_train):,} training and {len(x_test):,} test images of {arguments.data}: {x_train.shape[1]:,} "
            f"features each by {summary['network']}, {summary['seconds']:.1f} s",
            markup=False,
        )
        page.print(f"written to {arguments.out}", markup=False)
        if arguments.stats:
            page.print(
                f"statistics in {arguments.stats}: a release that no budget pays for, if the data are private",
                markup=False,
            )
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Before any work."""
    if bool(arguments.module) == bool(arguments.network) or bool(arguments.network) != bool(arguments.weights):
        raise SordinoError("--network: give --network and --weights, or --module alone.")
    for flag, path in (("--out", arguments.out), ("--stats", arguments.stats)):
        if path is None:
            continue
        if not path.endswith(".npz"):
            raise SordinoError(f"{flag}: '{path}' should end in .npz.")
        if not Path(path).absolute().parent.is_dir():
            raise SordinoError(f"{flag}: there is no directory for '{path}'; make it first.")
    for flag, number in (("--batch", arguments.batch), ("--size", arguments.size)):
        if number is not None and number < 1:
            raise SordinoError(f"{flag}: {number} must be at least 1.")
    check_device(arguments.device)


def _channels(text: str | None, flag: str, positive: bool = False) -> tuple[float, ...] | None:
    """One number, or one a channel."""
    if text is None:
        return None
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        values = ()
    if len(values) not in (1, 3) or (positive and min(values) <= 0):
        raise SordinoError(f"{flag}: '{text}' must be {'positive ' if positive else ''}numbers: R,G,B or one for all.")
    return values


def _extract(arguments: argparse.Namespace, module: Any, parts: Any, normal: dict[str, Any]) -> list[Any]:
    """Both parts, with a bar on stderr."""
    from sordino.data.backbones import extract

    with bar(arguments.data, sum(map(len, parts))) as progress:
        return [
            extract(
                module,
                part,
                arguments.batch,
                arguments.device,
                progress,
                size=arguments.size,
                **normal,
            )
            for part in parts
        ]

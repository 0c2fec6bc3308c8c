"""A package that adds methods, models and a transport from outside, by the entry points in `install`.

`halved` is server-side gradient descent whose steps shrink; `overclaims` asks for one gradient more than it declares.
`narrow` is a small network; `mixing` lets the records of a batch see each other, which no clip can mend.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from sordino.core import Kind, Local, Method, Query, Rule, Stage, Trust, Unit
from sordino.methods import MethodEntry
from sordino.models.torch_model import TorchModel


def halved(*, unit: Unit = Unit.RECORD, clip: float = 1.0, lr: float = 0.5) -> Method:
    """theta <- theta - lr G / (1 + t)."""
    stage = Stage(
        Local(lambda ask, broadcast, memory, cache: ask.gradient(broadcast.theta)),
        Rule(lambda theta, facts, before: (), lambda g, state, theta, t: (-lr / (1 + t) * g, state)),
        (Query(Kind.GRADIENT, clip),),
    )
    return Method("dp-halved", unit, (stage,), frozenset((unit, trust) for trust in Trust))


def overclaims(*, unit: Unit = Unit.RECORD, clip: float = 1.0) -> Method:
    """Asks twice and declares one call."""
    right = halved(unit=unit, clip=clip)
    local = Local(lambda ask, broadcast, memory, cache: ask.gradient(broadcast.theta) + ask.gradient(broadcast.theta))
    return right._replace(name="dp-overclaims", stages=(right.stages[0]._replace(local=local),))


def narrow(features: int, classes: int, *, width: int = 4, seed: int = 0) -> TorchModel:
    """One hidden layer."""
    torch.manual_seed(seed)
    layers = nn.Sequential(nn.Linear(features, width), nn.Tanh(), nn.Linear(width, classes))
    return TorchModel(layers, shape=(features,))


class Mixing(nn.Module):
    """Adds the mean over the batch to each record."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + x.mean(0))


def mixing(features: int, classes: int) -> TorchModel:
    """A model whose records are not computed apart from each other."""
    return TorchModel(Mixing(features, classes), shape=(features,))


def coordinate(folder: Path, *, hosts: Sequence[str], bind: str, port: int) -> Iterator[dict[str, object]]:
    """A transport that refuses to start."""
    yield {"what": "failed", "why": f"example transport, port {port}"}


def join(path: Path, link: str, authority: Path, *, port: int) -> Iterator[dict[str, object]]:
    """A transport that never connects."""
    yield from ()


HALVED = MethodEntry(halved, "example", "no paper", (Unit.RECORD,))


def install(folder: Path, version: str = "1.0") -> Path:
    """Lay this module out in `folder` as an installer would, without one: the module and its .dist-info."""
    info = folder / f"sordino_example-{version}.dist-info"
    info.mkdir(parents=True)
    (folder / "sordino_example.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sordino-example\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(
        "[sordino.methods]\n"
        "dp-halved = sordino_example:HALVED\n"
        "dp-overclaims = sordino_example:overclaims\n"
        "dp-broken = sordino_example:missing\n"
        "[sordino.models]\n"
        "narrow = sordino_example:narrow\n"
        "mixing = sordino_example:mixing\n"
        "[sordino.transports]\n"
        "example = sordino_example\n"
    )
    return folder

"""A package that adds one method from outside: what `sordino.plugins` finds by the entry point in `install`.

`halved` is server-side gradient descent whose steps shrink; `overclaims` asks for one gradient more than it declares.
"""

from pathlib import Path

from sordino.core import Kind, Local, Method, Query, Rule, Stage, Trust, Unit
from sordino.methods import MethodEntry


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
    )
    return folder

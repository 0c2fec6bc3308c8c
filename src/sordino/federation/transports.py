"""How a federation's messages travel: Flower, or a transport of another package.

A transport is a module (or object) with the two functions of `Deployment`, found by the entry point
`sordino.transports` (`sordino.plugins`). It carries bytes. Sites sign and mask what they send, check every message
against the terms of the run, and pay before a message leaves, so a dishonest transport can delay a run or lose it, but
it cannot spend more privacy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from sordino import plugins
from sordino.errors import SordinoError, nearest

FLOWER = "flower"


class Deployment(Protocol):
    """The processes of a coordinator and of a site."""

    def coordinate(self, folder: Path, *, hosts: Sequence[str], bind: str, port: int) -> Iterator[dict[str, Any]]:
        """Run the coordinator in its folder; yields the lines of its progress until the run finished or failed."""

    def join(self, path: Path, link: str, authority: Path, *, port: int) -> Iterator[dict[str, Any]]:
        """Run the site of a site.toml; yields the lines of its log. It never ends by itself."""


def deployment(name: str = FLOWER) -> Deployment:
    """The transport of this name.

    Args:
        name: `flower`, or the name of an entry point of the group `sordino.transports`.

    Returns:
        What starts the processes of a coordinator or of a site.

    Raises:
        SordinoError: The name is unknown, or the package lacks one of the two functions.
    """
    if name == FLOWER:
        from sordino.federation.flower import deploy

        return deploy
    others = plugins.found(plugins.TRANSPORTS)
    if name not in others:
        raise SordinoError(f"--transport: '{name}' is unknown.{nearest(name, [FLOWER, *others])}")
    loaded = others[name].load()
    for function in ("coordinate", "join"):
        if not callable(getattr(loaded, function, None)):
            raise SordinoError(f"--transport: '{name}' of {others[name].about} has no function {function}.")
    return cast(Deployment, loaded)

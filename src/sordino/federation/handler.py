"""What a site's worker calls for every message. Environment variables name the site's file:

SORDINO_SITE_FILE             site.toml
SORDINO_SITES, SORDINO_SITE   or: a folder of sites, and the name of one of them
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from sordino.errors import SordinoError
from sordino.federation.config import SiteConfig
from sordino.federation.site import Site

HANDLER = "sordino.federation.handler:handle"


def file() -> Path:
    if path := os.environ.get("SORDINO_SITE_FILE"):
        return Path(path)
    folder, name = os.environ.get("SORDINO_SITES"), os.environ.get("SORDINO_SITE")
    if not (folder and name):
        raise SordinoError("SORDINO_SITE_FILE is not set; set it to the path of site.toml in the worker's environment.")
    return Path(folder) / name / "site.toml"


@lru_cache(1)
def site(path: Path, changed: tuple[tuple[str, int], ...]) -> Site:
    return Site(SiteConfig.read(path))


def times(path: Path) -> tuple[tuple[str, int], ...]:
    """When the settings of the site changed: site.toml, and the roster and the schema beside it."""
    return tuple((str(each), each.stat().st_mtime_ns) for each in sorted({path, *path.parent.glob("*.toml")}))


def answer(path: Path, request: bytes) -> bytes:
    """The reply of the site that `path`, its site.toml, describes, by its current rules: settings are read again after
    a change."""
    return site(path, times(path)).answer(request)


def handle(request: bytes) -> bytes:
    """The reply of the site that the environment names."""
    return answer(file(), request)

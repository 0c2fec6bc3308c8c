"""What a site's worker calls for every letter. The site's file is named by the environment it was started in:

SORDINO_SITE_FILE             site.toml
SORDINO_SITES, SORDINO_SITE   or a folder of sites, and the name of one of them
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
    if named := os.environ.get("SORDINO_SITE_FILE"):
        return Path(named)
    folder, name = os.environ.get("SORDINO_SITES"), os.environ.get("SORDINO_SITE")
    if not (folder and name):
        raise SordinoError("SORDINO_SITE_FILE is not set: name the site's site.toml where its worker is started.")
    return Path(folder) / name / "site.toml"


@lru_cache(1)
def site(path: Path, changed: int) -> Site:
    return Site(SiteConfig.read(path))


def handle(letter: bytes) -> bytes:
    """By the site's rules as they stand now: site.toml is read again when it was changed."""
    path = file()
    return site(path, path.stat().st_mtime_ns).answer(letter)

"""What a site's worker calls for every letter. The site's file is named by the environment it was started in:

SORDINO_SITE_FILE             site.toml
SORDINO_SITES, SORDINO_SITE   or a folder of sites, and the name of one of them
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from sordino.core import SordinoError
from sordino.federation.config import SiteConfig
from sordino.federation.site import Site

HANDLER = "sordino.federation.handler:handle"


@cache
def site() -> Site:
    if file := os.environ.get("SORDINO_SITE_FILE"):
        return Site(SiteConfig.read(file))
    folder, name = os.environ.get("SORDINO_SITES"), os.environ.get("SORDINO_SITE")
    if not (folder and name):
        raise SordinoError("SORDINO_SITE_FILE is not set: name the site's site.toml where its worker is started.")
    return Site(SiteConfig.read(Path(folder) / name / "site.toml"))


def handle(letter: bytes) -> bytes:
    return site().answer(letter)

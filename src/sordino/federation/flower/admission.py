"""The check of a site before it joins, as a process of its own.

    python -m sordino.federation.flower.admission SITE.toml AUTHORITY.pem

It refuses the key of another site, a limit above the ledger's and an authority that has ended, stores a new limit, and
prints the site's name. `join` waits for months, and does not need the libraries in memory that this check needs.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sordino.errors import SordinoError
from sordino.federation.config import SiteConfig
from sordino.federation.site import Site
from sordino.federation.site_data import SiteData
from sordino.federation.tls import days_left, end_of


def admit(path: Path, authority: Path) -> str:
    """The name of the site.

    Raises:
      SordinoError: site.toml or the ledger is wrong, identity.key is another site's, or the authority has ended.
    """
    if days_left(authority) <= 0:
        raise SordinoError(
            f"--authority: '{authority}' ended on {end_of(authority):%d %b %Y}; ask the coordinator for the new "
            "tls/authority.pem."
        )
    config = SiteConfig.read(path)
    if config.path(config.identity).exists():
        _ = SiteData(config).identity  # before anything is written for another site
    Site(config)
    return config.name


def main() -> int:
    try:
        print(admit(Path(sys.argv[1]), Path(sys.argv[2])))
    except (SordinoError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

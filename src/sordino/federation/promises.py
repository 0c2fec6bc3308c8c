"""What open studies cost a site. What was not charged yet of that is promised to them.

A study is agreed to only if all of its rounds fit into the budget, so what they will cost is not left for others. The
ledger does not hold promises: they follow from the terms of the studies that have a place in the queue.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from sordino.evidence.charges import whole_run
from sordino.evidence.spent import Charge
from sordino.federation.config import SiteConfig
from sordino.federation.study_queue import StudyQueue
from sordino.federation.terms import Terms


def cost(terms: Terms, mine: int, account: str) -> list[Charge]:
    """What all rounds of a run cost a site."""
    return [entry._replace(who=account) for entry in whole_run(terms.plan, mine, terms.run)]


def of_open_studies(config: SiteConfig) -> list[Charge]:
    """What all rounds of the open studies of a site cost, read from its folder. The records are not read.

    It takes time, so call it before the ledger is opened to read: a ledger to which a site writes is not read for long.

    Raises:
      SordinoError: the terms of an open study cannot be read.
    """
    found: list[Charge] = []
    for name in StudyQueue(config.folder, config.most_studies, config.study_idle).open_studies():
        folder = config.folder / "runs" / name
        try:
            text, account = (folder / "terms.json").read_text(encoding="utf-8"), (folder / "account").read_text()
        except FileNotFoundError:  # it was withdrawn just now
            continue
        terms = _terms(text, config.weights_folder)
        if config.name in terms.names:
            found += cost(terms, terms.names.index(config.name), account)
    return found


def of_owner(path: Path) -> list[Charge]:
    """The same for the site whose ledger this is, if the site.toml beside it says so; otherwise nothing."""
    config = SiteConfig.read(path.parent / "site.toml")
    return of_open_studies(config) if config.path(config.ledger).resolve() == path.resolve() else []


@lru_cache(maxsize=8)
def _terms(text: str, weights: str) -> Terms:
    """Terms with their plan, which takes time to calibrate; a status page asks for it again and again."""
    return Terms.read(text, weights)

"""README.txt in the folders of a federation: which files may leave them, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FEDERATION = """A whole federation on one machine. In a real one, every folder below is on another machine.

coordinator/  the coordinator. coordinator/run/README.txt says which of its files may be published.
sites/NAME/   one site each, with its records and keys. sites/NAME/README.txt says which of its files may leave.
witness/      of each site, how far its ledger is, so that an older copy is noticed. On real machines it is elsewhere.
flower/       keys and logs of the connections. Nothing in it may leave this machine.

Do not copy or publish this folder as a whole: it holds the training records (sites/*/data{suffix}) and the test records
(coordinator/test{suffix}).

    sordino verify SITE_FOLDER/runs/RUN      checks the certificate of a site
    sordino ledger show SITE_FOLDER          shows what the site has spent
"""
SITE = """The folder of the site {name}. Only the files listed here may leave it:

node.pub                the site's public key, for the coordinator
roster.toml             the public cards of all sites
runs/*/README.txt       says which files of a finished run may be published

Everything else stays here, readable by its owner alone: the records (named in site.toml), identity.key, data.key and
node (secret keys), ledger.db (what was released, and what it cost), events.jsonl (the site's own log), and site.toml
(the site's rules). Back up ledger.db and all keys, and restore only the newest ledger.db: the site refuses an older one
or none, because a file outside of this folder (witness, `sordino federate doctor` names it) knows how far it was.
"""
UNFINISHED = """This run is not finished. Nothing in this folder may leave it. When the run is finished, this file says
what may.
"""
CERTIFIED = """These files may be published. They are computed from noised releases and public settings:

model.safetensors   the model
adapter/            where there is one: the model's adapters, as the library peft reads them
certificate.json    the certificate, for machines (sordino verify .)
statement.md        the same in words
spec.toml           the settings of the run
terms.json          what all sites agreed to: their names, numbers of records and requested budgets
evaluation/         where there is one: the same about the evaluation on test records
schema.toml         where there is one: the schema that noised counts completed

"""
UNCERTIFIED = """NOTHING IN THIS FOLDER MAY LEAVE IT: the run is not certified.
Reason: {reasons}.

"""
SITE_RUN = """Everything else stays at the site: metrics.jsonl (scores on the site's own test records, which no noise
hides), memory and data (depend on the records), noise and secret (from which the noise follows), survivors-*.json (what
was revealed to the coordinator).
"""
COORDINATOR_RUN = """Everything else stays with the coordinator: progress.jsonl (who answered when, and scores on the
coordinator's test records, which no noise hides), checkpoint and offers.json (to continue the run).

Nobody signed this certificate, because the coordinator has no key. The certificates of the sites are signed.
"""


def of_run(cert: Mapping[str, Any] | None, rest: str) -> str:
    """README.txt of a run.

    Args:
      cert: its certificate; None while the run is not finished.
      rest: what is said about the files that stay, `SITE_RUN` or `COORDINATOR_RUN`.
    """
    if cert is None:
        return UNFINISHED
    if not cert["certified"]:
        return UNCERTIFIED.format(reasons="; ".join(cert["reasons"])) + rest
    return CERTIFIED + rest

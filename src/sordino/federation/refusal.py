"""The codes of a refusal, each with its constant text. The details stay in the site's own log."""

from __future__ import annotations

REASONS = {
    "malformed": "the message cannot be read, or is not of the agreed form",
    "unknown-run": "the site has not agreed to the terms of this run",
    "policy": "the site does not take part in such a run",
    "changed": "the terms or the data are not the agreed ones",
    "replayed": "another message about this round was answered already",
    "order": "this round is not the next one",
    "approval": "a person at the site has to approve this study first; start the coordinator again then",
    "queued": "the site is busy with another study",
    "queue-full": "too many studies wait for this site; try again later",
    "budget": "the site's own limit does not allow it, with what it spent and what it promised to other studies",
    "storage": "the site cannot write its ledger",
    "rolled-back": "the site's ledger is older than one it had before: its folder is an old copy; use the newest",
    "failed": "the site failed; its own log says why",
}

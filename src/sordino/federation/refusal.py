"""What a site says when it says no: a code and a constant text. The detail stays in the site's own log."""

from __future__ import annotations

REASONS = {
    "malformed": "the letter cannot be read, or is not of the agreed form",
    "unknown-run": "no terms of this run were agreed upon",
    "policy": "the site does not take part in such a run",
    "changed": "the terms, or the data, are not those agreed upon",
    "replayed": "another letter about this round was answered already",
    "order": "this round is not to come next",
    "budget": "the site's own limit does not allow it",
    "storage": "the site cannot write its ledger",
    "failed": "the site failed",
}

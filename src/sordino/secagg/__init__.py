"""Secure aggregation with pairwise masks (Bonawitz et al. 2017): the server sees the sum of vectors and no single one.

It has no network code, only functions over messages. A round is `offer`, `masked`, `confirm` and `reveal` at the sites
and `open_sum` at the server; see `round`. With more than 256 sites masks are shared along a graph; see `sparse`.
"""

from sordino.secagg import sparse
from sordino.secagg.keys import Card, Identity, Roster
from sordino.secagg.messages import Masked, Offer, Reveal, confirms, read_masked, read_offer, read_reveal, shown_sha256
from sordino.secagg.round import check, confirm, mask, masked, offer, open_sum, reveal, seals
from sordino.secagg.session import Member, Session

__all__ = [
    "Card",
    "Identity",
    "Masked",
    "Member",
    "Offer",
    "Reveal",
    "Roster",
    "Session",
    "check",
    "confirm",
    "confirms",
    "mask",
    "masked",
    "offer",
    "open_sum",
    "read_masked",
    "read_offer",
    "read_reveal",
    "reveal",
    "seals",
    "shown_sha256",
    "sparse",
]

"""How many bytes a message may have, from the terms of its run. Whoever reads a message compares before it decodes."""

from __future__ import annotations

from sordino.core import Kind
from sordino.federation.terms import Terms
from sordino.privacy.mechanisms.mask_graph import ALL_PAIRS

SMALL = 2**20  # bytes of a message that carries no model and no update, and of a message's head
PER_SITE = 2**16  # bytes of what a message carries for each site: keys, shares and signatures
PER_NAME = 2**9  # bytes of what it carries for each site where masks are shared along a graph: a name, a signature
PARTS = 64  # vectors or matrices of the model's size in one message
_EVALUATION = 2**23  # bytes of the counts of an evaluation, whatever the model
_MATRICES = (Kind.CURVATURE, Kind.FISHER, Kind.GRAM)


def small_bytes(sites: int) -> int:
    """Bytes of a message without a model, between a coordinator and one of so many sites."""
    return SMALL + PER_SITE * min(sites, ALL_PAIRS) + PER_NAME * max(0, sites - ALL_PAIRS)


UNKNOWN = small_bytes(ALL_PAIRS)  # bytes of a message to a site that belongs to no run of the site


def message_bytes(terms: Terms) -> int:
    """Bytes of the largest message of a run: a model with the server's extras, an update, or an evaluation.

    A method whose answers are matrices sends at most squares of the model's size.
    """
    size = terms.dimension + len(terms.classes) + 1
    matrices = any(query.kind in _MATRICES for stage in terms.plan.stages for query in stage.queries)
    tests = _EVALUATION if terms.evaluation else 0
    return small_bytes(len(terms.names)) + 8 * PARTS * size + (8 * PARTS * size * size if matrices else 0) + tests


def request_bytes(terms: Terms, counts: int = 0) -> int:
    """Bytes of the largest request to the link: a message, and what the transport adds.

    Args:
      terms: what the coordinator's folder would propose for a training.
      counts: cells that a run counts in place of a training.
    """
    return message_bytes(terms) + _EVALUATION + 8 * PARTS * counts + SMALL

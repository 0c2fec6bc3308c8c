"""Which sites share masks when there are too many for all pairs: a random graph that all sites derive themselves.

Its key is the hash of the session: of the run, its terms, the roster and the parameters. So the server chooses no
site's neighbours; `privacy/mechanisms/mask_graph.py` says how dense the graph is, and why that is enough even if the
server tries many terms.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sordino.privacy.mechanisms.mask_graph import Parameters
from sordino.secagg.derive import derive, joined, stream


def context(parameters: Parameters) -> bytes:
    """The parameters, as part of every derived key."""
    named = parameters
    return joined("graph", named.edge, named.shares, named.near, named.committee, named.quorum)


def adjacency(context: bytes, sites: int, edge: int) -> NDArray[np.bool_]:
    """The graph of a session: row i marks the neighbours of site i."""
    words = np.frombuffer(stream(derive(context, "graph of masks"), sites * (sites - 1)), "<u2")
    graph, at = np.zeros((sites, sites), np.bool_), 0
    for i in range(sites - 1):
        row = words[at : at + sites - 1 - i] < edge
        graph[i, i + 1 :], graph[i + 1 :, i] = row, row
        at += row.size
    return graph


def committee(context: bytes, sites: int, size: int) -> frozenset[int]:
    """The positions of the sites that confirm survivors: those with the smallest hashes."""
    key = derive(context, "committee")
    words = stream(key, 16 * sites)
    order = sorted(range(sites), key=lambda i: words[16 * i : 16 * i + 16])
    return frozenset(order[:size])


def core(graph: NDArray[np.bool_], sites: NDArray[np.bool_], least: int) -> NDArray[np.bool_]:
    """The largest part of some sites in which each has `least` neighbours within the part."""
    part = sites.copy()
    while (thin := part & (graph[:, part].sum(1) < least)).any():
        part &= ~thin
    return part

"""DP-FTRL (Kairouz et al. 2021): gradient descent whose noise is correlated over rounds, so that it cancels in sums.

The sensitivity of the whole stream depends on how often a record takes part, and follows from the schedule: every round
for full participation (70 rounds of a tree: 90.34 clips, not 2.65 as for a single round), every b-th round for
cyclic:b. Only noise is correlated, so every trust model is proved. If only sums are visible, all clients add to one
stream in every round, so the noise also cancels across cohorts. Against an untrusted server each client has its own
stream. Trees and banded matrices are dense factors of up to 4,096 rounds. `inverse-root` combines the last draws, so
that a round needs as many of them as it has bands, for any number of rounds. Under full participation no correlated
noise is better than independent noise on a schedule (`correlated.schedule`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from sordino.core import Kind, Method, Noise, Stream, Unit
from sordino.errors import SordinoError, check_known
from sordino.methods.fedgd import server_gradient
from sordino.privacy.accounting import correlated
from sordino.privacy.accounting.inverse_root import MOST_BANDS, InverseRoot
from sordino.rules import heavy_ball

MECHANISMS = ("auto", "tree", "inverse-root", "banded", "schedule", "independent")
ESTIMATES = ("full", "below", "none")


def stream(
    mechanism: str,
    estimate: str,
    restart: int,
    band: int,
    rounds: int,
    inverse_band: int = 128,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
) -> Noise:
    """The factors for so many rounds."""
    long = rounds > correlated.MOST_CORRELATED_ROUNDS
    if mechanism == "inverse-root" or (mechanism == "auto" and long):
        return InverseRoot(inverse_band, rounds)
    if mechanism == "schedule":
        return correlated.schedule(rounds)
    if mechanism == "independent":
        return correlated.independent(rounds)
    if mechanism == "banded":
        return correlated.banded(rounds, band, momentum, weight_decay)
    if estimate == "full":
        return correlated.EfficientTree(rounds, restart)
    return correlated.NodeTree(rounds, honaker=estimate == "below", restart=restart)


def ftrl(
    *,
    unit: Unit = Unit.RECORD,
    clip: float = 1.0,
    lr: float = 1.0,
    mechanism: str = "auto",
    honaker: str = "full",
    restart: int = 0,
    band: int = 10,
    inverse_band: int = 128,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    tail: float = 0.0,
) -> Method:
    """theta_t = theta_0 - lr sum_{s <= t} G_s, the noise of the sums from a tree, a banded matrix or a schedule.

    Args:
        unit: Whose data are protected, one record or one whole client.
        clip: Bound on the norm of a record's gradient, or of a client's message.
        lr: Step size of the server.
        mechanism: `tree`, `banded` (for cyclic:b with b >= band, where only sums are visible; fitted to `momentum` and
            `weight_decay`), `inverse-root` (any number of rounds), `schedule` (the best for full participation) or
            `independent`. `auto` is `tree` up to 4,096 rounds, and `inverse-root` above.
        honaker: How the nodes of a tree are combined: `full`, `below` or `none`.
        restart: Rounds per tree; 0 for one tree.
        band: Width of the banded matrix, at least 1.
        inverse_band: Draws that a round of `inverse-root` combines, from 1 to 4,096.
        momentum: Heavy-ball momentum; it starts again at a restart.
        weight_decay: Part of the model that the server takes away in each round, in [0, 1), whatever `lr` is.
        tail: Part of the rounds, from the end, whose iterates are averaged into the model handed out; 0 for none.

    Returns:
        The method.

    Raises:
        SordinoError: An option is out of its range.

    Guarantee:
        Released: The stream of one gradient per round and client, with noise that is correlated over rounds.
        Sensitivity: Of the whole stream: the norm of the sum of the encoder's columns (absolute values) over the
            rounds in which a unit takes part, times clip (joins or leaves) or 2 clip (is replaced).
        Proved for: record and client level; untrusted-server, secure-aggregation and trusted-server.
        Reason: Only the noise is correlated: the released stream is a function of one Gaussian release of the encoded
            stream. Where only sums are visible, all clients add to one stream.

    Example:
        >>> from sordino.core import Adjacency, Unit
        >>> from sordino.methods import build
        >>> method = build("dp-ftrl", mechanism="tree")
        >>> method.stages[0].queries[0].sensitivity(Adjacency.REPLACE_ONE, Unit.RECORD)
        2.0
    """
    for name, value, allowed in (("mechanism", mechanism, MECHANISMS), ("honaker", honaker, ESTIMATES)):
        check_known(name, value, allowed)
    if restart < 0 or band < 1:
        raise SordinoError(f"restart, band: {restart} and {band} must be at least 0 and 1.")
    if not 1 <= inverse_band <= MOST_BANDS:
        raise SordinoError(f"inverse_band: {inverse_band} must lie between 1 and {MOST_BANDS:,}.")
    rules = (heavy_ball(momentum, restart),) if momentum else ()
    method = server_gradient("dp-ftrl", unit, clip, lr, rules, tail, weight_decay)
    (stage,) = method.stages
    factors = partial(stream, mechanism, honaker, restart, band, inverse_band=inverse_band)
    common = Stream(mechanism, partial(factors, momentum=momentum, weight_decay=weight_decay))
    released = Kind.GRADIENT if unit is Unit.RECORD else Kind.DELTA
    queries = tuple(replace(query, noise=common) if query.kind is released else query for query in stage.queries)
    return method._replace(stages=(stage._replace(queries=queries),))

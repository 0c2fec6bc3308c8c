"""Differentially private federated learning, exactly accounted.

    from sordino import Privacy, Plan, Records, Linear, build, simulate, source

Everything here needs torch, numpy and scipy alone.
"""

from sordino.core import (
    Adjacency,
    Divisor,
    Kind,
    Local,
    Method,
    OverspentError,
    Privacy,
    Query,
    Round,
    Rule,
    SordinoError,
    Stage,
    Trust,
    Unit,
)
from sordino.data.partition import split
from sordino.data.shard import Records
from sordino.data.sources import Dataset, load
from sordino.engines import reference, simulate
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.privacy import gaussian
from sordino.privacy.certificate import certificate
from sordino.privacy.noise import source
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan
from sordino.privacy.statement import statement
from sordino.privacy.verify import verify

__version__ = "0.1.0"

__all__ = [
    "Adjacency",
    "Dataset",
    "Divisor",
    "Kind",
    "Linear",
    "Local",
    "Method",
    "OverspentError",
    "Participation",
    "Plan",
    "Privacy",
    "Query",
    "Records",
    "Round",
    "Rule",
    "SordinoError",
    "Stage",
    "Trust",
    "Unit",
    "build",
    "certificate",
    "gaussian",
    "load",
    "reference",
    "simulate",
    "source",
    "split",
    "statement",
    "verify",
]

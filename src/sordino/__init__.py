"""Differentially private federated learning, exactly accounted.

    from sordino import Privacy, Plan, Records, Linear, build, simulate, source

Everything here needs torch, numpy and scipy alone, but for `FederatedClassifier`, which needs scikit-learn.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from sordino.core import Adjacency, Divisor, Kind, Local, Method, Privacy, Query, Round, Rule, Stage, Trust, Unit
from sordino.data.partition import split
from sordino.data.records import Records
from sordino.data.sources import Dataset, load
from sordino.engines import reference, simulate
from sordino.errors import OverspentError, SordinoError
from sordino.methods import build
from sordino.models.linear import Linear
from sordino.privacy.accounting import gaussian
from sordino.privacy.evidence.certificate import certificate
from sordino.privacy.evidence.statement import statement
from sordino.privacy.evidence.verify import verify
from sordino.privacy.mechanisms.random import source
from sordino.privacy.participation import Participation
from sordino.privacy.plan import Plan

if TYPE_CHECKING:
    from sordino.estimators import FederatedClassifier as FederatedClassifier
    from sordino.estimators import UnpaidSearchWarning as UnpaidSearchWarning

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

LAZY = ("FederatedClassifier", "UnpaidSearchWarning")  # not in __all__: an import of everything must do without them


def __getattr__(name: str) -> object:
    if name not in LAZY:
        raise AttributeError(f"module 'sordino' has no attribute '{name}'")
    if find_spec("sklearn") is None:
        raise ImportError(f"{name} needs scikit-learn: pip install 'sordino[sklearn]'")
    from sordino import estimators

    return getattr(estimators, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *(LAZY if find_spec("sklearn") else ())})

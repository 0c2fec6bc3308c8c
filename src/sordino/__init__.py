"""Differentially private federated learning, exactly accounted.

A run in Python, from data to a certificate:

    >>> import sordino as so
    >>> data = so.load("digits")                                                       # or a .csv, .parquet, .npz file
    >>> records = so.Records.of(data.x_train, data.y_train, so.split(data, "iid", clients=4))
    >>> model = so.Linear(features=64, outputs=10)                                     # or TorchModel(your_module)
    >>> plan = so.Plan(so.build("dp-fedgd"), rounds=5, sizes=records.sizes, privacy=so.Privacy(epsilon=4.0))
    >>> source = so.source(seed=None)                                                  # cryptographic noise
    >>> for result in so.simulate.run(plan, model, records, source):
    ...     predicted = model.predict(result.model, data.x_test)
    >>> so.certificate(plan, source, version=so.__version__)["certified"]
    True

- promise: `Privacy`, `Unit`, `Adjacency`, `Trust`
- data: `load`, `split`, `Records`; `Schema` describes the columns of a table
- methods: `build`, or your own from `Query`, `Local`, `Rule`, `Stage` and `Method`
- noise and account: `Plan`, `Participation`, `source`, `gaussian`
- engines: `simulate` (fast), `reference` (plain)
- evidence: `certificate`, `statement`, `verify`
- a finished run: `load_run` (its model with `predict`; `load` reads data), `evaluate_privately` (noised test results)
- scikit-learn: `FederatedClassifier`, `FederatedRegressor`, `FederatedCox`; `certificate_of` a fitted pipeline

On the command line: `sordino --help`. Tutorials and the whole reference: `make docs`.

Every name is imported when it is first used: `import sordino` itself imports neither torch nor numpy. The names in
`__all__` need torch, numpy and scipy alone (`load_run`, when called, also safetensors and cryptography);
what `sordino.estimators` holds (`FederatedClassifier`, …) also needs scikit-learn.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from sordino.version import __version__ as __version__

if TYPE_CHECKING:  # what `_HOME` says, for type checkers and editors; a test compares the two
    from sordino.core import (
        Adjacency,
        Divisor,
        Kind,
        Local,
        Method,
        Privacy,
        Query,
        Round,
        Rule,
        Stage,
        Trust,
        Unit,
    )
    from sordino.data.partition import split
    from sordino.data.records import Records
    from sordino.data.schema import Schema
    from sordino.data.sources import Dataset, load
    from sordino.engines import reference, simulate
    from sordino.errors import OverspentError, SordinoError
    from sordino.estimators import FederatedClassifier as FederatedClassifier
    from sordino.estimators import FederatedCox as FederatedCox
    from sordino.estimators import FederatedRegressor as FederatedRegressor
    from sordino.estimators import UnpaidSearchWarning as UnpaidSearchWarning
    from sordino.estimators import UnpaidStepWarning as UnpaidStepWarning
    from sordino.estimators import certificate_of as certificate_of
    from sordino.evidence.certificate import certificate
    from sordino.evidence.statement import statement
    from sordino.evidence.verify import verify
    from sordino.methods import build
    from sordino.models.linear import Linear
    from sordino.privacy.accounting import gaussian
    from sordino.privacy.mechanisms.random import source
    from sordino.privacy.participation import Participation
    from sordino.privacy.plan import Plan
    from sordino.training.predict import load_run
    from sordino.training.private_evaluation import evaluate_privately

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
    "Schema",
    "SordinoError",
    "Stage",
    "Trust",
    "Unit",
    "build",
    "certificate",
    "evaluate_privately",
    "gaussian",
    "load",
    "load_run",
    "reference",
    "simulate",
    "source",
    "split",
    "statement",
    "verify",
]

_HOME = {
    "sordino.core": "Adjacency Divisor Kind Local Method Privacy Query Round Rule Stage Trust Unit",
    "sordino.data.partition": "split",
    "sordino.data.records": "Records",
    "sordino.data.schema": "Schema",
    "sordino.data.sources": "Dataset load",
    "sordino.engines": "reference simulate",
    "sordino.errors": "OverspentError SordinoError",
    "sordino.estimators": "FederatedClassifier FederatedCox FederatedRegressor UnpaidSearchWarning UnpaidStepWarning "
    "certificate_of",
    "sordino.methods": "build",
    "sordino.models.linear": "Linear",
    "sordino.privacy.accounting": "gaussian",
    "sordino.evidence.certificate": "certificate",
    "sordino.evidence.statement": "statement",
    "sordino.evidence.verify": "verify",
    "sordino.privacy.mechanisms.random": "source",
    "sordino.privacy.participation": "Participation",
    "sordino.privacy.plan": "Plan",
    "sordino.training.predict": "load_run",
    "sordino.training.private_evaluation": "evaluate_privately",
}
_MODULE = {name: module for module, names in _HOME.items() for name in names.split()}
_SKLEARN = _HOME["sordino.estimators"].split()  # not in __all__: an import of everything must do without them


def __getattr__(name: str) -> object:
    if name not in _MODULE:
        # With name and object, Python's traceback adds which name was probably meant.
        raise AttributeError(f"module 'sordino' has no attribute '{name}'", name=name, obj=sys.modules[__name__])
    if name in _SKLEARN and find_spec("sklearn") is None:
        raise ImportError(f"{name} needs scikit-learn: pip install 'sordino[sklearn]'")
    module = import_module(_MODULE[name])
    value = getattr(module, name) if hasattr(module, name) else import_module(f"{_MODULE[name]}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE} - set(() if find_spec("sklearn") else _SKLEARN))

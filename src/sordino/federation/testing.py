"""The evaluation at the end of a federation: sites count their own test records, and the coordinator learns how good
the model is.

The sites' test records are those that `test_fraction` sets aside before training. Their noised counts are one release
after the last round, under masks where rounds are masked, and paid from a budget of their own: site.toml's
`evaluation_epsilon` limits what all evaluations on these data may spend.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino import files
from sordino.core import Broadcast, Privacy, Unit
from sordino.data.records import Records
from sordino.data.sources import Dataset
from sordino.engines.oracle import encode_integers
from sordino.engines.reference import oracle
from sordino.engines.schedule import RoundPlan, record_choice, round_plans
from sordino.errors import SordinoError
from sordino.evidence.certificate import certificate
from sordino.evidence.signing import sha256
from sordino.evidence.statement import issue
from sordino.federation.terms import DRAWN, Terms, carried_out
from sordino.models.hazards import Hazards
from sordino.models.tally import Tally
from sordino.privacy.mechanisms.random import Secure, Source
from sordino.privacy.plan import Plan
from sordino.training import evaluation_plan
from sordino.training.evaluate import task_of
from sordino.training.evaluation_plan import Settings
from sordino.training.folder import EVALUATION_FILE
from sordino.training.metrics import Task
from sordino.version import __version__

ACCOUNT = "tests"  # the account of the test records in a site's ledger ends in this


def account(who: str) -> str:
    """Who pays for evaluations: the test records, beside the account that pays for training."""
    return f"{who} {ACCOUNT}"


def plan_name(run: str) -> str:
    """How a ledger names the evaluation of a run."""
    return f"{run} evaluation"


class AgreedEvaluation:
    """What the terms say about the evaluation: every party computes the same plan from them.

    Raises:
      SordinoError: the labels are numbers without a public range, or the plan cannot be calibrated.
    """

    def __init__(self, terms: Terms, label_unit: float = 1.0) -> None:
        self.terms = terms
        spec = terms.resolved.privacy
        privacy = replace(spec, epsilon=terms.evaluation, client_epsilon={})
        task = task_of(terms.model)
        intervals = terms.model.outputs if isinstance(terms.model, Hazards) else 0
        if task is Task.SEQUENCES:
            raise SordinoError(
                "evaluation_epsilon: the model learns text without labels, and a noised perplexity is not served; "
                "remove the key."
            )
        if task in (Task.QUANTITIES, Task.COUNTS) and not terms.schema:
            raise SordinoError(
                "evaluation_epsilon: the labels are numbers without a public range, so errors have no bound; describe "
                "the tables by a schema whose target has a range, or remove evaluation_epsilon."
            )
        bins = evaluation_plan.choose_bins(task, terms.tests, privacy, intervals=intervals)
        more: dict[str, Any] = {"intervals": intervals, "schema_sha256": terms.schema}
        self.settings = Settings(task, bins, 0.5, privacy, label_unit=label_unit, **more)
        if terms.secure:
            self.settings = self.settings._replace(dropouts=terms.dropouts, colluders=terms.colluders)

    @cached_property
    def plan(self) -> Plan:
        return evaluation_plan.plan_of(self.settings, self.terms.tests)

    @property
    def dimension(self) -> int:
        return self.tally.dimension

    @cached_property
    def tally(self) -> Tally:
        return evaluation_plan.tally_of(self.settings, self.terms.model)

    @cached_property
    def round_plan(self) -> RoundPlan:
        model: Any = self.tally
        return next(round_plans(self.plan, model))

    def answer(self, mine: int, dataset: Dataset, theta: Tensor, source: Source) -> Any:
        """A site's noised counts: a vector, or integers under secure aggregation."""
        return self._answer(
            OneClient.of(mine, dataset, self.terms.number, self.settings.privacy, source), mine, theta, source
        )

    def answer_nothing(self, mine: int, theta: Tensor, source: Source) -> Any:
        """The noise of the counts around zero, where the data give none: that a site fails may tell of its data."""
        terms, privacy = self.terms, self.settings.privacy
        rows = privacy.person_records if privacy.unit is Unit.PERSON else 1
        return self._answer(
            OneClient(mine, Records.absent(terms.features, terms.label_type, terms.number, rows)), mine, theta, source
        )

    def _answer(self, own: OneClient, mine: int, theta: Tensor, source: Source) -> Any:
        model: Any = self.tally
        ask = oracle(model, own, self.round_plan, mine, source, add_noise=not self.terms.secure)  # type: ignore[arg-type]
        message = self.round_plan.stage.local.compute(ask, Broadcast(theta), (), ())
        numbers = ask.released(message)
        assert isinstance(message, Tensor)
        if not bool(torch.isfinite(message).all()):
            raise SordinoError("evaluation: the counts are not finite.")
        if not self.terms.secure:
            return message
        return encode_integers(self.plan, self.round_plan, mine, message, numbers, source)

    def store(self, out: Path, aggregate: np.ndarray, came: Sequence[int], model: Path) -> Any:
        """Write the coordinator's folder of the evaluation, and return the metrics."""
        found = evaluation_plan.measure(self.settings, self.plan, aggregate, came)
        found |= {"tally": np.asarray(aggregate, float).tolist(), "came": list(came)}
        out.mkdir(exist_ok=True)
        spec = self.spec(sha256(model))
        files.write(out / "spec.toml", spec.encode())
        files.write(out / EVALUATION_FILE, (json.dumps(found, indent=2) + "\n").encode())
        cert = certificate(
            self.plan,
            Secure(),  # the sites draw the noise; the coordinator draws none
            version=__version__,
            spec_sha256=sha256(out / "spec.toml"),
            model_sha256=sha256(model),
            metrics_sha256=sha256(out / EVALUATION_FILE),
            names=self.terms.names,
            execution=carried_out(self.plan.clients),
            assumes=[DRAWN, *evaluation_plan.assumptions(self.settings)],
        )
        cert, text = issue(cert)
        files.write(out / "statement.md", text.encode())
        files.write(out / "certificate.json", (json.dumps(cert, indent=2) + "\n").encode())
        return found

    def spec(self, model_sha256: str) -> str:
        """The content of spec.toml in the folder of the evaluation."""
        return self.settings.toml(model_sha256)


class OneClient:
    """A site's test records, at the index that the plan gives this site."""

    def __init__(self, mine: int, records: Records) -> None:
        self.mine, self.records, self.x = mine, records, records.x

    @staticmethod
    def of(mine: int, dataset: Dataset, number: torch.dtype, privacy: Privacy, source: Source) -> OneClient:
        """The test records of a data set.

        Raises:
          SordinoError: they are not grouped as the promise needs it.
        """
        records = Records.of(
            dataset.x_test,
            dataset.y_test,
            np.zeros(len(dataset.y_test), int),
            person=dataset.person_test,
            per_person=privacy.person_records,
            choose=record_choice(source, privacy),
            dtype=number,
            copy=False,
        )
        records.check_unit(privacy)
        return OneClient(mine, records)

    def shard(self, i: int) -> Any:
        assert i == self.mine
        return self.records.shard(0)

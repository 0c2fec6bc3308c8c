"""Audits of DP-FedGD on low-rank adapters, one for each variant of what is trained."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from sordino.checks.audit import attacks
from sordino.core import Privacy
from sordino.methods import build
from sordino.methods.adapters import with_adapters
from sordino.models.lora import adapt
from sordino.models.torch_model import TorchModel

METHOD = "dp-fedgd"


class _Adaptable(torch.nn.Module):
    """The layers of `attacks.audited_network`, of which the first is adapted and the last is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.head = attacks.audited_layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(torch.nn.functional.leaky_relu(self.query(x)))
        return scores


def adapted_network(variant: str) -> TorchModel:
    """The small network that methods are attacked on, with an adapter of rank 2."""
    return attacks.on_numbers(adapt(_Adaptable(), rank=2, dropout=0.0, variant=variant))


def audit(variant: str, privacy: Privacy, *, rounds: int | None = None, **options: Any) -> attacks.Audit:
    """Attack DP-FedGD on adapters.

    Args:
      variant: one of `LORA_VARIANTS`.
      privacy: the promise to attack.
      rounds: of the whole run.
      options: as in `attacks.audit`.

    Returns:
      The lower bounds, beside the certified epsilon.

    Raises:
      SordinoError: an argument is out of its range, or this combination cannot be audited.
    """
    rounds = attacks.ROUNDS if rounds is None else rounds
    method = with_adapters(build(METHOD, privacy.unit), variant, rounds)
    fixed = sum(stage.rounds or 0 for stage in method.stages)
    attack = partial(attacks.audit, f"{METHOD} adapters={variant}", privacy, method=method, rounds=rounds - fixed)
    return attack(model=adapted_network(variant), **options)

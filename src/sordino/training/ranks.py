"""A run of `sordino run --distributed`: what the ranks agree on before it, and what ranks other than 0 do.

Rank 0 does all that one process does: it pays, writes files, evaluates and prints. The others compute their part of
each round, and are silent. See `engines.distributed`.
"""

from __future__ import annotations

import dataclasses
import secrets

from sordino.engines import simulate
from sordino.engines.distributed import Team
from sordino.errors import SordinoError
from sordino.evidence.signing import code_sha256
from sordino.lazy import torch
from sordino.training.run import PreparedRun
from sordino.training.spec import Spec


def joint_spec(spec: Spec, team: Team, resumed: bool = False) -> Spec:
    """The spec with the schedule of rank 0: where it names no seed, every process would draw its own participants.

    It also says on how many machines the ranks are, for the certificate.

    Args:
        spec: What the user wrote.
        team: The ranks.
        resumed: The run goes on; its spec is fixed.

    Returns:
        The spec that all ranks resolve.

    Raises:
        SordinoError: The spec asks for something that is not shared out, or the ranks have different code.
    """
    team.check_agreement({"sources of the package": f"{code_sha256()} {torch.__version__}".encode()})
    if spec.private_statistics is not None:
        raise SordinoError("private_statistics: ranges are found in one process; leave --distributed out.")
    if spec.person_choice == "random" and spec.seed is None:
        raise SordinoError(
            "person_choice: every rank would draw other records of a person; use person_choice = first, or leave "
            "--distributed out."
        )
    if team.machines > (spec.machines or 1):
        if resumed:
            raise SordinoError(
                f"machines: the run began on {spec.machines or 1}, which its spec says, and the ranks are on "
                f"{team.machines}; start no more."
            )
        spec = dataclasses.replace(spec, machines=team.machines)
    drawn = int.from_bytes(team.from_first(secrets.token_bytes(16)), "little") >> 2  # 126 bits, as `resolve` draws
    known = spec.seed is not None or spec.schedule_seed is not None
    return spec if known else dataclasses.replace(spec, schedule_seed=drawn)


def check(run: PreparedRun, team: Team) -> None:
    """Refuse what is not shared out, and ranks with different settings, plans, records or models. Nothing is paid yet.

    Args:
        run: This rank's run.
        team: The ranks.

    Raises:
        SordinoError: Names what is refused, or the rank and what differs.
    """
    team.check_agreement({"settings": run.resolved.portable.toml().encode()})
    team.check(run.plan, run.model, run.records, run.model.init())


def follow(run: PreparedRun, team: Team) -> None:
    """Compute this rank's part of every round. Nothing is written, and nothing is shown.

    Args:
        run: The run, as rank 0 has it.
        team: The ranks; this one is not rank 0.

    Raises:
        SordinoError: Another rank ended, or computes something else.
    """
    start, checkpoint = team.told()
    for _ in simulate.run(run.plan, run.model, run.records, run.source, start=start, checkpoint=checkpoint, team=team):
        pass

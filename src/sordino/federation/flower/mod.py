"""A mod that makes an existing Flower app private: only a clipped and noised update of a site leaves it.

    app = ClientApp(mods=[PrivateUpdates(clip=1.0, epsilon=8.0, rounds=10)])

The mod sees what the app returns, not its records, so it protects the whole site (`unit = "client"`), against a server
that sees every message. Every round is paid from the ledger of the site, whose folder the operator of the site names
in the environment ($SORDINO_SITE): the app chooses neither the ledger nor its limit. Metrics and numbers of examples,
which depend on the records, are not sent. The mod uses the public interface of Flower only.

It does not protect against the author of the app, who can leave the mod out. Where the code that a server sends is not
trusted, `sordino federate join` runs only installed code.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from sordino import files
from sordino.core import Kind, Privacy, Trust, Unit
from sordino.engines.oracle import clipped, noised, standard_noise
from sordino.errors import LedgerError, OverspentError, SordinoError
from sordino.evidence.certificate import certificate
from sordino.evidence.charges import charges
from sordino.evidence.spent import Charge
from sordino.evidence.statement import issue
from sordino.federation.config import SiteConfig
from sordino.federation.site_data import SiteData
from sordino.methods import build
from sordino.privacy import calibration
from sordino.privacy.mechanisms.random import Address, Secure
from sordino.privacy.plan import Plan
from sordino.version import __version__

log = logging.getLogger(__name__)

SITE = "SORDINO_SITE"  # the environment variable with the site's folder
REFUSED = "the site does not take part"  # the details stay in the site's log
Next = Callable[[Message, Context], Message]


class PrivateUpdates:
    """The mod.

    Args:
      clip: bound on the norm of a site's update, over all arrays together.
      epsilon: of a whole run; it must fit into what the site has left.
      rounds: training rounds of a run. Later ones are refused.
      site: the folder with site.toml; None: the folder that $SORDINO_SITE names.

    Raises:
      SordinoError: an argument is out of its range.
    """

    def __init__(self, *, clip: float, epsilon: float, rounds: int, site: Path | None = None) -> None:
        self.clip, self.epsilon, self.rounds, self.folder = clip, epsilon, rounds, site
        build("dp-fedavg", unit=Unit.CLIENT, clip=clip)
        if not rounds >= 1:
            raise SordinoError(f"rounds: {rounds} must be at least 1.")

    def __call__(self, message: Message, context: Context, call_next: Next) -> Message:
        kind = message.metadata.message_type.split(".")[0]
        if kind == "evaluate":  # scores are functions of the records; nothing is computed
            return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)
        if kind != "train":
            return _refusal(message)
        try:
            return self._train(message, context, call_next)
        except (SordinoError, OverspentError, LedgerError, OSError):
            log.exception("the site does not take part")
            return _refusal(message)

    def _train(self, message: Message, context: Context, call_next: Next) -> Message:
        """One round: check the budget, run the app, pay, and send the noised update."""
        if len(message.content.array_records) != 1:
            raise SordinoError("message: a training message needs one ArrayRecord, the model.")
        ((name, sent),) = message.content.array_records.items()
        run = f"flower-{message.metadata.run_id}"
        with self._site.ledger() as ledger:
            who = ledger.account()
            t = next(k for k in range(self.rounds + 1) if not ledger.charged(run, who, k))
            if t == self.rounds:
                raise SordinoError(f"rounds: {self.rounds} were agreed, and one more is asked for.")
            config, left = self._site.config, range(t, self.rounds)
            limit = config.epsilon - config.reserve_epsilon, config.delta  # the reserve is for runs that people approve
            ledger.afford([entry for k in left for entry in self._charges(who, k, run)], limit)
            self._keep_settings(run)
            try:
                update = _update(sent, call_next(message, context))
            except (Exception, SystemExit):  # that an app fails may depend on its records, so noise must hide it
                log.exception("the app failed; an update of zero is noised in place of its own")
                update = torch.zeros(sum(array.size for array in sent.to_numpy_ndarrays()), dtype=torch.float64)
            ledger.charge(self._charges(who, t, run))
            self._certify(run, t + 1, ledger.head(), len(ledger))
        arrays = _added(sent, self._noised(update, t))
        return Message(RecordDict({name: arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    def _keep_settings(self, run: str) -> None:
        """Store what the first round of a run was noised with: other settings would make its certificate wrong."""
        out = self._site.runs / run
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = json.dumps({"clip": self.clip, "epsilon": self.epsilon, "rounds": self.rounds}).encode()
        if not (out / "settings.json").exists():
            files.write(out / "settings.json", own)
        elif (out / "settings.json").read_bytes() != own:
            raise SordinoError(
                "clip, epsilon, rounds: they differ from those of earlier rounds of this run; keep them."
            )

    def _noised(self, update: Tensor, t: int) -> Tensor:
        stage = self.plan.stages[0]
        number = next(k for k, query in enumerate(stage.queries) if query.kind is Kind.DELTA)
        std = float(calibration.client_std(self.plan, 0, number)[0])
        draw = standard_noise(Secure(), stage.queries[number], Address(0, t, number), 0, tuple(update.shape))
        return noised(clipped(update, self.clip), draw, std, secret=True)

    def _charges(self, who: str, t: int, run: str) -> list[Charge]:
        return [entry._replace(who=who) for entry in charges(self.plan, 0, t, run)]

    def _certify(self, run: str, done: int, head: str, rows: int) -> None:
        """The certificate of the rounds so far, in the site's folder."""
        out, site = self._site.runs / run, self._site
        cert = certificate(
            self.plan,
            Secure(),
            version=__version__,
            done=done,
            ledger_head=head,
            ledger_rows=rows,
            names=(site.config.name,),
            execution=f"as a mod of a Flower app; this is what {site.config.name} states",
            assumes=["The app sends nothing but its replies, and the mod is in it."],
        )
        cert, text = issue(cert, site.signer)
        files.write(out / "statement.md", text.encode())
        files.write(out / "certificate.json", (json.dumps(cert, indent=2) + "\n").encode())

    @cached_property
    def plan(self) -> Plan:
        """What leaves: one clipped message per round, each with its own noise."""
        config = self._site.config
        privacy = Privacy(self.epsilon, config.delta, Unit.CLIENT, trust=Trust.UNTRUSTED_SERVER)
        return Plan(build("dp-fedavg", unit=Unit.CLIENT, clip=self.clip), self.rounds, (1,), privacy)

    @cached_property
    def _site(self) -> SiteData:
        """The site's own settings, and what they allow."""
        place = self.folder or os.environ.get(SITE)
        if place is None:
            raise SordinoError(f"site: no folder is named; set ${SITE} to the folder with site.toml.")
        config = SiteConfig.read(Path(place) / "site.toml")
        allowed = config.run_epsilon or config.epsilon
        for fine, what in (
            (config.unit == Unit.CLIENT, 'site.toml needs unit = "client", because the mod protects the whole site'),
            (self.epsilon <= allowed, f"epsilon {self.epsilon:g} is above {allowed:g}, which site.toml allows"),
            (self.rounds <= config.most_rounds, f"rounds {self.rounds}; most_rounds is {config.most_rounds}"),
            (not config.methods or "dp-fedavg" in config.methods, "site.toml does not allow dp-fedavg"),
            (Trust.UNTRUSTED_SERVER in config.trust, "site.toml does not allow untrusted-server"),
            (not config.ask, "site.toml has ask = true, and the mod asks nobody; use a folder whose site.toml has not"),
        ):
            if not fine:
                raise SordinoError(f"site: {what}.")
        return SiteData(config)


def _update(sent: ArrayRecord, reply: Message) -> Tensor:
    """The app's model minus the one that was sent, as one vector.

    Raises:
      SordinoError: the app failed, or returned other arrays.
    """
    if reply.has_error() or len(reply.content.array_records) != 1:
        raise SordinoError("reply: it has an error, or not one ArrayRecord.")
    (found,) = reply.content.array_records.values()
    before, after = sent.to_numpy_ndarrays(), found.to_numpy_ndarrays()
    shapes = [[array.shape for array in arrays] for arrays in (before, after)]
    if list(sent.keys()) != list(found.keys()) or shapes[0] != shapes[1]:
        raise SordinoError("reply: its arrays are not those of the model that was sent.")
    return torch.cat([torch.from_numpy(_flat(new) - _flat(old)) for old, new in zip(before, after, strict=True)])


def _flat(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float64).reshape(-1)


def _added(sent: ArrayRecord, update: Tensor) -> ArrayRecord:
    """The model that was sent plus the update. It follows from what is released."""
    arrays, begin = [], 0
    for old in sent.to_numpy_ndarrays():
        part = update[begin : begin + old.size].numpy().reshape(old.shape)
        kind = old.dtype if old.dtype.kind == "f" else np.float64
        arrays.append((old.astype(np.float64) + part).astype(kind))
        begin += old.size
    named = {key: ArrayRecord([array]) for key, array in zip(sent.keys(), arrays, strict=True)}
    return ArrayRecord({key: next(iter(record.values())) for key, record in named.items()})


def _refusal(message: Message) -> Message:
    return Message(Error(code=1, reason=REFUSED), reply_to=message)

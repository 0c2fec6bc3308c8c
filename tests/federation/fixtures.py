"""A federation in one process: sites and a coordinator that exchange messages by function calls."""

import json
import tomllib
from dataclasses import replace

import numpy as np
import tomli_w
from sklearn.datasets import load_digits

from sordino import wire
from sordino.errors import SordinoError
from sordino.evidence.ledger import NOTES, Ledger
from sordino.federation.config import SiteConfig
from sordino.federation.coordinator import Coordinator
from sordino.federation.derived import stated
from sordino.federation.site import Site
from sordino.federation.terms import Terms, federated, written
from sordino.secagg import Identity, Roster

SETTINGS = ("dropouts", "colluders", "names", "seed")
CLASSES = [str(k) for k in range(10)]


class Loopback:
    """Messages by function calls; `fault(node, message, reply)` may change a reply, or lose it (None)."""

    def __init__(self, answers, fault=None):
        self.answers, self.fault, self.log = answers, fault, []

    def sites(self):
        return list(self.answers)

    def exchange(self, requests, seconds, enough=None):
        found = {}
        for node, request in requests.items():
            reply = self.answers[node](request) if self.fault is None else self.fault(node, request, self.answers[node])
            self.log.append((node, request, reply))
            if reply is not None:
                found[node] = reply
        return found


def few(sites):
    """Records of four features and three classes, 24 a site."""
    rng = np.random.default_rng(1)
    y = np.arange(24 * sites) % 3
    return rng.normal(4 * np.eye(4)[y], 4), y


class LocalFolders:
    """Folders of a coordinator and of its sites."""

    def __init__(self, folder, spec, names=("north", "south", "west"), seed=7, tiny=False, **settings):
        self.folder, self.names, self.seed, self.tiny = folder, names, seed, tiny
        self.coordinator = folder / "coordinator"
        self.coordinator.mkdir(parents=True)
        x, y = few(len(names)) if tiny else load_digits(return_X_y=True)
        rng = np.random.default_rng(0)
        order = rng.permutation(len(y))
        identities = [Identity.make(name) for name in names]
        self.roster = Roster(tuple(identity.card for identity in identities))
        shift = np.array([0, *[4 if tiny else 20] * (len(names) - 1), 0])
        edges = np.linspace(0, len(order), len(names) + 1).astype(int) + shift
        for k, (name, identity) in enumerate(zip(names, identities, strict=True)):
            place = self.place(name)
            place.mkdir()
            mine = order[edges[k] : edges[k + 1]]
            np.savez(place / "data.npz", x=(x[mine] / 16).astype(np.float32), y=y[mine])
            identity.save(place / "identity.key")
            self.roster.write(place / "roster.toml")
            self.configure(name)
        self.roster.write(self.coordinator / "roster.toml")
        self.spec = spec
        (self.coordinator / "spec.toml").write_text(tomli_w.dumps(spec))
        about = {"sites": list(names), "features": x.shape[1], "classes": self.classes}
        about |= {"deadline": 5.0, "patience": 5.0}
        self.about = about | settings
        (self.coordinator / "federation.toml").write_text(tomli_w.dumps(self.about))

    @property
    def classes(self):
        return CLASSES[: 3 if self.tiny else 10]

    def place(self, name):
        return self.folder / name

    def configure(self, name, **keys):
        own = {"name": name, "data": "data.npz", "epsilon": 50.0, "delta": 1e-3, "classes": self.classes}
        own |= {"most_studies": 100}  # tests leave studies open that they propose
        own |= {} if self.seed is None else {"seed": self.seed}
        (self.place(name) / "site.toml").write_text(tomli_w.dumps({**own, **keys}))

    def site(self, name):
        return Site(SiteConfig.read(self.place(name) / "site.toml"))

    def site_config(self, name):
        return SiteConfig.read(self.place(name) / "site.toml")

    def sites(self):
        return {100 + k: self.site(name).answer for k, name in enumerate(self.names)}

    def run(self, fault=None, answers=None):
        transport = Loopback(self.sites() if answers is None else answers, fault)
        coordinator = Coordinator(transport, self.coordinator)
        coordinator.run()
        return coordinator, transport

    # ------------------------------------------------------------------------------------------------ looking at sites

    def run_key(self, name):
        """A fresh key for a run, as the site says it at its hello."""
        return str(wire.decode(self.site(name).answer(wire.encode("hello", {"nonce": "0" * 64}))).fields["run_key"])

    def terms(self, spec=(), **changes):
        """As the coordinator would propose them, with some of the spec's keys and of the terms changed."""
        values = tomllib.loads(written(federated(self.spec))) | {"schedule_seed": 1}
        values = {k: v for k, v in (values | dict(spec)).items() if v is not None}
        secure = self.spec["trust"] == "secure-aggregation"
        made = Terms(
            run="ab" * 16,
            spec=tomli_w.dumps(values),
            names=tuple(self.names),
            sizes=tuple(self.site(name).records for name in self.names),
            requested_epsilons={},
            features=self.about["features"],
            classes=tuple(self.about["classes"]),
            dropouts=self.about.get("dropouts", 0),
            colluders=self.about.get("colluders", 1),
            roster=self.roster.sha256() if secure else "",
            run_keys=tuple(map(self.run_key, self.names)) if secure else (),
        )
        made = replace(made, **changes)
        try:
            return made if "derived" in changes else stated(made)
        except SordinoError:  # a site refuses these
            return made

    def ledger(self, name):
        return Ledger(self.place(name) / "ledger.db")

    def charged(self, name):
        """(run, round) of every charge, in order; each row of the ledger that carries a payload is one."""
        with self.ledger(name) as ledger:
            assert ledger.audit() == []
            return [(row.plan, row.round) for row in ledger.rows() if row.key and row.query not in NOTES]

    def events(self, name):
        path = self.place(name) / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def progress(self, what=None):
        lines = (self.coordinator / "run" / "progress.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if what in (None, line["what"])]

    def folder_of(self, name):
        (only,) = (path for path in (self.place(name) / "runs").iterdir() if not path.name.startswith("."))
        return only

    def certificate(self, name):
        return json.loads((self.folder_of(name) / "certificate.json").read_text())


class Talk:
    """The server's words to one site, message by message."""

    def __init__(self, site, terms):
        self.site, self.terms = site, terms

    def say(self, kind, fields, arrays=None):
        return wire.decode(self.site.answer(wire.encode(kind, fields, arrays)))

    def propose(self, terms=None):
        return self.say("terms", {"terms": (terms or self.terms).json()})

    def request(self, t, fields=(), arrays=(), word=None):
        """A round's; `None` takes a field or an array away."""
        theta = np.zeros(self.terms.model.size, str(self.terms.number).removeprefix("torch."))
        own = {"run": self.terms.run, "terms": self.terms.sha256(), "t": t, "extras": [] if word is None else 0}
        both = {"theta": theta} | ({} if word is None else {"extras0": word})
        return wire.encode(
            "round",
            {k: v for k, v in (own | dict(fields)).items() if v is not None},
            {k: v for k, v in (both | dict(arrays)).items() if v is not None},
        )

    def round(self, t, *args, **keys):
        return wire.decode(self.site.answer(self.request(t, *args, **keys)))

"""A federation in one process: sites and a coordinator that exchange letters by function calls."""

import numpy as np
import pytest
from sklearn.datasets import load_digits

from sordino.federation.config import SiteConfig
from sordino.federation.coordinator import Coordinator
from sordino.federation.site import Site
from sordino.secagg import Identity, Roster

CLASSES = [str(k) for k in range(10)]


class Loopback:
    """Letters by function calls; `fault(node, letter, reply)` may change a reply, or lose it (None)."""

    def __init__(self, answers, fault=None):
        self.answers, self.fault, self.log = answers, fault, []

    def sites(self):
        return list(self.answers)

    def exchange(self, letters, seconds, enough=None):
        found = {}
        for node, letter in letters.items():
            reply = self.answers[node](letter) if self.fault is None else self.fault(node, letter, self.answers[node])
            self.log.append((node, letter, reply))
            if reply is not None:
                found[node] = reply
        return found


class World:
    """Folders of a coordinator and of its sites."""

    def __init__(self, folder, spec, names=("north", "south", "west"), seed=7, **federation):
        self.folder, self.names, self.seed = folder, names, seed
        self.coordinator = folder / "coordinator"
        self.coordinator.mkdir(parents=True)
        data = load_digits()
        rng = np.random.default_rng(0)
        order = rng.permutation(len(data.target))
        identities = [Identity.make(name) for name in names]
        self.roster = Roster(tuple(identity.card for identity in identities))
        edges = np.linspace(0, len(order), len(names) + 1).astype(int) + np.array([0, *[20] * (len(names) - 1), 0])
        for k, (name, identity) in enumerate(zip(names, identities, strict=True)):
            place = self.place(name)
            place.mkdir()
            mine = order[edges[k] : edges[k + 1]]
            np.savez(place / "data.npz", x=(data.data[mine] / 16).astype(np.float32), y=data.target[mine])
            identity.save(place / "identity.key")
            self.roster.write(place / "roster.toml")
            self.configure(name)
        self.roster.write(self.coordinator / "roster.toml")
        import tomli_w

        (self.coordinator / "spec.toml").write_text(tomli_w.dumps(spec))
        about = {"sites": list(names), "features": 64, "classes": CLASSES, "deadline": 5.0, "patience": 5.0}
        (self.coordinator / "federation.toml").write_text(tomli_w.dumps(about | federation))

    def place(self, name):
        return self.folder / name

    def configure(self, name, **keys):
        import tomli_w

        own = {"name": name, "data": "data.npz", "epsilon": 50.0, "delta": 1e-3, "classes": CLASSES}
        own |= {} if self.seed is None else {"seed": self.seed}
        (self.place(name) / "site.toml").write_text(tomli_w.dumps({**own, **keys}))

    def site(self, name):
        return Site(SiteConfig.read(self.place(name) / "site.toml"))

    def sites(self):
        return {100 + k: self.site(name).answer for k, name in enumerate(self.names)}

    def run(self, fault=None, answers=None):
        transport = Loopback(self.sites() if answers is None else answers, fault)
        coordinator = Coordinator(transport, self.coordinator)
        coordinator.run()
        return coordinator, transport


@pytest.fixture
def world(tmp_path):
    def make(method="dp-fedsofim", trust="untrusted-server", rounds=4, **keys):
        spec = {"method": method, "rounds": rounds, "epsilon": 8.0, "delta": 1e-5, "trust": trust}
        federation = {k: keys.pop(k) for k in ("dropouts", "colluders", "names", "seed") if k in keys}
        return World(tmp_path / "world", spec | keys, **federation)

    return make

"""Trainings over a real link and real SuperNodes, on loopback, and their comparison with the simulator."""

import json
import os
import shutil
from pathlib import Path

import tomli_w
import torch
from fixtures import LocalFolders
from test_parity import simulated_rounds

import sordino
from sordino.federation.terms import Terms, against_terms
from sordino.training.artifacts import load_model
from sordino.training.verify_run import verify_run

CASES = {
    "dp-fedsofim": {},
    "dp-scaffold": {},
    "dp-fednew-fc": {},
    "fednewton": {"rounds": 5},
    "secure": {"method": "dp-fedsofim", "trust": "secure-aggregation"},
}
FEW = ["dp-scaffold", "secure"]


class Found:
    """What stands for a coordinator that ran in another process."""

    def __init__(self, folder):
        self.out = folder / "run"
        self.terms = Terms.read((self.out / "terms.json").read_text())


class Trainings:
    """Folders of sites, and of one coordinator per case. `coordinators.every` runs them in the server's process.

    server, site: environment variables of the server's process and of the workers.
    """

    def __init__(self, folder, cases, names=("north", "south", "west"), rounds=3):
        base = {"method": "dp-fedsofim", "rounds": rounds, "epsilon": 8.0, "delta": 1e-5, "trust": "untrusted-server"}
        self.federation = LocalFolders(folder / "federation", base, names, deadline=60.0, patience=60.0)
        for name in names:
            self.federation.configure(name, epsilon=200.0)
        self.folder = folder / "coordinators"
        self.places = [self.folder / f"{k}-{case}" for k, case in enumerate(cases)]
        for place, case in zip(self.places, cases, strict=True):
            shutil.copytree(self.federation.coordinator, place)
            (place / "spec.toml").write_text(tomli_w.dumps({**base, "method": case, **CASES[case]}))
        paths = (Path(__file__).parent, Path(sordino.__file__).parents[1])
        here = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
        self.server = {"SORDINO_FOLDER": str(self.folder), "SORDINO_SERVE": "coordinators:every", **here}
        self.site = {"SORDINO_SITES": str(self.federation.folder), **here}

    def compare(self, running):
        """Wait until all are trained: the models are the simulator's, and every site's certificate holds."""
        running.wait(lambda: (self.folder / "done").exists(), 400, "server", "link")
        for place in self.places:
            found = Found(place)
            _, theta, *_ = load_model(found.out / "model.safetensors")
            expected = simulated_rounds(self.federation, found)[-1].model
            torch.testing.assert_close(theta, expected, rtol=2e-6, atol=2e-6)
            lines = [json.loads(line) for line in (found.out / "progress.jsonl").read_text().splitlines()]
            assert all(len(line["came"]) == 3 for line in lines if line["what"] == "round")
            for name in self.federation.names:
                path = self.federation.place(name) / "runs" / found.terms.run / "certificate.json"
                assert verify_run(path, against_terms=against_terms).problems == []  # against spec and ledger too

"""Over a real link and real SuperNodes, on loopback: the models are the simulator's."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs sordino[flower]")

import tomli_w
from fixtures import LocalFolders
from test_parity import simulated_rounds

import sordino
from sordino.federation.flower.processes import LocalFederation
from sordino.federation.handler import HANDLER
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


@pytest.mark.parametrize("cases", [FEW, pytest.param(list(CASES), marks=pytest.mark.soak)], ids=["few", "all"])
def test_the_models_are_the_simulators(tmp_path, cases):
    """One federation runs all cases, because it takes half a minute to start."""
    base = {"method": "dp-fedsofim", "rounds": 3, "epsilon": 8.0, "delta": 1e-5, "trust": "untrusted-server"}
    federation = LocalFolders(tmp_path / "federation", base, deadline=60.0, patience=60.0)
    for name in federation.names:
        federation.configure(name, epsilon=200.0)
    places = tmp_path / "coordinators"
    for k, case in enumerate(cases):
        place = places / f"{k}-{case}"
        shutil.copytree(federation.coordinator, place)
        (place / "spec.toml").write_text(tomli_w.dumps({**base, "method": case, **CASES[case]}))
    paths = (Path(__file__).parent, Path(sordino.__file__).parents[1])
    here = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
    server = {"SORDINO_FOLDER": str(places), "SORDINO_SERVE": "coordinators:every", **here}
    site = {"SORDINO_SITES": str(federation.folder), **here}
    with LocalFederation(tmp_path / "flower", federation.names, handler=HANDLER, server=server, site=site) as running:
        running.run()
        running.wait(lambda: (places / "done").exists(), 400, "server", "link")
    for k, case in enumerate(cases):
        compare(federation, Found(places / f"{k}-{case}"))


def compare(federation, found):
    _, theta, *_ = load_model(found.out / "model.safetensors")
    torch.testing.assert_close(theta, simulated_rounds(federation, found)[-1].model, rtol=2e-6, atol=2e-6)
    lines = [json.loads(line) for line in (found.out / "progress.jsonl").read_text().splitlines()]
    assert all(len(line["came"]) == 3 for line in lines if line["what"] == "round")
    for name in federation.names:
        path = federation.place(name) / "runs" / found.terms.run / "certificate.json"
        assert verify_run(path, against_terms=against_terms).problems == []  # against its spec and its ledger too

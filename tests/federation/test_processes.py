"""Over a real link and real SuperNodes, on loopback: the models are the simulator's."""

import json
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs sordino[flower]")

import tomli_w
from test_parity import simulated
from worlds import World

from sordino.engines.flower.processes import Federation
from sordino.experiments.outcome import load_model
from sordino.federation.handler import HANDLER
from sordino.federation.terms import Terms
from sordino.privacy.verify import verify

CASES = {
    "dp-fedsofim": {},
    "dp-scaffold": {},
    "dp-fednew-fc": {},
    "fednewton": {"rounds": 5},
    "secure": {"method": "dp-fedsofim", "trust": "secure-aggregation"},
}


class Found:
    """What stands for a coordinator that ran in another process."""

    def __init__(self, folder):
        self.out = folder / "run"
        self.terms = Terms.read((self.out / "terms.json").read_text())


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("federation")
    base = {"method": "dp-fedsofim", "rounds": 3, "epsilon": 8.0, "delta": 1e-5, "trust": "untrusted-server"}
    world = World(folder / "world", base, deadline=60.0, patience=60.0)
    for name in world.names:
        world.configure(name, epsilon=200.0)
    places = folder / "coordinators"
    for k, (case, keys) in enumerate(CASES.items()):
        place = places / f"{k}-{case}"
        shutil.copytree(world.coordinator, place)
        (place / "spec.toml").write_text(tomli_w.dumps({**base, "method": case, **keys}))
    here = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    server = {"SORDINO_FOLDER": str(places), "SORDINO_SERVE": "serving:every", **here}
    site = {"SORDINO_SITES": str(world.folder), **here}
    with Federation(folder / "flower", world.names, handler=HANDLER, server=server, site=site) as running:
        running.run()
        running.wait(lambda: (places / "done").exists(), 240, "server", "link")
        yield world, {case: Found(places / f"{k}-{case}") for k, case in enumerate(CASES)}


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_the_simulators(federation, case):
    world, found = federation
    _, theta, *_ = load_model(found[case].out / "model.safetensors")
    torch.testing.assert_close(theta, simulated(world, found[case]), rtol=2e-6, atol=2e-6)
    lines = [json.loads(line) for line in (found[case].out / "progress.jsonl").read_text().splitlines()]
    assert all(len(line["came"]) == 3 for line in lines if line["what"] == "round")
    for name in world.names:
        cert = json.loads((world.place(name) / "runs" / found[case].terms.run / "certificate.json").read_text())
        assert verify(cert).problems == []

"""`flwr run` on a SuperLink and SuperNodes as Flower ships them, with sites behind sockets and by path."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from fixtures import LocalFolders
from stock import Deployment

from sordino.cli import main
from sordino.federation.progress import read_lines

pytestmark = [
    pytest.mark.skipif(find_spec("flwr") is None, reason="flwr is not installed: pip install 'sordino[flower-app]'"),
    pytest.mark.soak,
]


def study(place, **keys):
    spec = {"method": "dp-fedgd", "rounds": 5, "epsilon": 8.0, "delta": 1e-5, "trust": "untrusted-server"}
    about = {"deadline": 90.0, "patience": 120.0, "names": ("north", "south", "west"), "seed": None, "tiny": True}
    return LocalFolders(place / "f", spec | keys, **about)


@pytest.mark.parametrize("trust", ["untrusted-server", "secure-aggregation"])
def test_flwr_run_trains_and_every_site_has_a_certificate(fast, tmp_path, trust, capsys):
    made = study(Path(fast), trust=trust)
    for name in made.names:
        made.configure(name, witness=f"../{name}.witness")
    app = tmp_path / "app"
    assert main(["federate", "app", str(made.coordinator), "--out", str(app)]) == 0
    socket = Path(fast) / "north.sock"
    nodes = [f'sordino-socket="{socket}"', *(f'sordino-site="{made.place(n) / "site.toml"}"' for n in made.names[1:])]
    serve = [sys.executable, "-m", "sordino", "federate", "serve", str(made.place("north")), "--socket", str(socket)]
    with Deployment(tmp_path / "flower", nodes) as flower:
        door = subprocess.Popen(serve, env=flower.env)
        try:
            flower.wait(socket.exists, 60)
            out = tmp_path / "study"
            flower.flwr_run(app, f'rounds=2 epsilon=4.0 folder="{out}"')
            progress = out / "run" / "progress.jsonl"
            flower.wait(lambda: any('"finished"' in line or '"failed"' in line for line in read_lines(progress)), 400)
        finally:
            door.terminate()
            door.wait(10)
    lines = [json.loads(line) for line in read_lines(progress)]
    assert lines[-1]["what"] == "finished", lines
    assert len([line for line in lines if line["what"] == "round"]) == 2
    for name in made.names:
        cert = made.certificate(name)
        assert cert["certified"], cert["reasons"]
        assert cert["epsilon"] == pytest.approx(4.0, rel=1e-3)
        assert main(["verify", str(made.folder_of(name) / "certificate.json")]) == 0, capsys.readouterr()
    assert (out / "run" / "model.safetensors").exists()

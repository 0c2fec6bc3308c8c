"""Over a real link and real SuperNodes, on loopback: the models are the simulator's."""

import pytest

pytest.importorskip("flwr", reason="needs sordino[flower]")

from trainings import CASES, Trainings

from sordino.federation.flower.processes import LocalFederation
from sordino.federation.handler import HANDLER


@pytest.mark.soak  # two of the cases are trained in flower/test_federation.py
def test_the_models_are_the_simulators(tmp_path):
    """One federation runs all cases, because it takes half a minute to start."""
    made = Trainings(tmp_path, list(CASES))
    own = {"handler": HANDLER, "server": made.server, "site": made.site}
    with LocalFederation(tmp_path / "flower", made.federation.names, **own) as running:
        running.run()
        made.compare(running)

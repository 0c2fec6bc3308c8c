"""A thousand virtual sites in Flower's simulation make the model that our engine makes."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
SITES, ROUNDS = 1000, 2

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(find_spec("flwr") is None, reason="flwr is not installed: pip install 'sordino[flower-app]'"),
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'flwr[simulation]'"),
]


def test_a_thousand_virtual_sites_equal_the_engine(tmp_path):
    out = tmp_path / "virtual.json"
    command = [sys.executable, str(BENCHMARKS / "virtual.py"), "--sites", str(SITES), "--rounds", str(ROUNDS)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--out", str(out)], env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["came"] == [SITES] * ROUNDS
    assert found["largest"] > 1e-3
    assert found["difference"] <= 2e-6 * (1 + found["largest"])
    assert found["certificates"] == SITES
    assert found["epsilons"] == [8.0]

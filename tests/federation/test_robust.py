"""The trimmed mean: garbage cannot move it beyond the honest values, and it moves the plain mean as far as it likes."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sordino import wire
from sordino.cli import main
from sordino.errors import SordinoError
from sordino.federation.robust import trimmed_sum
from sordino.training.artifacts import load_model

FIVE = tuple("abcde")


@given(
    honest=st.lists(st.floats(-5, 5), min_size=2, max_size=8),
    garbage=st.lists(st.floats(-1e30, 1e30), max_size=3),
    seed=st.integers(0, 99),
)
def test_a_trimmed_sum_lies_between_honest_values(honest, garbage, seed):
    """Whatever the garbage and the weights are, the result lies between honest values, times the sum of weights."""
    trim = len(garbage)
    if 2 * trim >= len(honest) + trim:
        return
    rng = np.random.default_rng(seed)
    values = rng.permutation([*honest, *garbage])
    weights = rng.uniform(0.1, 1, len(values))
    updates = [torch.tensor([value, 1.0], dtype=torch.float64) for value in values]
    found = trimmed_sum(updates, list(weights), trim) / weights.sum()
    assert min(honest) - 1e-9 <= float(found[0]) <= max(honest) + 1e-9
    assert float(found[1]) == pytest.approx(1.0)


def test_without_trimming_it_is_the_weighted_sum():
    updates = [(torch.tensor([1.0, 2.0]), torch.eye(2)), (torch.tensor([3.0, 5.0]), 3 * torch.eye(2))]
    vector, matrix = trimmed_sum(updates, [0.25, 0.75], 0)
    assert torch.allclose(vector, torch.tensor([2.5, 4.25]))
    assert torch.allclose(matrix, 2.5 * torch.eye(2))


def liar(node, request, answer):
    """One site sends a huge vector."""
    reply = answer(request)
    found = wire.decode(reply)
    if node != 100 or found.kind != "update":
        return reply
    arrays = {name: np.full_like(array, 1e6) for name, array in found.arrays.items()}
    return wire.encode("update", found.fields, arrays)


def model_of(federation):
    return load_model(federation.coordinator / "run" / "model.safetensors")[1]


def moved(make, trim):
    """How far garbage of one site of five moves the model of one round."""
    models = []
    for fault in (None, liar):
        federation = make("dp-fedgd", names=FIVE, rounds=1)
        path = federation.coordinator / "federation.toml"
        path.write_text(path.read_text() + f"trim = {trim}\n")
        federation.run(fault)
        models.append((model_of(federation), federation))
    (honest, one), (spoiled, _) = models
    return float((honest - spoiled).abs().max()), one


def test_garbage_in_a_federation(tiny):
    far, plain = moved(tiny, 0)
    near, trimmed = moved(tiny, 1)
    assert far > 1e4
    assert near < 10  # of the order of the noise
    certs = [json.loads((f.coordinator / "run" / "certificate.json").read_text()) for f in (plain, trimmed)]
    assert certs[0]["epsilon"] == certs[1]["epsilon"]  # post-processing
    assert certs[0]["groups"] == certs[1]["groups"]


def test_too_few_answers_have_no_result(tiny):
    federation = tiny("dp-fedgd", names=FIVE, rounds=1)
    path = federation.coordinator / "federation.toml"
    path.write_text(path.read_text() + "trim = 2\n")
    federation.run(lambda node, request, answer: None if node == 100 and b"theta" in request else answer(request))
    assert "needs more than 4" in federation.progress("abandoned")[0]["why"]


def test_trimming_is_refused_under_masks_and_from_half_of_the_sites(tiny, tmp_path, capsys):
    federation = tiny("dp-fedgd", names=FIVE, trust="secure-aggregation")
    path = federation.coordinator / "federation.toml"
    path.write_text(path.read_text() + "trim = 1\n")
    with pytest.raises(SordinoError, match="trim: under masks"):
        federation.run()
    path.write_text(path.read_text().replace("trim = 1", "trim = 3"))
    with pytest.raises(SordinoError, match="below half"):
        federation.run()
    words = ["--sites", "a,b,c", "--features", "4", "--classes", "0,1", "--trim", "1"]
    assert main(["federate", "init", str(tmp_path / "masked"), *words]) == 2
    assert "trim: under masks" in capsys.readouterr().err
    assert main(["federate", "init", str(tmp_path / "open"), *words, "--trust", "untrusted-server"]) == 0
    assert "trim = 1" in (tmp_path / "open" / "federation.toml").read_text()

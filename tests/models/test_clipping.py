"""Laws of clipping of networks: sums against single examples, bounds as computed, evidence, and what is refused."""

import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from sordino import checks
from sordino.checks import report as rows
from sordino.checks import suites
from sordino.checks.mutants import normalises_by_the_last_layer
from sordino.checks.search import TRIALS
from sordino.core import SAFETY, Clipping, Query, Shard, Unit
from sordino.engines import reference, simulate
from sordino.errors import SordinoError
from sordino.evidence.certificate import certificate
from sordino.evidence.statement import statement
from sordino.evidence.verify import verify
from sordino.methods import build
from sordino.methods.clipping import with_clipping
from sordino.models.linear import Linear
from sordino.models.torch_model import TorchModel
from sordino.privacy.mechanisms.random import Seeded, source
from sordino.training.batch import together
from sordino.training.resolved import resolve
from sordino.training.spec import Spec
from sordino.version import __version__
from tests import support

sys.path.insert(0, str(Path(__file__).parent))
from test_arithmetic import drifting, moved, two_classes
from test_per_example import N, made, naive
from test_torch_model import MODES, flat_theta, mlp

pytestmark = pytest.mark.filterwarnings("ignore:mkldnn_matmul")  # of CPUs without bfloat16

LAWS = [Clipping.parse(law) for law in ("per-layer", "automatic", "automatic:2")]
SOME_NETS = ("linear, many entries", "conv2d, many channels", "embedding, padding", "layer norm", "used twice", "tied")


def by_hand(model, rows, clip, clipping, weight):
    """The sum as it is defined, example by example and layer by layer."""
    clip, ends = clip * (1 - SAFETY), {}
    for name, part in model.split(torch.arange(model.size)).items():
        ends[name] = part.flatten()
    total = torch.zeros(model.size, dtype=torch.float64)
    for row, share in zip(rows, weight, strict=True):
        if clipping.law == "automatic":
            total += share * row * clip / (row.norm() + clipping.gamma)
            continue
        wanted = clipping.layers or (1.0,) * len(model.layers)
        for layer, part in zip(model.layers, wanted, strict=True):
            at = torch.cat([ends[name] for name in layer])
            most = clip * part / math.sqrt(sum(other**2 for other in wanted))
            total[at] += share * row[at] * min(1.0, most / float(row[at].norm().clamp_min(1e-300)))
    return total


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SOME_NETS)
def test_sums_agree_with_single_examples(name, mode):
    net, shape, x, y = made(name)
    model = TorchModel(net, shape=shape, mode=mode, chunk=2)
    rows, theta, weight = naive(net, x, y), flat_theta(net), torch.linspace(1, 0.2, N).double()
    uneven = Clipping("per-layer", tuple(1.0 + k for k in range(len(model.layers))))
    scale = torch.rand(model.size, dtype=torch.float64) + 0.5
    for clipping in (*LAWS, uneven):
        for clip in (0.3 * float(rows.norm(dim=1).median()), 2 * float(rows.norm(dim=1).max())):
            have = model.clipped_sum(theta, Shard(x.flatten(1), y, weight), clip, clipping=clipping)
            want = by_hand(model, rows, clip, clipping, weight)
            torch.testing.assert_close(have, want, rtol=1e-9, atol=1e-12)
        have = model.clipped_sum(theta, Shard(x.flatten(1), y, weight), clip, scale, clipping)
        torch.testing.assert_close(have, by_hand(model, rows * scale, clip, clipping, weight), rtol=1e-9, atol=1e-12)
    assert sorted(name for layer in model.layers for name in layer) == sorted(model.trained)


def test_a_layer_is_a_module_and_tied_modules_are_one():
    assert TorchModel(mlp()).layers == (("0.weight", "0.bias"), ("2.weight", "2.bias"))
    net, shape, _, _ = made("tied")
    assert TorchModel(net, shape=shape).layers == (("words.weight", "out.bias"),)


def test_persons_and_leading_axes():
    model = TorchModel(mlp())
    theta, x, y = model.init().double(), torch.randn(3, 6, 6).double(), torch.randint(0, 3, (3, 6))
    for clipping in LAWS:
        add = partial(model.clipped_sum, theta, clip=0.3, clipping=clipping)
        whole = add(Shard(x, y, torch.ones(3, 6).double(), None, 2))
        for k in range(3):
            rows = naive(mlp().double(), x[k], y[k]).view(3, 2, -1).sum(1)
            torch.testing.assert_close(
                whole[k], by_hand(model, rows, 0.3, clipping, torch.ones(3)), rtol=1e-6, atol=1e-8
            )


# ------------------------------------------------------------------------------------------------------------- bounds


@pytest.mark.parametrize("clipping", [*LAWS, Clipping.parse("per-layer:1,1000")], ids=str)
@pytest.mark.parametrize(("mode", "autocast"), [*((mode, None) for mode in MODES), ("auto", torch.bfloat16)])
def test_one_record_moves_the_sum_by_at_most_the_clip(mode, autocast, clipping):
    """In float32 and bfloat16, by brute force: with and without every record, of all sizes."""
    net, shape, x, y = made("linear, many entries")
    model, theta = TorchModel(net.float(), shape=shape, mode=mode, autocast=autocast), flat_theta(net).float()
    x = (x.flatten(1) * 10.0 ** torch.linspace(-3, 3, N).unsqueeze(1)).float()
    longest = 0.0
    for clip in (1e-3, 1.0):
        whole = model.clipped_sum(theta, Shard(x, y, torch.ones(N)), clip, clipping=clipping)
        for k in range(N):
            mask = torch.ones(N).index_fill(0, torch.tensor(k), 0)
            less = model.clipped_sum(theta, Shard(x, y, mask), clip, clipping=clipping)
            longest = max(longest, float((whole - less).norm()) / clip)
            alone = model.clipped_sum(theta, Shard(x[k : k + 1], y[k : k + 1], torch.ones(1)), clip, clipping=clipping)
            for layer, bound in zip(model.layers, clipping.bounds(clip, len(model.layers)), strict=False):
                names = layer if clipping.law == "per-layer" else list(model.trained)
                own = torch.cat([part.flatten() for name, part in model.split(alone).items() if name in names])
                assert own.norm() <= bound
    assert 0.99 < longest <= 1 or clipping.gamma > 1  # where gamma is large, terms are shorter than the clip


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_rounding_of_later_rows_moves_nothing(autocast):
    """As for flat clipping; a record that adds v at theta = 0 is found from v = x/2 C / (x/sqrt(2) + gamma)."""
    model, clip, gamma = TorchModel(two_classes(), autocast=autocast), math.sqrt(2), 0.01

    def total(*rows):
        return model.clipped_sum(model.init(), Shard(*rows), clip, clipping=Clipping.parse("automatic"))

    x, y = drifting(10_000, total, term=lambda v: v * gamma / (clip / 2 - v / math.sqrt(2)))
    leaves, changes = moved(total, x, y)
    assert 0.98 * clip < leaves <= clip
    assert 1.96 * clip < changes <= 2 * clip


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e38])
@pytest.mark.parametrize("clipping", LAWS, ids=str)
def test_a_record_that_is_not_finite_says_nothing(clipping, bad):
    net, shape, x, y = made("conv2d")
    model, theta = TorchModel(net.float(), shape=shape), flat_theta(net).float()
    x = x.flatten(1).float()
    want = model.clipped_sum(theta, Shard(x[1:], y[1:], torch.ones(N - 1)), 0.5, clipping=clipping)
    x[0, 3] = bad
    have = model.clipped_sum(theta, Shard(x, y, torch.ones(N)), 0.5, clipping=clipping)
    assert (have - want).norm() <= 0.5
    if not math.isfinite(bad):
        torch.testing.assert_close(have, want)


@pytest.mark.parametrize(
    ("unit", "trials"),
    [(Unit.RECORD, checks.LEAST_TRIALS), pytest.param(Unit.PERSON, TRIALS, marks=pytest.mark.soak)],
)
def test_contracts_hold_and_reject_wrong_bounds(unit, trials):
    reports = checks.check_clipping(trials=trials, units=[unit])
    assert len(reports) == 6
    assert [problem for report in reports for problem in report.problems] == []


def test_a_mutant_that_passes_is_reported(monkeypatch):
    monkeypatch.setattr(suites, "CHECKED_CLIPPINGS", ("automatic",))
    monkeypatch.setitem(suites.OF_CLIPPINGS, "automatic", lambda method, model: (method, model))
    monkeypatch.setattr(rows, "reports_of", support.passing)  # all other contracts hold, as above
    wrong = checks.check_clipping(trials=checks.LEAST_TRIALS, units=[Unit.RECORD])
    assert [report.passed for report in wrong] == [False] * 2
    method = with_clipping(build("dp-fedgd"), Clipping.parse("automatic"))
    found = checks.sensitivity(*normalises_by_the_last_layer(method, checks.small_network()), "add-remove", trials=8)
    assert found[0].beyond


# -------------------------------------------------------------------------------------------------- runs and evidence


@pytest.mark.parametrize("batch", ["full", "poisson:8"])
@pytest.mark.parametrize("clipping", [LAWS[0], Clipping.parse("per-layer:1,2"), LAWS[1]], ids=str)
def test_engines_agree_and_certificates_name_the_law(clipping, batch):
    model, data = TorchModel(mlp(layers=(3, 4, 3))), support.classified((20,) * 3)
    method = with_clipping(build("dp-fedadam"), clipping)
    plan = support.plan_for(method, data, epsilon=4.0, rounds=3, batch=batch)
    theta = model.init().double()
    slow = list(reference.run(plan, model, data, Seeded(1), theta=theta))
    fast = list(simulate.run(plan, model, data, Seeded(1), theta=theta, shares=True))
    for a, b in zip(slow, fast, strict=True):
        torch.testing.assert_close(a.model, b.model, rtol=1e-9, atol=1e-9)
    cert = certificate(plan, source(None), version=__version__)
    assert cert["certified"]
    assert cert["queries"][0]["clipping"] == str(clipping)
    assert ("layer by layer" if clipping.law == "per-layer" else "automatic clipping") in statement(cert)
    assert verify(cert).problems == []
    for wrong in ("sideways", "automatic:-1", "per-layer:0,1"):
        altered = {**cert, "queries": [{**cert["queries"][0], "clipping": wrong}]}
        assert verify(altered).problems


def test_flat_certificates_stay_as_they_were():
    cert = certificate(support.plan_for("dp-fedgd", support.classified((20,) * 3)), source(None), version=__version__)
    assert "clipping" not in cert["queries"][0]


def test_a_spec_decides_the_law_of_single_runs_and_of_batches():
    values = {"method": "dp-fedadam", "model": "mlp", "clipping": "automatic"}
    runs = [resolve(Spec.of({**values, "lr": lr})) for lr in (0.1, 0.2)]
    laws = [run.method.stages[0].queries[0].clipping for run in runs]
    assert laws == [Clipping.parse("automatic")] * 2
    assert together(runs, torch.zeros(1)).stages[0].queries[0].clipping == laws[0]
    assert not runs[0].method.by_hand


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"method": "dp-fedgd", "clipping": "sideways"}, "unknown"),
        ({"method": "dp-fedgd", "clipping": "automatic"}, "is for networks"),
        (
            {"method": "dp-fedgd", "model": "mlp", "clipping": "per-layer:1,2,3"},
            r"3 bounds for 2 layers \(0.weight, 2.weight\)",
        ),
        ({"method": "dp-fedgd", "model": "mlp", "clipping": "automatic", "unit": "client"}, "at client level"),
        ({"method": "dp-fedgd", "model": "mlp", "clipping": "automatic", "quantile": 0.5}, "a quantile adapts"),
        ({"method": "dp-boost", "clipping": "automatic"}, "asks for no gradients"),
    ],
)
def test_what_is_refused(values, word):
    with pytest.raises(SordinoError, match=word):
        resolve(Spec.of(values)).build_model(64, 10)


def test_engines_refuse_models_that_do_not_serve_a_law():
    data = support.classified((20,) * 3)
    plan = support.plan_for(with_clipping(build("dp-fedgd"), LAWS[0]), data)
    with pytest.raises(SordinoError, match="clipping: per-layer is for networks, and Linear clips"):
        list(simulate.run(plan, Linear(3, 3), data, Seeded(0)))


def test_only_gradients_with_a_clip_have_a_law():
    for query in (partial(Query, "delta", 1.0), partial(Query, "gradient", math.inf)):
        with pytest.raises(SordinoError, match="for gradients with a finite clip"):
            query(clipping=LAWS[1])
    with pytest.raises(SordinoError, match="gamma belongs to automatic"):
        Clipping("flat", gamma=1.0)
